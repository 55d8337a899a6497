"""Live moves between unlike plans: the bits of save-and-load, and no more bytes than must be sent."""

import gc
import json
import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.fake_card import FakeCard
from tests.support.project import (
    make_project,
    on_devices,
    parse_plan,
    read_metrics,
    run_config,
    with_forecast,
)
from tests.support.ranks import same_saved, saved_tensors
from tests.support.spawn import as_rank, free_port, spawn, start_ranks
from yuan_train.checkpoint.load import LocalShard, find_checkpoint, load_tensors, step_name
from yuan_train.config.errors import TrainingError
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import plan_digest, plans_in, restart_reason, save_plan
from yuan_train.parallel.device import CPU, Device
from yuan_train.parallel.environment import NEXT_PLAN
from yuan_train.parallel.groups import Groups
from yuan_train.parallel.transfer import plan_holdings
from yuan_train.report.run_log import read_run
from yuan_train.train import run, saver
from yuan_train.train.job import Position, prepare
from yuan_train.train.step import Trainer

EACH = 2
"""Steps under each plan."""
COMMON = ("validation.every=0", "optimizer.decay_steps=20", f"checkpoint.every={EACH}", "log.every=1000")


@dataclass(frozen=True)
class Chain:
    """A run that moves from plan to plan, the last one asked for by one rank alone."""

    run_file: Path
    folder: Path
    plans: Sequence[Plan]
    more: tuple[str, ...] = ()
    is_corrupted: bool = False
    """Negative control: a bit of one message is flipped."""

    def config(self, folder: Path, steps: int, *more: str) -> Any:
        own = (f"train.steps={steps}", f"log.directory={folder}", f"checkpoint.directory={folder / 'ck'}")
        return run_config(self.run_file, *COMMON, *self.more, *own, *more)

    def digest(self, number: int) -> str:
        return plan_digest(self.plans[number])


def held_by(trainer: Any) -> dict[str, LocalShard]:
    return trainer.tensors("held")


def mask_of(shard: LocalShard) -> torch.Tensor:
    """Which elements of the global tensor a rank holds."""
    mask = torch.zeros(shard.shape, dtype=torch.bool)
    for box in shard.boxes:
        mask[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] = True
    return mask


def is_as_loaded(trainer: Trainer, path: Path) -> bool:
    """Whether an engine holds what it would have loaded from a checkpoint, to the bit. Collective."""
    found = held_by(trainer)
    loaded = {
        key: replace(
            shard,
            boxes=tuple(replace(box, tensor=torch.full_like(box.tensor, math.nan)) for box in shard.boxes),
        )
        for key, shard in found.items()
    }
    load_tensors(find_checkpoint(path), loaded)
    return all(
        torch.equal(ours.tensor, theirs.tensor)
        for key, shard in found.items()
        for ours, theirs in zip(shard.boxes, loaded[key].boxes, strict=True)
    )


def count_groups() -> int:
    """How many plans' groups are there still."""
    gc.collect()
    return sum(type(found) is Groups for found in gc.get_objects())


@contextmanager
def moving(chain: Chain, rank: int, found: list[dict[str, Any]]) -> Iterator[None]:
    """Inside, the last rank gets a new plan as a supervisor gives it, every so many steps."""
    path = chain.folder / "next.yaml"
    asks, move_to = run._request, run.move_to  # pyright: ignore[reportPrivateUsage]

    def ask(job: Any, progress: Any, *, stop: bool) -> Any:
        number, into = divmod(progress.step, EACH)
        if rank == job.plan.world_size - 1 and into == EACH - 1 and number + 1 < len(chain.plans):
            save_plan(path, chain.plans[number + 1])
            os.kill(os.getpid(), signal.SIGUSR1)
            stop = True
        return asks(job, progress, stop=stop)

    def move_there(plan: Plan, job: Any, engine: Any, progress: Any) -> Any:
        before = {key: mask_of(shard) for key, shard in held_by(engine).items()}
        job, engine, progress, num_bytes = move_to(plan, job, engine, progress)
        bound = 0
        for key, shard in held_by(engine).items():
            lacking = mask_of(shard) & ~before.get(key, torch.zeros(shard.shape, dtype=torch.bool))
            bound += int(lacking.sum()) * shard.boxes[0].tensor.itemsize
        saved = Path(job.run.checkpoint.directory) / step_name(progress.step)
        equal = is_as_loaded(engine, saved) if saved.exists() else None
        told = {"bytes": num_bytes, "bound": bound, "equal": equal}
        found.append(told | {"pid": os.getpid(), "groups": count_groups()})
        return job, engine, progress, num_bytes

    unpack = _flip_first(saver.unpack) if chain.is_corrupted and not rank else saver.unpack
    with (
        patch.dict(os.environ, {NEXT_PLAN: str(path)}),
        patch.object(run, "_request", ask),
        patch.object(run, "move_to", move_there),
        patch.object(saver, "unpack", unpack),
    ):
        yield


def _flip_first(unpack: Any) -> Any:
    calls = iter([True])

    def call(bucket: Any, flat: torch.Tensor, view: Any) -> None:
        if next(calls, False):
            flat.view(torch.uint8)[0] ^= 1
        unpack(bucket, flat, view)

    return call


def ranks_of_chains(rank: int, chains: Sequence[Chain], ports: Sequence[Sequence[int]]) -> None:
    os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
    for chain, own in zip(chains, ports, strict=True):
        size, last = chain.plans[0].world_size, len(chain.plans) * EACH
        position, found = Position(rank, size, rank, size), list[dict[str, Any]]()
        as_rank(rank, size, own[0])
        with moving(chain, rank, found):
            run.train(prepare(chain.config(chain.folder, last), chain.plans[0], position))
        (chain.folder / f"found-{rank}.json").write_text(json.dumps(found))
        for number, plan in enumerate([] if chain.is_corrupted else chain.plans[1:], start=1):
            # What the run has saved before a move, loaded by a start of its own under the next plan.
            as_rank(rank, size, own[number])
            start = f"checkpoint.resume={chain.folder / 'ck' / step_name(number * EACH)}"
            folder = chain.folder / f"from-{number}"
            run.train(prepare(chain.config(folder, (number + 1) * EACH, start), plan, position))


def run_chains(*chains: Chain) -> None:
    for chain in chains:
        chain.folder.mkdir()
    ports = [[free_port() for _ in chain.plans] for chain in chains]
    spawn(ranks_of_chains, chains[0].plans[0].world_size, chains, ports)


def check(chain: Chain) -> list[list[dict[str, Any]]]:
    """That a chain has gone as saving and loading would have, with the fewest bytes; by rank, its moves."""
    size, lines = chain.plans[0].world_size, read_metrics(chain.folder)
    found = [json.loads((chain.folder / f"found-{rank}.json").read_text()) for rank in range(size)]
    assert [line["step"] for line in lines] == list(range(1, len(chain.plans) * EACH + 1))
    for number in range(1, len(chain.plans)):
        moves = [own[number - 1] for own in found]
        assert all(move["equal"] for move in moves), number
        assert {move["bytes"] for move in moves} == {sum(move["bound"] for move in moves)}
        told = lines[number * EACH]["moved"]
        assert (told["plan"], told["bytes"]) == (chain.digest(number), moves[0]["bytes"])
        assert told["seconds"] > 0 and "moved" not in lines[number * EACH - 1]
        again = read_metrics(chain.folder / f"from-{number}")
        for own, other in zip(lines[number * EACH :], again, strict=False):
            for key in ("step", "loss", "grad_norm", "lr", "tokens", "forecast_step_seconds"):
                assert own[key] == other[key], (number, own["step"], key)
    assert all(len({move["pid"] for move in own}) == 1 for own in found)
    # The first ones, which the caller of the loop has, those of the plan before, and the new ones.
    assert max(move["groups"] for own in found for move in own) <= 3
    assert same_saved(chain.folder / "ck", chain.folder / f"from-{number}" / "ck")
    return found


def plan_of(run_file: Path, text: str, step_seconds: float = 1.0, **keys: Any) -> Plan:
    """On nodes a, b and c, with a forecast."""
    plan = with_forecast(parse_plan(run_config(run_file), text, **keys), step_seconds=step_seconds)
    return on_devices(plan, *("a/0", "b/0", "c/0")[: plan.world_size])


def test_a_run_moves_from_plan_to_plan(run_file: Path, tmp_path: Path) -> None:
    """Another cut, replicas, owners that share their state, tensor widths, and back: with copies in memory,
    checked steps and measured links all along."""
    plans = [
        plan_of(run_file, "1x8: 2@0 | 2@1 | 2@2", 0.1),
        plan_of(run_file, "1x8: 3@0 | 1@1 | 2@2", 0.2),
        plan_of(run_file, "1x4: 3@0 | 3@1 / 2x2: 6@2", 0.3),
        plan_of(run_file, "1x2: 6@0 / 1x3: 6@1 / 1x3: 6@2", 0.4, optimizer_sharding=True),
        plan_of(run_file, "1x4: 6@0,1 / 1x4: 6@2", 0.5, optimizer_sharding=True),
        plan_of(run_file, "1x8: 2@0 | 2@1 | 2@2", 0.1),
    ]
    more = (
        "checkpoint.in_memory=3",
        "train.check_every=2",
        "train.links_every=1",
        "optimizer.bucket_size=4000",
    )
    chain = Chain(run_file, tmp_path / "moves", plans, more)
    broken = Chain(run_file, tmp_path / "broken", plans[:2], is_corrupted=True)
    run_chains(chain, broken)
    found = check(chain)
    # Of whole layers the two plans alone say what has to be sent: weights and two moments, four bytes each.
    before, after = plan_holdings(plans[0]), plan_holdings(plans[1])
    lacking = sum(
        12 * math.prod(shard.shape)
        for rank, held in after.items()
        for name, shard in held.items()
        if name not in before[rank]
    )
    assert found[0][0]["bytes"] == lacking > 0
    lines = read_metrics(chain.folder)
    assert [line["forecast_step_seconds"] for line in lines[::EACH]] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.1]
    links = [sorted(line["link_seconds"]) for line in lines[::EACH]]
    assert links[0] == links[1] == links[5] == ["a - c", "a -> b", "b -> a", "b -> c", "c -> b"]
    assert links[3] == ["a - b - c"]
    assert all(len(line["stage_seconds"]) == 3 for line in lines)
    log = read_run(chain.folder)
    assert log.plan == plans[-1] and [line["step"] for line in log.measured] == [11, 12]
    # As many plans as there are different ones, each from the step on with which it began.
    assert [path.name for path in plans_in(chain.folder)] == [
        "plan.yaml",
        *(f"plan.step-{number * EACH}.yaml" for number in range(1, 5)),
    ]
    # Whoever compares, notices one bit.
    moves = [json.loads((broken.folder / f"found-{rank}.json").read_text()) for rank in range(3)]
    assert [move["equal"] for (move,) in moves] == [False, True, True]


def test_experts_and_their_biases_move(tmp_path: Path) -> None:
    """In bf16, between ranks that share experts and ranks that do not."""
    experts = {"num_experts": 4, "experts_per_token": 2, "balance": "bias", "balance_rate": 0.01}
    run_file = make_project(tmp_path, model={"architecture": "llama"} | experts)
    plans = [
        plan_of(run_file, "1x8: 6@0,1"),
        plan_of(run_file, "1x8: 3@0 | 3@1"),
        plan_of(run_file, "1x8: 6@0,1", experts=[(1, 3)], optimizer_sharding=True),
    ]
    chain = Chain(run_file, tmp_path / "moves", plans, ("train.precision=bf16",))
    run_chains(chain)
    check(chain)
    assert any("router.bias" in key for key in saved_tensors(chain.folder / "ck"))


def alone(chain: Chain, capsys: pytest.CaptureFixture[str], device: Device = CPU) -> str:
    """Run a chain of plans of one card in this process; what it has said."""
    torch.set_num_threads(1)
    chain.folder.mkdir()
    found: list[dict[str, Any]] = []
    with moving(chain, 0, found):
        job = prepare(chain.config(chain.folder, len(chain.plans) * EACH), chain.plans[0], Position())
        run.train(replace(job, device=device))
    assert all(move["equal"] is not False and move["bytes"] == 0 for move in found)
    return capsys.readouterr().err


def test_one_rank_moves_alone(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is sent; the plan that it has already is no other."""
    one, other = plan_of(run_file, "1x8: 6@0"), plan_of(run_file, "2x4: 6@0")
    said = alone(Chain(run_file, tmp_path / "moves", [one, one, other]), capsys)
    assert said.count("moved in place after step") == 1 and "with 0 B sent" in said
    assert ["moved" in line for line in read_metrics(tmp_path / "moves")] == [False] * 4 + [True, False]


def test_what_cannot_move_saves_for_a_restart(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = plan_of(run_file, "1x8: 6@0"), plan_of(run_file, "1x8: 6@0", optimizer_offload=[0.5])
    said = alone(Chain(run_file, tmp_path / "moves", [one, other]), capsys)
    assert "not moved in place: the plan puts something on hosts (optimizer_offload)" in said
    assert find_checkpoint(tmp_path / "moves" / "ck").step == EACH == len(read_metrics(tmp_path / "moves"))


def test_a_card_has_no_room_for_two_plans_and_needs_none(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state waits on the host; without freeing what was there, the card is full."""
    texts = ("1x2: 6@0", "2x1: 6@0", "1x2: 6@0")
    plans = [replace(plan_of(run_file, text), global_batch_size=2) for text in texts]
    more = ("train.precision=bf16", "checkpoint.every=0", "train.global_batch_size=2")
    card = FakeCard(memory=4 << 20)
    with card.counting():
        said = alone(Chain(run_file, tmp_path / "moves", plans, more), capsys, card)
    assert said.count("moved in place after step") == 2 and card.faults == []
    alone(Chain(run_file, tmp_path / "cpu", plans, more), capsys)
    losses = [[line["loss"] for line in read_metrics(tmp_path / name)] for name in ("moves", "cpu")]
    assert losses[0] == losses[1]
    monkeypatch.setattr(run, "take_apart", lambda *_: None)
    card = FakeCard(memory=4 << 20)
    with card.counting(), pytest.raises(TrainingError, match="out of memory"):
        alone(Chain(run_file, tmp_path / "full", plans, more), capsys, card)


def test_reasons_for_a_restart(run_file: Path) -> None:
    config, two = run_config(run_file), plan_of(run_file, "1x8: 3@0 | 3@1")
    assert restart_reason(two, plan_of(run_file, "1x8: 2@0 | 4@1"), config) is None
    assert restart_reason(two, plan_of(run_file, "1x8: 6@0"), config) == "the plan leaves out b/0"
    swapped = on_devices(two, "b/0", "a/0")
    assert restart_reason(two, swapped, config) == "the plan numbers cards otherwise"
    for change in ("engine=megatron", "train.compile=true"):
        assert restart_reason(two, two, run_config(run_file, change)) is not None


@contextmanager
def asks_to_move() -> Iterator[None]:
    """The command of a rank that is told of next.yaml in its folder, after some steps."""
    asks = run._request  # pyright: ignore[reportPrivateUsage]

    def ask(job: Any, progress: Any, *, stop: bool) -> Any:
        if progress.step == EACH - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return asks(job, progress, stop=stop or progress.step == EACH - 1)

    with patch.dict(os.environ, {NEXT_PLAN: "next.yaml"}), patch.object(run, "_request", ask):
        yield


@contextmanager
def dies_in_the_move() -> Iterator[None]:
    """The command of a rank that is killed when it has got the first message of what it lacks."""
    with patch.object(saver, "unpack", lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
        yield


def test_a_rank_that_is_lost_in_the_move_is_named(run_file: Path, tmp_path: Path) -> None:
    """All end, and the checkpoint from before is there."""
    plans = [plan_of(run_file, text) for text in ("1x8: 2@0 | 2@1 | 2@2", "1x8: 3@0 | 1@1 | 2@2")]
    for name, plan in zip(("plan.yaml", "next.yaml"), plans, strict=True):
        save_plan(tmp_path / name, plan)
    words = ["train", "--config", str(run_file), "--plan", "plan.yaml", *COMMON]
    words += [f"train.steps={2 * EACH}", "train.timeout=20 s", "log.directory=log", "checkpoint.directory=ck"]
    around = {2: asks_to_move, 0: dies_in_the_move}
    with start_ranks(words, tmp_path, 3, cwds=[tmp_path] * 3, around=around) as ranks:
        codes, said = zip(*(rank.wait(within_seconds=60) for rank in ranks), strict=True)
    assert codes == (-signal.SIGKILL, 1, 1), said
    assert find_checkpoint(tmp_path / "ck").step == EACH
    for text in said[1:]:
        assert "error: " in text and "rank 0" in text and "Traceback" not in text, text
