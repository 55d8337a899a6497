"""Links between nodes: which a plan has, what messages take over them, and which are told to be slow."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.project import on_devices, parse_plan, read_metrics, run_config, with_forecast
from tests.support.ranks import Case, run_cases
from tests.support.spawn import patience
from tools.testbed.nodes import PERIOD_US, Node, NodeSpec, NoTestbed, make_nodes
from tools.testbed.run import rank_environment
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import save_plan
from yuan_train.parallel.grid import Grid
from yuan_train.report.run_log import measured_pace, read_run, slow_links
from yuan_train.report.run_page import run_lines
from yuan_train.train.trace import find_links

EVERY = 3
"""Steps between two measurements in the runs of these tests."""


def links_of(lines: Sequence[Any]) -> list[Any]:
    return [line["link_seconds"] for line in lines if line.get("link_seconds")]


def plan_on(run_file: Path, text: str, nodes: str) -> Plan:
    """A plan whose ranks are on nodes that are called by a letter each."""
    plan = with_forecast(parse_plan(run_config(run_file), text), seconds=[(0.01, 0.02)])
    return on_devices(plan, *(f"{node}/{rank}" for rank, node in enumerate(nodes)))


# --- which there are -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nodes", "expected"),
    [
        ("1x8: 3@0 | 3@1", "aa", []),
        ("1x8: 3@0 | 3@1", "ab", [["a -> b", "b -> a"]]),
        # Of three nodes in a row the one in the middle has two links, which wait for each other; so do the
        # ends, which share the tied embedding.
        ("1x8: 2@0 | 2@1 | 2@2", "abc", [["a -> b", "b -> a"], ["b -> c", "c -> b"], ["a - c"]]),
        ("1x8: 2@0 | 2@1 | 1@2 | 1@3", "aabb", [["a -> b", "b -> a"]]),
        ("1x4: 6@0 / 1x4: 6@1", "ab", [["a - b"]]),
        # What crosses as messages is not measured as a sum again.
        ("1x4: 3@0 | 3@1 / 1x4: 3@2 | 3@3", "abba", [["a -> b", "b -> a"]]),
        (
            "1x4: 3@0 | 3@1 / 1x4: 3@2 | 3@3",
            "abcd",
            [["a -> b", "b -> a", "c -> d", "d -> c"], ["a - b - c - d"], ["a - c", "b - d"]],
        ),
        ("1x3: 6@0 / 1x3: 6@1 / 1x2: 6@2", "abc", [["a - b - c"]]),
    ],
)
def test_each_pair_of_nodes_is_measured_once(
    run_file: Path, text: str, nodes: str, expected: list[list[str]]
) -> None:
    rounds = find_links(Grid(plan_on(run_file, text, nodes)))
    assert [[name for link in own for name in link.names] for own in rounds] == expected


def test_measurements_are_logged_and_change_no_loss(run_file: Path, tmp_path: Path) -> None:
    names = {"messages": ("1x8: 2@0 | 2@1 | 2@2", "abc"), "sums": ("1x3: 6@0 / 1x3: 6@1 / 1x2: 6@2", "aab")}
    cases = {
        (name, every): Case(
            run_file,
            tmp_path / f"{name}-{every}",
            plan_on(run_file, text, nodes),
            ("train.steps=4", "validation.every=0", f"train.links_every={every}"),
        )
        for name, (text, nodes) in names.items()
        for every in (0, 2)
    }
    run_cases(list(cases.values()))
    found = {key: read_metrics(case.folder) for key, case in cases.items()}
    for name in names:
        assert [line["loss"] for line in found[name, 0]] == [line["loss"] for line in found[name, 2]]
        assert not any("link_seconds" in line for line in found[name, 0])
        assert [line["step"] for line in found[name, 2] if "link_seconds" in line] == [2, 4]
    assert list(found["messages", 2][1]["link_seconds"]) == ["a -> b", "b -> a", "b -> c", "c -> b", "a - c"]
    assert list(found["sums", 2][1]["link_seconds"]) == ["a - b"]
    for lines in found.values():
        assert all(0 < seconds < 60 for line in lines for seconds in line.get("link_seconds", {}).values())


# --- which are slow --------------------------------------------------------------------------------------


def measured(steps: int, seed: int, factor: Callable[[int], float], every: int = 10) -> list[dict[str, Any]]:
    """Lines of a run; each measurement is late at times, by as much as a queue holds."""
    chance = random.Random(seed)

    def seconds(times: float) -> float:
        late = chance.expovariate(1 / 0.05) if chance.random() < 0.1 else 0.0
        return 0.042 * times * chance.uniform(1.0, 1.3) + late

    return [
        {"step": step}
        | ({} if step % every else {"link_seconds": {"a -> b": seconds(factor(step)), "b -> a": seconds(1)}})
        for step in range(1, steps + 1)
    ]


def first_named(lines: Sequence[dict[str, Any]]) -> int | None:
    return next(
        (lines[end - 1]["step"] for end in range(1, len(lines) + 1) if slow_links(links_of(lines[:end]))),
        None,
    )


def test_a_quiet_run_names_no_link() -> None:
    assert not slow_links([])
    late = [first_named(measured(1000, seed, lambda step: 1.0)) for seed in range(10)]
    assert late == [None] * 10


def test_a_link_cut_to_a_tenth_is_named_within_three_measurements() -> None:
    for seed in range(10):
        lines = measured(1000, seed, lambda step: 10.0 if step > 500 else 1.0)
        named = first_named(lines)
        assert named == 530, "a single slow message is no slow link"
        ((name, times),) = slow_links(links_of(lines)).items()
        assert name == "a -> b" and 7 < times < 15


def test_a_link_that_is_well_again_or_no_longer_used_is_not_named() -> None:
    lines = measured(1000, 0, lambda step: 10.0 if 300 < step <= 600 else 1.0)
    assert slow_links(links_of(lines[:600])) and not slow_links(links_of(lines[:620]))
    other = [{"step": 601 + i, "link_seconds": {"a -> c": 0.04}} for i in range(3)]
    assert not slow_links(links_of(lines[:600] + other))


def test_show_names_the_link(tmp_path: Path) -> None:
    more = {"loss": 1.0, "step_seconds": 1.0}
    for after, is_told in ((1.0, False), (10.0, True)):
        times = {True: after, False: 1.0}
        lines = [line | more for line in measured(100, 0, lambda step, times=times: times[step > 50])]
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        shown = "\n".join(run_lines(read_run(tmp_path)))
        assert ("slow links   a -> b " in shown) == is_told
        assert (" times as long for a message as at its best" in shown) == is_told


# --- on nodes with real links ----------------------------------------------------------------------------

SPECS = (NodeSpec(name="a", cpu=0.8, network=100e6 / 8), NodeSpec(name="b", cpu=0.8, network=100e6 / 8))
STEPS = 400


def steps_of(log: Path) -> list[dict[str, Any]]:
    return read_metrics(log) if (log / "metrics.jsonl").exists() else []


def wait_for(log: Path, step: int, processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for a step; the newest one."""
    deadline = time.monotonic() + patience(120)
    while not (lines := steps_of(log)) or lines[-1]["step"] < step:
        assert all(process.poll() is None for process in processes), "a rank has ended"
        assert time.monotonic() < deadline, f"no step {step}"
        time.sleep(0.1)
    return lines[-1]["step"]


def cut_to_a_tenth(node: Node) -> None:
    """Shape both ends of a node's link again."""
    for end, namespace in node.host.ends.items():
        rate = f"{round(node.spec.network * 8 / 10)}bit"
        words = f"tc -n {namespace} qdisc change dev {end} root tbf rate {rate} burst 128kb latency 100ms"
        subprocess.run(words.split(), check=True)


def slow_card(node: Node, share: float) -> None:
    """Give a node another share of its core."""
    text = f"{round(share * PERIOD_US)}"
    if (node.quota / "cpu.max").exists():
        (node.quota / "cpu.max").write_text(f"{text} {PERIOD_US}")
    else:
        (node.quota / "cpu.cfs_quota_us").write_text(text)


@contextmanager
def training(
    nodes: Sequence[Node], run_file: Path, plan: Path, log: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    changes = [f"train.steps={STEPS}", f"log.directory={log}", "validation.every=0", "log.to=[]"]
    words = ["train", "--config", str(run_file), "--plan", str(plan), *changes, f"train.links_every={EVERY}"]
    with (log.parent / "output").open("wb") as output:
        yield [
            node.start(
                [sys.executable, "-m", "yuan_train", *words],
                environment=rank_environment(rank, nodes),
                output=output,
            )
            for rank, node in enumerate(nodes)
        ]


@pytest.mark.slow
def test_a_slow_card_is_no_slow_link_and_a_link_cut_in_mid_run_is_named(
    run_file: Path, tmp_path: Path
) -> None:
    plan, log = plan_on(run_file, "1x8: 3@0 | 3@1", "ab"), tmp_path / "log"
    save_plan(tmp_path / "plan.yaml", plan)
    try:
        with make_nodes(SPECS) as nodes, training(nodes, run_file, tmp_path / "plan.yaml", log) as processes:
            slowed = wait_for(log, 40, processes)
            slow_card(nodes[1], SPECS[1].cpu / 4)
            well = wait_for(log, slowed + 40, processes)
            slow_card(nodes[1], SPECS[1].cpu)
            cut = wait_for(log, well + 20, processes)
            cut_to_a_tenth(nodes[1])
            wait_for(log, cut + 8 * EVERY, processes)
    except NoTestbed as error:
        pytest.skip(str(error))
    lines = steps_of(log)
    quiet = [line for line in lines if line["step"] <= cut]
    assert first_named(quiet) is None, "neither a quiet run nor a slow card has a slow link"
    pace = measured_pace(plan, [line for line in lines if line["step"] <= well])
    assert pace[1] / pace[0] > 1.5 or pace[0] < 1 / 1.5, "the card was slow"
    named = first_named(lines)
    assert named is not None and named <= cut + 5 * EVERY
    found = slow_links(links_of(lines))
    assert set(found) <= {"a -> b", "b -> a"} and all(4 < times < 20 for times in found.values())
