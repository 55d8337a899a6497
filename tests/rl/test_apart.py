"""Engines on cards of their own, under unlike plans: in sync mode as one process; async within its bound."""

from __future__ import annotations

import os
import queue
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml

from tests.support.commands import Refuse
from tests.support.rl import (
    RLCase,
    assert_close,
    assert_same_run,
    read_lines,
    roles_of,
    run_cases_of_rank,
    run_rl,
    run_rl_cases,
    write_rl,
)
from tests.support.spawn import process_of, spawn, start_ranks, wait_for_step
from yuan_train.config.errors import ConfigError, TrainingError
from yuan_train.config.rl import load_rl
from yuan_train.config.rl_plan import save_rl_plan
from yuan_train.parallel import transfer
from yuan_train.parallel.transfer import RankLink
from yuan_train.rl.apart import (
    Answered,
    Desk,
    Offers,
    RemoteCollector,
    _Server,  # pyright: ignore[reportPrivateUsage]
)
from yuan_train.rl.experience import Sample, Ticket
from yuan_train.rl.generator import EngineClock, GenerationEngine, NotFiniteDraw, SamplingParams
from yuan_train.rl.job import check_supported
from yuan_train.rl.roles import Channel, Requests
from yuan_train.supervise import launched

FEW = ("train.steps=3", "train.precision=bf16", "optimizer.learning_rate=1e-6", "optimizer.warmup_steps=1")


def test_roles_apart_train_as_one_process_does(tmp_path: Path) -> None:
    path = write_rl(tmp_path)
    measured = (
        f"data.evaluation={tmp_path / 'prompts.jsonl'}",
        "evaluation={every: 1, samples: 4, temperature: 1.0}",
    )
    cases = {
        "sync": (0, measured),
        "async": (2, ("train.steps=4", "algorithm.filter=zero_variance")),
        "changed": (1, FEW),
        "whole": (1, (*FEW, "sync=full")),
    }
    run_rl_cases(
        [
            RLCase(path, tmp_path / name, roles_of(path, staleness=age), more)
            for name, (age, more) in cases.items()
        ]
    )
    run_rl(RLCase(path, tmp_path / "alone", overrides=measured))
    alone = read_lines(tmp_path / "alone")
    assert read_lines(tmp_path / "sync", "samples.jsonl") == read_lines(tmp_path / "alone", "samples.jsonl")
    # What is measured are the weights behind the step, which are new to engines; each step moves the figures.
    figures = [line["evaluation"] for line in alone]
    assert figures[0] != figures[1]
    assert [line["evaluation"] for line in read_lines(tmp_path / "sync")] == figures
    curve = read_lines(tmp_path / "sync")
    assert_close(curve, alone, "loss", "grad_norm", "reward", "entropy_estimate")
    for found, expected in zip(curve, alone, strict=True):
        assert found["staleness_max"] == 0 and found["log_prob_gap"]["max"] < 1e-12
        # An engine's groups of slots are those of its plan: all answers of a batch at once, as alone.
        assert found["rounds"] == expected["rounds"] > 0
    curve = read_lines(tmp_path / "async")
    assert [line["staleness_max"] for line in curve] == [0, 1, 2, 2]
    assert all(line["sync_bytes"] > 0 for line in curve)
    assert curve[-1]["next_ticket"] == 4 * 2 + sum(line["groups_filtered"] for line in curve)
    # Few bits of bf16 change in a small step. Engines that are sent no others draw as those that have all.
    changed, whole = (read_lines(tmp_path / name) for name in ("changed", "whole"))
    assert read_lines(tmp_path / "changed", "samples.jsonl") == read_lines(
        tmp_path / "whole", "samples.jsonl"
    )
    assert [line["grad_norm"] for line in changed] == [line["grad_norm"] for line in whole]
    first, *later = (line["sync_bytes"] for line in changed)
    assert [line["sync_bytes"] for line in whole] == [first] * 3 and max(later) < 0.2 * first


def test_the_bound_on_staleness_holds_where_a_resumed_run_has_larger_batches(tmp_path: Path) -> None:
    """Tickets are issued from where the run stands, and not from what its batches would have taken so far."""
    few, more = (write_rl(tmp_path / name) for name in ("few", "more"))
    document = yaml.safe_load(more.read_text())
    document["train"]["prompts_per_step"] = 4
    more.write_text(yaml.safe_dump(document))
    larger = roles_of(more, staleness=1, policy="4x4: 1@0 | 3@1", engines="8x1: 1@0 | 3@1 / 8x1: 4@2")
    kept = (f"checkpoint.directory={tmp_path / 'c'}",)
    run_rl_cases(
        [
            RLCase(few, tmp_path, roles_of(few, staleness=1), (*kept, "train.steps=4")),
            RLCase(more, tmp_path, larger, (*kept, "train.steps=8")),
        ]
    )
    lines = read_lines(tmp_path)
    assert [line["staleness_max"] for line in lines] == [0, 1, 1, 1, 0, 1, 1, 1]
    assert [line["next_ticket"] for line in lines] == [2, 4, 6, 8, 12, 16, 20, 24]


def run_noting_tickets(rank: int, case: RLCase) -> None:
    """What engines are asked is noted beside the log."""
    issue = RemoteCollector._issue

    def note(self: RemoteCollector, tickets: Any, params: Any) -> None:
        if self._engines.is_controller:
            with (case.folder / "asked").open("a") as file:
                file.writelines(f"{ticket.number}\n" for ticket in tickets)
        issue(self, tickets, params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteCollector, "_issue", note)
        run_cases_of_rank(rank, [case])


def test_engines_are_asked_for_no_batch_behind_the_last(tmp_path: Path) -> None:
    """A run need not wait for answers that nobody trains."""
    path = write_rl(tmp_path)
    spawn(run_noting_tickets, 5, RLCase(path, tmp_path, roles_of(path, staleness=2), ("train.steps=3",)))
    assert (tmp_path / "asked").read_text().split() == [str(number) for number in range(6)]
    assert [line["staleness_max"] for line in read_lines(tmp_path)] == [0, 1, 2]


def run_slowly(rank: int, case: RLCase, planned: int) -> None:
    """An engine whose first batch takes longer than train.timeout."""
    generate, waits = GenerationEngine.generate, [6.0, 0.0]

    def slowly(self: GenerationEngine, *arguments: Any) -> list[Sample]:
        own = self._num_groups  # pyright: ignore[reportPrivateUsage]
        assert own == planned, "groups of slots are those of the plan"
        time.sleep(waits.pop(0))
        return generate(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationEngine, "generate", slowly)
        run_cases_of_rank(rank, [case])


def test_work_that_takes_longer_than_the_timeout_of_a_rank_is_no_fault(tmp_path: Path) -> None:
    """Two ranks of the policy wait for two of an engine, which draw for 6 s, and these for the scores, for as
    long; no rank waits longer than 5 s for one that is not at work."""
    path = write_rl(tmp_path)
    (tmp_path / "judge.py").write_text(
        "import time\n\n\ndef judge(ticket, sample):\n"
        "    time.sleep(6 * (ticket == sample == 0))\n    return float(sample % 2)\n"
    )
    reward = f"reward={{functions: [{{python: '{tmp_path / 'judge.py'}:judge'}}], timeout: 60 s}}"
    roles = roles_of(path, staleness=0, engines="8x1: 1@0 | 3@1")
    limits = ("train.timeout=5 s", "train.startup_timeout=60 s")
    planned = roles.plans["generation"].pipelines[0].num_micro_batches
    spawn(run_slowly, 4, RLCase(path, tmp_path, roles, (reward, *limits)), planned)
    first, second = read_lines(tmp_path)
    assert first["scoring_seconds"] > 6 and first["generation_seconds"] > 6
    assert second["step_seconds"] < first["step_seconds"] and second["groups_failed"] == 0


@pytest.mark.parametrize("victims", [(3,), pytest.param((0, 1, 2, 3, 4), marks=pytest.mark.slow)])
def test_a_lost_rank_ends_all_roles_and_resumed_it_is_the_same_run(
    tmp_path: Path, victims: tuple[int, ...]
) -> None:
    """Sync mode, killed by SIGKILL at random moments: each other rank ends by itself, and names its role and
    whom it missed. Metrics, samples and weights are those of a run that nobody killed, to the bit."""
    last = 6 * len(victims) + 1
    path, steps = write_rl(tmp_path), f"train.steps={last}"
    roles = roles_of(path, staleness=0)
    save_rl_plan(tmp_path / "plan.yaml", roles)

    def changes(folder: Path) -> tuple[str, ...]:
        return (f"checkpoint.directory={folder / 'c'}", "checkpoint.every=1", steps)

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    words = [*words_of(path, tmp_path, killed), *changes(killed)]
    for victim in victims:
        before = num_steps(killed)
        with start_ranks(words, tmp_path, 5) as ranks:
            # The first step takes several times as long as those that follow: in as much the run could end.
            wait_for_step(killed, before + 2, lambda: all(rank.process.is_alive() for rank in ranks))
            time.sleep(random.random() * read_lines(killed)[-1]["step_seconds"])
            ranks[victim].kill()
            told = {n: rank.wait(within_seconds=10) for n, rank in enumerate(ranks) if n != victim}
        check_messages(told, victim)
    run_rl_cases([RLCase(path, folder, roles, changes(folder)) for folder in (killed, whole)])
    assert_same_run(killed, whole, f"c/step-{last:08}")


def words_of(path: Path, folder: Path, log: Path) -> list[str | Path]:
    """The command for a run under the plan in a folder."""
    return ["rl", "--config", path, "--plan", folder / "plan.yaml", f"log.directory={log}"]


def num_steps(folder: Path) -> int:
    """Whole lines of metrics.jsonl."""
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def check_messages(told: dict[int, tuple[int, str]], victim: int) -> None:
    """Exit codes and stderr of those that are left, of 2 ranks of the policy and 3 of engines: whoever missed
    a rank says so under the name of its role, and all say who is the culprit."""
    for number, (code, said) in told.items():
        role = "policy (its rank 0 is rank 0" if number < 2 else "generation (its rank 0 is rank 2"
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert code == 1 and errors and "Traceback" not in said, said
        assert re.match(
            rf"error: the run ends: rank {victim}( \(.*\))?: (does not answer|is gone)", errors[-1]
        )
        for line in errors[:-1]:
            assert line.startswith(f"error: {role} of the job): "), line
            assert re.search(r"ranks? \d.* (is|are) gone or stuck", line), line


@pytest.mark.parametrize(
    "staleness, weights", [(0, "between_batches"), (1, "between_batches"), (1, "in_flight")]
)
def test_a_run_goes_on_with_the_engines_that_are_left(tmp_path: Path, staleness: int, weights: str) -> None:
    """A rank of an engine of two is killed: the other rank ends, and the other engine answers what was asked.
    In sync mode answers stay those of one process. When it is killed as well, the run ends."""
    path = write_rl(tmp_path)
    save_rl_plan(tmp_path / "plan.yaml", roles_of(path, staleness=staleness))
    log = tmp_path / "log"
    words = words_of(path, tmp_path, log)
    changes = ["generation.on_lost_engine=go_on", "train.steps=100000", f"generation.weights={weights}"]
    with start_ranks([*words, *changes], tmp_path, 5) as ranks:
        for victim in (3, 4):
            wait_for_step(log, num_steps(log) + 2, ranks[0].process.is_alive)
            ranks[victim].kill()
        told = {n: ranks[n].wait(within_seconds=10) for n in (0, 1, 2)}
    assert [code for code, _ in told.values()] == [1, 1, 1]
    errors = told[0][1]
    wanted = "engine 0 (generation rank 0 (rank 2 of the job), generation rank 1 (rank 3 of the job)) is l"
    assert wanted in errors
    assert "going on with 1 of 2 engines" in errors
    assert "generation rank 2 (rank 4 of the job) is gone or stuck" in errors.splitlines()[-1]
    curve = read_lines(log)
    assert [line["next_ticket"] for line in curve] == [2 * line["step"] for line in curve]
    assert max(line["staleness_max"] for line in curve) == staleness
    if staleness == 0:
        run_rl(RLCase(path, tmp_path / "alone", overrides=(f"train.steps={len(curve)}",)))
        answers = read_lines(tmp_path / "alone", "samples.jsonl")
        assert read_lines(log, "samples.jsonl") == answers[: len(read_lines(log, "samples.jsonl"))]


@pytest.mark.parametrize("on_lost, steps", [("stop", 100_000), ("go_on", 6)])
def test_sigterm_of_an_engine_stops_the_run_unless_it_may_be_lost(
    tmp_path: Path, on_lost: str, steps: int
) -> None:
    """As its node gets it that somebody else needs: the policy saves."""
    path, log, saved = write_rl(tmp_path), tmp_path / "log", tmp_path / "c"
    engines = "4x1: 4@0 / 4x1: 4@1"
    save_rl_plan(tmp_path / "plan.yaml", roles_of(path, staleness=0, policy="2x4: 4@0", engines=engines))
    words = [*words_of(path, tmp_path, log), f"generation.on_lost_engine={on_lost}", f"train.steps={steps}"]
    with start_ranks([*words, f"checkpoint.directory={saved}"], tmp_path, 3) as ranks:
        wait_for_step(log, 1, ranks[0].process.is_alive)
        ranks[1].process.terminate()
        told = [rank.wait(within_seconds=60) for rank in ranks]
    assert [code for code, _ in told] == [0, 0, 0], told
    stopped = [re.findall(r"the run has stopped: rank 1 \(.*\): got SIGTERM", said) for _, said in told]
    assert [len(found) for found in stopped] == [int(on_lost == "stop")] * 3, told
    assert num_steps(log) == steps or on_lost == "stop"
    assert (saved / f"step-{num_steps(log):08}").exists()


def test_what_fails_in_one_role_ends_the_other(tmp_path: Path) -> None:
    """An engine draws with weights that are not finite: the policy says so, with ticket and checkpoint, and
    the engine repeats it."""
    path = write_rl(tmp_path)
    save_rl_plan(tmp_path / "plan.yaml", roles_of(path, staleness=0, policy="2x4: 4@0", engines="8x1: 4@0"))
    changes = ["optimizer.learning_rate=1e30", "train.precision=fp32", "checkpoint.every=1"]
    words = [*words_of(path, tmp_path, tmp_path / "log"), *changes, f"checkpoint.directory={tmp_path / 'c'}"]
    with start_ranks(words, tmp_path, 2) as ranks:
        told = [rank.wait(within_seconds=60) for rank in ranks]
    assert [code for code, _ in told] == [1, 1]
    # Torch may write of its store afterwards.
    policy, engine = (found[0] for _, errors in told if (found := re.findall("^error: .*", errors, re.M)))
    wanted = "step 2: engine 0: ticket 2, answer 0: the log-probability of token 0 is nan"
    assert wanted in policy and "last good checkpoint is that of step 1" in policy
    assert "the run ends: rank 0 (policy rank 0" in engine and wanted in engine
    assert {line["step"] for line in read_lines(tmp_path / "log", "samples.jsonl")} == {1}


@contextmanager
def killed_while_groups_are_made() -> Iterator[None]:
    transfer.dist.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    yield


def test_a_rank_that_is_killed_while_the_groups_of_its_role_are_made_is_named(tmp_path: Path) -> None:
    """Also by the other role, which waits for it in a link."""
    path = write_rl(tmp_path)
    save_rl_plan(
        tmp_path / "plan.yaml", roles_of(path, staleness=0, policy="2x4: 2@0 | 2@1", engines="8x1: 4@0")
    )
    words = words_of(path, tmp_path, tmp_path / "log")
    with start_ranks(words, tmp_path, 3, around={1: killed_while_groups_are_made}) as ranks:
        assert ranks[1].wait(within_seconds=60)[0] == -signal.SIGKILL
        told = [ranks[rank].wait(within_seconds=10) for rank in (0, 2)]
    for code, said in told:
        assert code == 1 and "rank 1 (policy rank 1 on " in said and "does not answer: killed" in said, said


def test_in_flight_engines_take_weights_and_tickets_between_two_rounds(tmp_path: Path) -> None:
    """Two engines, one of two stages, that draw tickets themselves: each answer is there once, none is older
    than the bound, and evaluations are of the weights that were published. What is drawn before any weights
    come is what is drawn in between batches."""
    path = write_rl(tmp_path)
    measured = (
        f"data.evaluation={tmp_path / 'prompts.jsonl'}",
        "evaluation={every: 2, samples: 4, temperature: 1.0, at_start: true}",
    )
    flight = ("generation.weights=in_flight", "train.steps=4", "algorithm.filter=zero_variance")
    logs = {"flight": (*flight, *measured), "batches": ("train.steps=1",)}
    roles = roles_of(path, staleness=2)
    run_rl_cases([RLCase(path, tmp_path / name, roles, more) for name, more in logs.items()])
    curve = read_lines(tmp_path / "flight")
    assert [line["step"] for line in curve] == [1, 2, 3, 4]
    assert curve[-1]["next_ticket"] == 4 * 2 + sum(line["groups_filtered"] for line in curve)
    assert max(line["staleness_max"] for line in curve) <= 2 and curve[0]["staleness_max"] == 0
    assert all(0 < line["slots_filled"] <= 1 and line["rounds"] > 0 for line in curve)
    first, other = (read_lines(tmp_path / name, "samples.jsonl")[0] for name in logs)
    assert first == other
    (line,) = run_rl(RLCase(path, tmp_path / "alone", overrides=("train.steps=1", *measured)))
    assert line["evaluation_at_start"] == curve[0]["evaluation_at_start"]


@dataclass
class Counter:
    """A store of one process."""

    held: dict[str, Any] = field(default_factory=dict[str, Any])

    def add(self, key: str, amount: int) -> int:
        self.held[key] = self.held.get(key, 0) + amount
        return self.held[key]

    def set(self, key: str, value: str) -> None:
        self.held[key] = value

    def get(self, key: str) -> str:
        return self.held[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.held for key in keys)


def test_engines_draw_each_ticket_once_and_those_of_a_lost_one_are_known() -> None:
    store = cast(Any, Counter())
    offers, params = Offers(store, 2), SamplingParams(seed=0, max_new_tokens=4, stop_ids=frozenset())
    ends = [(Mail(), Mail()) for _ in range(2)]
    desks: list[Desk] = []
    for number, (here, there) in enumerate(ends):
        here.other, there.other = there, here
        desks.append(Desk(Channel(cast(RankLink, there), 0), store, number))
    channels = [Channel(cast(RankLink, here), 0) for here, _ in ends]

    def offer(*numbers: int) -> None:
        message = ("offer", offers.make([Ticket(n, (1,), 2) for n in numbers], params))
        for channel in channels:
            channel.send(message)

    def drawn(engine: int, free: int) -> list[int]:
        return [order[1].number for order in desks[engine].orders(free, wait=True)]

    offer(10, 11, 12, 13)
    assert drawn(0, 2) == [10] and drawn(1, 4) == [11, 12] and drawn(0, 1) == [13]
    assert offers.lost([10, 11, 12, 13], left=(0, 1)) == []
    assert offers.lost([10, 11, 12, 13], left=(1,)) == [10, 13]
    # What is asked for again is behind all that is offered.
    offer(10)
    assert drawn(1, 1) == [10] and offers.lost([10, 11], left=(1,)) == []
    # One that is slow leaves the last ones of an offer to others, until it hears that it need not; never all.
    channels[1].send(("leave", 3))
    offer(20, 21, 22, 23, 24)
    offer(30, 31)
    found: list[int] = []
    while len(found) < 3:
        found += drawn(1, 8 - 2 * len(found))
    assert found == [20, 21, 30] and not desks[1].has_news(8)
    channels[1].send(("leave", 0))
    assert drawn(1, 2) == [22] and drawn(0, 4) == [23, 24] and drawn(0, 8) == [31]
    assert not desks[1].has_news(8)
    channels[0].send(("weights", 3))
    assert desks[0].orders(0, wait=True) == [("weights", 3)]
    channels[0].send(("stop",))
    assert desks[0].orders(0, wait=True) == [("stop",)]


def test_engines_leave_tickets_to_faster_ones_by_how_long_they_would_take() -> None:
    offers = Offers(cast(Any, Counter()), 3)

    def tell(engine: int, seconds: float, tokens: int) -> None:
        samples = [Sample(engine, n, (1,) * (tokens - n), (0.0,) * (tokens - n), "stop") for n in range(2)]
        offers.hear(engine, Answered(samples, 0, seconds, 100.0, 0.0, 4))

    tell(0, 10.0, 300)
    tell(1, 20.0, 200)
    assert offers.leaves(1, (0, 1, 2)) == 0, "nobody knows how fast the third is"
    tell(2, 40.0, 400)
    # A round takes 0.1, 0.2 and 0.4 s, the longest answer to a ticket 300 tokens in the mean, and all engines
    # draw 0.175 tickets a second: 5.25 and 15.75 while these need longer.
    assert [offers.leaves(engine, (0, 1, 2)) for engine in range(3)] == [0, 3, 8]
    # Without the fastest one: 0.075 a second, 4.5 while the other needs longer.
    assert [offers.leaves(engine, (1, 2)) for engine in (1, 2)] == [0, 2]


@dataclass
class Mail:
    """A link's end without processes: what is sent waits for the other end, and is held until waited for."""

    arriving: queue.SimpleQueue[torch.Tensor] = field(default_factory=queue.SimpleQueue[torch.Tensor])
    other: Mail | None = None
    held: int = 0

    def send(self, tensor: torch.Tensor, receiver: int) -> Callable[[], None]:
        assert self.other is not None
        self.other.arriving.put(tensor.clone())
        self.held += 1

        def wait() -> None:
            self.held -= 1

        return wait

    def receive(self, tensor: torch.Tensor, sender: int) -> Callable[[], None]:
        return lambda: None if tensor.copy_(self.arriving.get()) is tensor else None


def test_messages_that_were_read_are_let_go() -> None:
    """As a run sends them: weights and tickets, a batch ahead, and answers. What is held does not grow."""
    ends = Mail(), Mail()
    ends[0].other, ends[1].other = ends[1], ends[0]
    controller, engine = (Channel(cast(RankLink, end), 0) for end in ends)
    controller.send(("generate", 0))
    held: list[tuple[int, int]] = []
    for step in range(40):
        for message in (("weights", step), ("generate", step + 1)):
            controller.send(message)
        assert engine.receive() == ("generate", step)
        engine.send({"answers": step})
        assert controller.receive() == {"answers": step}
        assert engine.receive() == ("weights", step)
        held.append((ends[0].held, ends[1].held))
    assert held[9] == held[39] == (4, 2), "header and body of two messages, and of the last answer"
    controller.flush()
    assert ends[0].held == 0


def test_an_engine_tells_the_policy_of_weights_at_fault_alone() -> None:
    """Whatever else ends the generation ends the engine: its text does not matter."""

    def served(failure: TrainingError) -> list[Any]:
        told: list[Any] = []

        def generate(tickets: object, params: object, talk: object) -> None:
            raise failure

        server = object.__new__(_Server)
        orders = iter([("generate", [], None), ("stop",)])
        channel = SimpleNamespace(send=told.append, receive=lambda: next(orders))
        server.requests = Requests(cast(Any, None), cast(Channel, channel), 0, None)
        server._engine = cast(
            Any, SimpleNamespace(generate=generate, clock=EngineClock(), num_slots=1, faults={})
        )
        server._version, server._scoring, server._talk = 0, None, None
        server.run()
        return told

    (answer,) = served(NotFiniteDraw("ticket 2"))
    assert answer.error == "ticket 2" and answer.samples == []
    with pytest.raises(TrainingError, match="the log-probability did not come"):
        served(TrainingError("rank 1 is gone: the log-probability did not come"))


def test_what_an_rl_plan_asks_too_much_is_refused(tmp_path: Path, refuse: Refuse) -> None:
    path = write_rl(tmp_path)
    save_rl_plan(tmp_path / "plan.yaml", roles_of(path, staleness=1))
    command = ["rl", "--config", str(path), "--plan", str(tmp_path / "plan.yaml")]
    assert "the plan has 5 ranks, but 1 were started" in refuse(*command)
    refuse(*command, "algorithm.group=1")
    assert "sequence_length: not the run's" in refuse(*command, "generation.max_new_tokens=3")
    with pytest.raises(ConfigError, match="on_lost_engine: go_on, but no other engine would be left"):
        one = roles_of(path, staleness=1, engines="8x1: 4@0")
        check_supported(load_rl(path, ("generation.on_lost_engine=go_on",)), None, one)


def test_the_launcher_spares_engines_whose_loss_the_policy_decides_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank to spare may be killed once its links stand; before, or if another fails, all end."""
    monkeypatch.setattr(launched, "GRACE_SECONDS", 0.2)

    def ended(*commands: str, spared: int) -> int:
        children = [
            launched._Child(rank, process_of(command), None)  # pyright: ignore[reportPrivateUsage]
            for rank, command in enumerate(commands)
        ]
        return launched._wait(children, lambda child: child.rank == spared, print, 60.0)  # pyright: ignore[reportPrivateUsage]

    assert ended("sleep 0.4", "kill -9 $$", spared=1) == 0
    assert "rank 1 was killed by SIGKILL" in capsys.readouterr().err
    assert ended("sleep 9", "kill -9 $$", spared=0) == 1
    assert ended("sleep 0.2; exit 1", "exit 1", spared=1) == 1
    assert ended("sleep 9", "exit 2", spared=1) == 2
