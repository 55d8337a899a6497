"""Cards that compute at another pace than planned: when that is noticed, and what the lead makes of it."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.project import make_project, parse_plan, run_config, with_forecast, write_lines
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import load_plan, plan_digest, save_plan
from yuan_train.config.run import SuperviseConfig
from yuan_train.report.lines import read_entries
from yuan_train.report.run_log import measured_pace, read_run
from yuan_train.report.run_page import run_lines
from yuan_train.supervise.agent import Lead, Supervised, Weighed
from yuan_train.supervise.room import Agent, Done

SLOW = SuperviseConfig().slow
SECONDS = [(0.1, 0.2)]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Plan]:
    """By their number of ranks."""
    run = run_config(make_project(tmp_path_factory.mktemp("project")))
    texts = {2: "1x8: 3@0 | 3@1", 3: "1x8: 2@0 | 2@1 | 2@2", 6: "1x4: 2@0 | 2@1 | 2@2 / 1x4: 2@3 | 2@4 | 2@5"}
    return {count: with_forecast(parse_plan(run, text), seconds=SECONDS) for count, text in texts.items()}


def lines(count: int, steps: int, noise: float, seed: int, slow_from: int | None = None) -> list[Any]:
    """Metrics of ranks that compute twice as long as forecast; the last one, from a step on, six times."""
    chance = random.Random(seed)
    factors = [2.0] * count
    found: list[Any] = []
    for step in range(1, steps + 1):
        factors[-1] = 6.0 if slow_from is not None and step >= slow_from else 2.0
        seconds = [2.4 * factor * max(0.1, chance.gauss(1.0, noise)) for factor in factors]
        found.append({"step": step, "step_seconds": sum(seconds), "stage_seconds": seconds})
    return found


def unlike(pace: dict[int, float]) -> dict[int, float]:
    return {rank: factor for rank, factor in pace.items() if not 1 / SLOW < factor < SLOW}


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.2])
def test_500_steps_without_a_slow_card_raise_no_alarm(
    plans: dict[int, Plan], count: int, noise: float
) -> None:
    for seed in range(3):
        all_lines = lines(count, 500, noise, seed)
        for end in range(len(all_lines)):
            assert not unlike(measured_pace(plans[count], all_lines[:end])), (seed, end)


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_card_at_a_third_of_its_speed_is_named_within_20_steps(
    plans: dict[int, Plan], count: int, noise: float
) -> None:
    for seed in range(10):
        all_lines = lines(count, 120, noise, seed, slow_from=100)
        first = next(e for e in range(100, 120) if unlike(measured_pace(plans[count], all_lines[:e])))
        assert first > 105, "a few slow steps are no pace"
        pace = measured_pace(plans[count], all_lines)
        assert list(unlike(pace)) == [count - 1] and pace[count - 1] == pytest.approx(
            3.0, rel=2 * noise + 1e-9
        )


def test_what_has_no_pace(plans: dict[int, Plan]) -> None:
    """Too few steps, another plan's ranks, steps that were not measured, and times that go to and fro."""
    steady = lines(2, 40, 0.0, 0)
    assert measured_pace(plans[2], steady) == {0: 1.0, 1: 1.0}
    assert measured_pace(plans[2], steady[:15]) == {}
    assert measured_pace(plans[3], steady) == {}
    assert measured_pace(plans[2], [line | {"stage_seconds": None} for line in steady]) == {}
    assert measured_pace(replace(plans[2], forecast=None), steady) == {}
    waving = [line | {"stage_seconds": [4.8, 4.8 if i % 2 else 19.0]} for i, line in enumerate(steady)]
    assert measured_pace(plans[2], waving) == {0: 1.0}


def test_show_names_a_slow_rank(plans: dict[int, Plan], tmp_path: Path) -> None:
    save_plan(tmp_path / "plan.yaml", plans[3])
    for slow_from, is_told in ((None, False), (20, True)):
        more = {"loss": 1.0, "peak_memory_bytes": [1, 1, 1]}
        write_lines(tmp_path / "metrics.jsonl", [line | more for line in lines(3, 60, 0.02, 0, slow_from)])
        shown = "\n".join(run_lines(read_run(tmp_path)))
        assert ("rank 2 (card/2) 3.0 times as long as forecast, beside the others" in shown) == is_told


class FakeRoom:
    """Remembers as the store does; nobody waits."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def remember(self, key: str, value: Any) -> None:
        self.kept[key] = json.dumps(value)

    def recall(self, key: str) -> Any:
        return json.loads(self.kept.get(key, "null"))

    def waiting(self, nodes: Sequence[str], members: Sequence[str]) -> tuple[str, ...]:
        return ()

    def tokens(self, waiting: Sequence[str]) -> tuple[str, ...]:
        return tuple(waiting)

    def seat(self, tokens: Sequence[str]) -> None:
        pass

    def is_halted(self) -> bool:
        return False

    def expect(self, tokens: Sequence[str]) -> None:
        pass


class FakeRound:
    def __init__(self) -> None:
        self.orders: list[Any] = []
        self.moves: list[Any] = []
        self.stopped = ""
        self.gone: tuple[str, ...] = ()
        self.is_over = False
        self.ended = {0: Done(0), 1: Done(0, leaves=True)}

    def is_past(self) -> bool:
        return self.is_over

    def done(self) -> dict[int, Done]:
        return self.ended

    def all_done(self, look: Any) -> dict[int, Done]:
        return self.ended

    def is_hopeless(self) -> bool:
        return self.stopped == "hopeless"

    def give_up(self) -> None:
        self.stopped = "hopeless"

    def stop_reason(self) -> None:
        return None

    def lost(self) -> tuple[str, ...]:
        return self.gone

    def remaining(self, done: Any) -> tuple[str, ...]:
        return ()

    def judge(self, verdict: Any) -> None:
        self.stopped = f"{verdict}"

    def give(self, order: Any) -> None:
        self.orders.append(order)

    def move(self, order: Any) -> None:
        self.moves.append(order)

    def stop(self, reason: str) -> None:
        self.stopped = reason


class FakePlanner:
    """Plans whose step is as long as their slowest card allows, or a half where that is planned for."""

    def __init__(self, plan: Plan, gain: float, later: Plan | None = None) -> None:
        """`later`: the plan for cards with a pace, if it is another one."""
        self.plan, self.gain, self.later = plan, gain, later or plan
        self.asked: list[dict[str, float]] = []

    def find(self, here: Sequence[str], pace: Any) -> Plan:
        self.asked.append(dict(pace))
        step = max([1.0, *pace.values()]) * (1 - self.gain if pace else 1.0)
        return with_forecast(self.later if pace else self.plan, seconds=SECONDS, step_seconds=step)

    def price(self, plan: Plan, here: Sequence[str], pace: Any) -> float:
        return max([1.0, *pace.values()])


MakeLead = Callable[..., Lead]


@pytest.fixture
def lead_of(plans: dict[int, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLead:
    """Makes the lead of a room, whose run is in the test's folder or one inside; without a planner of its
    own the plan of two cards gains as much for a slow one."""
    monkeypatch.setattr("yuan_train.supervise.agent.LOOK_SECONDS", 0.0)

    def make(room: FakeRoom, own: FakePlanner | None = None, *, gain: float = 0.5, name: str = "") -> Lead:
        planner, folder = own or FakePlanner(plans[2], gain), tmp_path / name
        folder.mkdir(exist_ok=True)
        directories = f"log.directory={folder / 'log'}", f"checkpoint.directory={folder / 'checkpoints'}"
        run = run_config(make_project(folder), "train.steps=100000", *directories)
        found = {"find_plan": planner.find, "price_plan": planner.price}
        no_ranks: Any = None
        job = Supervised(run=run, nodes=("card",), **found, nursery=no_ranks)
        members = {name: Agent(name, "token", "127.0.0.1", 1) for name in ("card", "other")}
        lead = Lead(job, room, FakeRound(), members)  # pyright: ignore[reportArgumentType]
        lead.give_order()
        return lead

    return make


def log_lines(folder: Path, found: list[Any]) -> None:
    write_lines(folder / "log" / "metrics.jsonl", found)


def stopped(lead: Lead) -> str:
    return round_of(lead).stopped


def round_of(lead: Lead) -> FakeRound:
    return lead._round  # pyright: ignore


def test_a_slow_card_is_planned_for_and_later_not(
    lead_of: MakeLead, plans: dict[int, Plan], tmp_path: Path
) -> None:
    planner, room = FakePlanner(plans[2], gain=0.5), FakeRoom()
    # A card that no plan has used since keeps the pace that it had.
    room.remember("pace", {"left/0": 0.5})
    lead = lead_of(room, planner)
    for steps in (5, 30):
        log_lines(tmp_path, lines(2, steps, 0.0, 0))
        lead.look_around()
    assert not stopped(lead) and planner.asked == [{"left/0": 0.5}]
    log_lines(tmp_path, lines(2, 60, 0.0, 0, slow_from=30))
    for _ in range(2):
        # Asked once: the ranks go on as they are, under a plan made for what was measured.
        lead.look_around()
    (order,) = round_of(lead).moves
    assert not stopped(lead) and order.number == 2
    assert planner.asked[-1] == {"left/0": 0.5, "card/0": 1.0, "card/1": 3.0}
    assert read_entries(tmp_path / "log")[0][-1].event == "started"
    path = tmp_path / "log" / "plans" / "plan-2.yaml"
    answer = {"plan": plan_digest(load_plan(path)), "seconds": 0.25, "bytes": 3 << 20}
    found = lines(2, 64, 0.0, 0, slow_from=30)
    found[62]["moved"] = answer
    log_lines(tmp_path, found)
    lead.look_around()
    moved = read_entries(tmp_path / "log")[0][-1]
    assert (moved.event, moved.forecast_before, moved.forecast_after) == ("moved", 3.0, 1.5)
    assert (moved.plan, moved.live_seconds, moved.live_bytes) == (str(path), 0.25, 3 << 20)
    assert moved.reason.startswith(
        "card/1 computes 3.0 times as long as its type is forecast to (1.0 was planned for): a step of 1.5 s"
    )
    assert moved.reason.endswith("; moved live in 250 ms, 3.0 MiB sent between ranks")
    # The pace under the new plan is that of steps after the move.
    found = lines(2, 100, 0.0, 0, slow_from=30)
    found[62]["moved"] = answer
    for line in found[62:]:
        line["stage_seconds"] = [4.8, 4.8]
    log_lines(tmp_path, found)
    lead.look_around()
    assert len(round_of(lead).moves) == 1 and not stopped(lead)
    # A start after that, for whatever reason, has the same plan.
    again = lead_of(room, planner)
    assert round_of(again).orders[0].number == 2 and round_of(again).orders[0].plan == path.read_text()
    # As forecast for the slow card, both are at the pace of the plan; then it is three times as fast.
    log_lines(tmp_path, lines(2, 30, 0.0, 0))
    again.look_around()
    assert not stopped(again)
    faster = [line | {"stage_seconds": [4.8, 1.6]} for line in lines(2, 60, 0.0, 0)]
    log_lines(tmp_path, faster)
    again.look_around()
    assert planner.asked[-1] == {"left/0": 0.5, "card/0": 1.0, "card/1": 1.0}
    assert len(round_of(again).moves) == 1


def test_what_the_processes_cannot_become_takes_a_restart(
    lead_of: MakeLead, plans: dict[int, Plan], tmp_path: Path
) -> None:
    """Known before it is asked, or told by ranks that have ended in its place: the journal has the reason."""
    slow = lines(2, 60, 0.0, 0, slow_from=30)
    lead = lead_of(FakeRoom(), FakePlanner(plans[2], 0.5, single_card(plans[2])))
    log_lines(tmp_path, slow)
    lead.look_around()
    assert stopped(lead).endswith("; by a restart, for the plan leaves out card/1")
    assert not round_of(lead).moves
    folder, room = tmp_path / "again", FakeRoom()
    lead = lead_of(room, name="again")
    log_lines(folder, slow)
    lead.look_around()
    assert round_of(lead).moves and not stopped(lead)
    round_of(lead).ended = {0: Done(0, obstacle="no room"), 1: Done(0)}
    lead.judge()
    assert stopped(lead) == "Verdict(again=True, stay=())"
    lead_of(room, name="again")
    moved = read_entries(folder / "log")[0][-1]
    assert moved.event == "moved" and moved.reason.endswith("; by a restart, for no room")
    assert moved.live_seconds is None


def single_card(plan: Plan) -> Plan:
    """All layers on the first of a plan's cards."""
    pipeline = plan.pipelines[0]
    stage = replace(pipeline.stages[0], layers=(0, plan.model.num_layers), head=True)
    return replace(plan, ranks=plan.ranks[:1], pipelines=(replace(pipeline, stages=(stage,)),))


def test_a_slow_card_stays_where_nothing_gains(lead_of: MakeLead, tmp_path: Path) -> None:
    """That is weighed and written once, until the card changes again."""
    lead = lead_of(FakeRoom(), gain=0.0)
    for steps in (10, 60, 70, 80):
        log_lines(tmp_path, lines(2, steps, 0.0, 0, slow_from=12))
        lead.look_around()
    assert not stopped(lead)
    assert [entry.event for entry in read_entries(tmp_path / "log")[0]] == ["started", "stays"]
    assert "card/1 computes 3.0 times as long" in read_entries(tmp_path / "log")[0][-1].reason


def test_a_node_that_had_to_go_is_the_reason_of_the_next_start(lead_of: MakeLead, tmp_path: Path) -> None:
    room = FakeRoom()
    lead = lead_of(room, gain=0.0)
    lead.judge()
    assert (
        room.recall("why") == "other had to go (SIGTERM)" and stopped(lead) == "Verdict(again=True, stay=())"
    )
    # So is the end of all, who may be brought back.
    round_of(lead).ended = {0: Done(0, leaves=True), 1: Done(0, leaves=True)}
    lead.judge()
    assert stopped(lead) == "Verdict(again=True, stay=())"
    assert (
        read_entries(tmp_path / "log")[0][-1].reason
        == "stopped after step 0: card, other had to go (SIGTERM)"
    )
    # A rank that is lost while the others save is told too.
    round_of(lead).ended = {0: Done(1, "rank 0: is gone"), 1: Done(0, leaves=True)}
    lead.judge()
    assert room.recall("why") == "other had to go (SIGTERM); rank 0: is gone"


def test_a_lead_without_whom_the_others_have_gone_on_decides_nothing(
    lead_of: MakeLead, tmp_path: Path
) -> None:
    """It was cut off: what it would write down of its start is another lead's by now."""
    room = FakeRoom()
    lead = lead_of(room, gain=0.0)
    kept, said = dict(room.kept), read_entries(tmp_path / "log")
    round_of(lead).is_over, round_of(lead).ended = True, {0: Done(1, "rank 1 does not answer"), 1: Done(0)}
    lead.judge()
    lead.give_order()
    assert room.kept == kept and read_entries(tmp_path / "log") == said and not stopped(lead)
    assert len(round_of(lead).orders) == 1
    round_of(lead).is_over = False
    lead.judge()
    assert room.recall("why") == "rank 1 does not answer"


def test_a_damaged_log_stops_no_lead(lead_of: MakeLead, plans: dict[int, Plan], tmp_path: Path) -> None:
    """What is whole of it still tells of a slow card, also where not each step has the ranks' times."""
    planner = FakePlanner(plans[2], gain=0.5)
    lead = lead_of(FakeRoom(), planner)
    log_lines(tmp_path, lines(2, 10, 0.0, 0))
    lead.look_around()
    path = tmp_path / "log" / "metrics.jsonl"
    wrong: list[Any] = ["x", 3, [None, 1.0], [1e308, float("nan")], {"a": 1}, [1.0, -1.0], [True, True]]
    found = lines(2, 200, 0.0, 0, slow_from=30)
    for i, line in enumerate(found):
        if i % 3:
            line["stage_seconds"] = wrong[i % len(wrong)]
    damaged = [
        b"\xff\x00",
        b"[" * 100_000,
        b'{"step": Infinity, "step_seconds": 1}',
        b'{"step": 1e400}',
        b"7",
    ]
    text = "".join(json.dumps(line) + "\n" for line in found).encode()
    path.write_bytes(text + b"\n".join(damaged) + b"\n")
    lead.look_around()
    assert planner.asked[-1] == {"card/0": 1.0, "card/1": 3.0}
    assert len(round_of(lead).moves) == 1


def test_ranks_of_which_an_agent_is_lost_are_ended(lead_of: MakeLead, tmp_path: Path) -> None:
    """The others would wait for them in a start or a save. A node without ranks keeps nobody."""
    room = FakeRoom()
    lead = lead_of(room)
    for steps in (0, 3):
        log_lines(tmp_path, lines(2, steps, 0.0, 0))
        for gone in ((), ("another",), ("token",)):
            assert not stopped(lead)
            round_of(lead).gone = gone
            lead.look_around()
        assert stopped(lead) == "hopeless"
        round_of(lead).stopped, round_of(lead).gone = "", ()
    round_of(lead).stopped, round_of(lead).ended = "hopeless", {0: Done(1, "rank 0 was killed")}
    lead.judge()
    assert room.recall("why") == "no word of the agent of card; rank 0 was killed"


def test_a_start_ends_once_some_of_its_ranks_have_failed(
    lead_of: MakeLead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for them, untold, until all have met. A clean end, and one behind a step, are none."""
    monkeypatch.setattr("yuan_train.supervise.agent.HOPELESS_SECONDS", 0.0)
    for steps, ended, wanted in (
        (0, {1: Done(1, "rank 1 was killed by SIGKILL")}, "hopeless"),
        (0, {1: Done(0)}, ""),
        (3, {1: Done(1, "rank 1 was killed by SIGKILL")}, ""),
    ):
        room = FakeRoom()
        name = f"{steps}-{wanted}"
        lead = lead_of(room, name=name)
        round_of(lead).ended = ended
        log_lines(tmp_path / name, lines(2, steps, 0.0, 0))
        for _ in range(3):
            lead.look_around()
        assert stopped(lead) == wanted
    # Whose ranks were ended for that counts as a fault of the start, and is not taken for a lost agent.
    lead = lead_of(room, name="fault")
    round_of(lead).stopped, round_of(lead).ended = "hopeless", {1: Done(1, "rank 1 was killed"), 0: Done(0)}
    lead.judge()
    assert room.recall("why") == "rank 1 was killed"
    assert [start["fault"] for start in room.recall("starts")] == ["rank 1 was killed"]


def test_who_was_to_be_let_in_and_has_gone_is_named(
    lead_of: MakeLead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = FakeRoom()
    lead = lead_of(room)
    monkeypatch.setattr(room, "waiting", lambda *_: ("third",))
    log_lines(tmp_path, lines(2, 3, 0.0, 0))
    move = Weighed(is_worth_it=True, reason="so")
    monkeypatch.setattr("yuan_train.supervise.agent.weigh_move", lambda *_, **__: move)
    lead.look_around()
    assert stopped(lead) == "third came: so"
    lead.give_order()
    assert read_entries(tmp_path / "log")[0][-1].reason == "third went; third came: so"
