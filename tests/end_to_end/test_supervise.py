"""Runs that outlive their nodes: killed ones, ones that come back, faults that repeat."""

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.networks import Host, three_hosts
from tests.support.project import read_metrics
from tests.support.ranks import Case, run_alone
from tests.support.spawn import free_port, start_command
from tests.support.supervised import (
    SECONDS,
    entries,
    group_of,
    lose_node,
    make_supervised,
    ranks_of,
    slowed,
    steps_done,
    supervised,
    wait_until,
    words,
)
from yuan_train.checkpoint.in_memory import run_folder
from yuan_train.parallel.environment import holding

STEPS = 30
Curve = list[dict[str, Any]]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and a cluster of the unlike nodes a and b."""
    folder = tmp_path_factory.mktemp("supervised")
    make_supervised(folder, {"a": 2, "b": 1})
    return folder


@pytest.fixture(scope="module")
def alone(project: Path) -> Curve:
    """The steps of one process."""
    return run_alone(Case(project / "run.yaml", project / "alone", overrides=words(STEPS)))


def check_losses(folder: Path, alone: Curve) -> None:
    for found, wanted in zip(read_metrics(folder / "log"), alone, strict=False):
        assert found["step"] == wanted["step"]
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_node_is_killed_and_comes_back(project: Path, alone: Curve, tmp_path: Path) -> None:
    """The run goes on without it, and with it again; the losses are those of one process."""
    shutil.copytree(project, tmp_path / "project")
    with supervised(tmp_path / "project", tmp_path, *words(100_000), "checkpoint.every=5") as process:
        wait_until(lambda: steps_done(tmp_path) >= 7, tmp_path)
        # Whoever edits it meanwhile means a run that is yet to begin.
        (tmp_path / "project" / "run.yaml").write_text("model: [")
        (tmp_path / "down-b").touch()
        os.killpg(group_of("b", tmp_path), signal.SIGKILL)
        wait_until(lambda: [e.event for e in entries(tmp_path)] == ["started", "moved"], tmp_path)
        wait_until(lambda: steps_done(tmp_path) >= 14, tmp_path)
        shutil.copy(project / "run.yaml", tmp_path / "project")
        (tmp_path / "down-b").unlink()
        wait_until(lambda: [e.event for e in entries(tmp_path)][2:] == ["moved"], tmp_path)
        wait_until(lambda: steps_done(tmp_path) >= STEPS, tmp_path)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=SECONDS) == 0
    assert len(entries(tmp_path)) == 4, entries(tmp_path)
    started, without, again, stopped = entries(tmp_path)
    assert (started.nodes, without.nodes, again.nodes) == (["a", "b"], ["a"], ["a", "b"])
    assert without.reason.startswith("b went; rank 2 (b/0 on"), without.reason
    assert again.reason.startswith("b came: a step of"), again.reason
    assert again.forecast_after is not None and again.forecast_before is not None
    assert again.forecast_after < again.forecast_before == without.forecast_after
    assert stopped.event == "stopped"
    check_losses(tmp_path, alone)


@pytest.mark.slow
def test_a_lead_that_is_cut_off_comes_back_in(project: Path, alone: Curve, tmp_path: Path) -> None:
    """The other node goes on without it. When its link is back, it writes down nothing of its own start."""
    changes = (*words(100_000), "checkpoint.every=5", "train.timeout=4 s")
    with three_hosts() as hosts:
        network: dict[str, Host] = dict(zip(("a", "b", ""), hosts, strict=True))
        with supervised(project, tmp_path, *changes, network=network) as process:
            wait_until(lambda: steps_done(tmp_path) >= 7, tmp_path)
            network["a"].pull("eth0")
            wait_until(lambda: [e.nodes for e in entries(tmp_path)] == [["a", "b"], ["b"]], tmp_path)
            wait_until(lambda: steps_done(tmp_path) >= STEPS, tmp_path)
            network["a"].plug("eth0")
            wait_until(lambda: len(entries(tmp_path)) > 2, tmp_path)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=SECONDS) == 0
    found = entries(tmp_path)
    wanted = [("started", ["a", "b"]), ("moved", ["b"]), ("moved", ["a", "b"])]
    assert [(e.event, e.nodes) for e in found[:3]] == wanted
    assert found[1].reason.startswith("a went; ") and found[2].reason.startswith("a came: ")
    lines = read_metrics(tmp_path / "log")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    check_losses(tmp_path, alone)


@pytest.mark.slow
def test_a_lost_node_costs_a_few_steps(project: Path, alone: Curve, tmp_path: Path) -> None:
    """What it had done since the last step in its neighbour's memory; nothing is on disk yet."""
    keep = 4
    with supervised(project, tmp_path, *words(100_000), f"checkpoint.in_memory={keep}") as process:
        wait_until(lambda: steps_done(tmp_path) >= 10, tmp_path)
        time.sleep(random.Random(1).uniform(0, 1))
        (tmp_path / "down-b").touch()
        lose_node("b", tmp_path)
        done = steps_done(tmp_path)
        wait_until(lambda: [e.event for e in entries(tmp_path)] == ["started", "moved"], tmp_path)
        wait_until(lambda: steps_done(tmp_path) >= done + keep, tmp_path)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=SECONDS) == 0
    said = (tmp_path / "out").read_text()
    found = re.search(r"resumed from /dev/shm/\S+ after step (\d+)", said)
    assert "the newest checkpoint is in the memory of a; there is none on disk" in said and found, said
    assert done - keep <= int(found[1]) <= done
    check_losses(tmp_path, alone)
    assert not run_folder(tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_a_card_that_slows_is_planned_for(project: Path, alone: Curve, tmp_path: Path) -> None:
    """It gets less to do in the processes that there are, and no loss changes; `python -m tools.bench
    faults/slowed` has what that gains."""
    cluster = yaml.safe_load((project / "cluster.yaml").read_text())
    cluster["nodes"][0]["devices"] = 1
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    more = (*words(100_000), "checkpoint.every=20", "supervise.slow=2", f"--cluster={tmp_path}/cluster.yaml")
    with supervised(project, tmp_path, *more) as process:
        wait_until(lambda: steps_done(tmp_path) >= 30, tmp_path)
        ranks = [ranks_of(node, tmp_path) for node in ("a", "b")]
        with slowed("b", tmp_path):
            wait_until(lambda: [e.event for e in entries(tmp_path)] == ["started", "moved"], tmp_path)
            moved = entries(tmp_path)[-1]
            wait_until(lambda: steps_done(tmp_path) >= moved.step + 40, tmp_path)
            assert [ranks_of(node, tmp_path) for node in ("a", "b")] == ranks != [[], []]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=SECONDS) == 0
    lines = read_metrics(tmp_path / "log")
    # A shorter stage, of which the pauses are a larger part, may be found slower still.
    line = next(line for line in lines if "moved" in line)
    assert (moved.live_seconds, moved.live_bytes) == (line["moved"]["seconds"], line["moved"]["bytes"])
    assert (tmp_path / "log" / f"plan.step-{line['step'] - 1}.yaml").exists()
    assert moved.reason.startswith("b/0 computes ") and "(1.0 was planned for): a step of" in moved.reason
    assert moved.forecast_before is not None and moved.forecast_after is not None
    assert moved.forecast_after < 0.8 * moved.forecast_before
    for found, wanted in zip(lines, alone, strict=False):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


def test_wrong_input_of_the_ranks_ends_the_run(project: Path, tmp_path: Path) -> None:
    codes, said = agents_end(project, tmp_path, f"data.train=[{{prefix: {tmp_path}/nothing}}]")
    assert codes == [2, 2] and entries(tmp_path)[-1].event == "gave_up"
    assert all("nothing" in text.splitlines()[-1] for text in said), said


def test_the_same_fault_again_and_again_ends_the_run(project: Path, tmp_path: Path) -> None:
    """The loss is not finite after the first step, whatever is tried."""
    more = (*words(20), "optimizer.learning_rate=1e30", "supervise.attempts=2")
    with supervised(project, tmp_path, *more) as process:
        assert process.wait(timeout=SECONDS) == 1
    events = [entry.event for entry in entries(tmp_path)]
    # On a busy machine a node may come late, or be silent for so long that it counts as gone: such a start
    # counts for nothing.
    assert (events.count("fault"), events[-1]) == (1, "gave_up"), entries(tmp_path)
    assert len([one for one in events if one in ("started", "moved")]) >= 2
    assert "the same fault 2 times without a step in between" in entries(tmp_path)[-1].reason


def agents_end(project: Path, folder: Path, *more: str, nodes: str = "ab") -> tuple[list[int], list[str]]:
    """Exit codes and output of agents that something else has started, one on each node; the first one holds
    the store."""
    line = ["supervise", "--cluster", project / "cluster.yaml", "--config", project / "run.yaml", *words(2)]
    line += ["--meet", f"127.0.0.1:{free_port()}", f"log.directory={folder / 'log'}"]
    line += [f"checkpoint.directory={folder / 'checkpoints'}", *more]
    environment = {"OMP_NUM_THREADS": "1"}
    agents = [
        start_command([*line, "--this-node", node], folder / f"stderr-{node}", environment=environment)
        for node in nodes
    ]
    try:
        codes, said = zip(*(agent.wait(within_seconds=SECONDS) for agent in agents), strict=True)
    finally:
        for agent in agents:
            agent.kill()
    return list(codes), list(said)


@pytest.mark.parametrize(
    ("wrong", "expected", "nodes"),
    [
        ("train.global_batch_size=16", "b has another run than .*global_batch_size is 16, there 8;", [["a"]]),
        (
            "data.train=[{prefix: other}]",
            r"rank \d \(.*\) has another job than .*corpora",
            [["a"], ["a", "b"], ["a"]],
        ),
    ],
)
def test_a_node_that_comes_with_wrong_input(
    project: Path, tmp_path: Path, wrong: str, expected: str, nodes: list[list[str]]
) -> None:
    """Its agent ends, with what is wrong; the others go on, and stop only for what it cannot see itself."""
    (tmp_path / "corpus.bin").write_bytes((project / "corpus.bin").read_bytes()[2:] + b"\0\0")
    shutil.copy(project / "corpus.idx", tmp_path)
    log, environment = tmp_path / "log", {"OMP_NUM_THREADS": "1"}
    shutil.copy(project / "run.yaml", tmp_path)
    line = ["supervise", "--cluster", project / "cluster.yaml", "--config", tmp_path / "run.yaml"]
    line += ["--meet", f"127.0.0.1:{free_port()}", f"log.directory={log}", *words(100_000)]
    line += [f"checkpoint.directory={tmp_path / 'checkpoints'}", "supervise.gain=0", "supervise.slow=1000"]
    line += ["search.use_all_devices=true"]
    first = start_command([*line, "--this-node", "a"], tmp_path / "out", environment=environment)
    try:
        wait_until(lambda: steps_done(tmp_path) >= 2, tmp_path)
        wrong = wrong.replace("other", str(tmp_path / "corpus"))
        late = start_command([*line, wrong, "--this-node", "b"], tmp_path / "out-b", environment=environment)
        code, said = late.wait(within_seconds=SECONDS)
        assert code == 2 and re.search(expected, said), said
        goes_on = first.process.is_alive
        wait_until(lambda: not goes_on() or steps_done(tmp_path) > entries(tmp_path)[-1].step + 1, tmp_path)
    finally:
        first.process.terminate()
        code, said = first.wait(within_seconds=SECONDS)
    assert code == 0, said
    assert [e.nodes for e in entries(tmp_path)[:-1]] == nodes


def test_agents_that_something_else_has_started(project: Path, tmp_path: Path) -> None:
    codes, said = agents_end(project, tmp_path)
    assert codes == [0, 0], said
    assert [entry.event for entry in entries(tmp_path)] == ["started", "finished"]


def test_agents_of_another_run_in_its_directory(project: Path, tmp_path: Path) -> None:
    """The first of them is refused before it meets the others: journal and plans are the other run's."""
    with holding(tmp_path / "log", ".supervised", "another supervise"):
        (code,), (said,) = agents_end(project, tmp_path, nodes="a")
    assert code == 2 and re.search("in use by another supervise: process .*Wait for its end", said), said
    assert not list((tmp_path / "log").iterdir())
