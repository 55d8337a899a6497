"""The whole engine on cards that are late on purpose: the bits of the CPU, and not if a wait is missing."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fake_card import FakeCard, FakeNcclTransport
from tests.support.project import parse_plan, read_metrics, run_config
from tests.support.ranks import same_saved
from tests.support.spawn import as_rank, free_port, spawn
from yuan_train.config.errors import TrainingError
from yuan_train.config.plan import Plan
from yuan_train.parallel import transport
from yuan_train.parallel.device import HostLinks
from yuan_train.parallel.optimizer_state import HostChunk
from yuan_train.train.job import Position, prepare
from yuan_train.train.run import train

OVERRIDES = (
    *("train.steps=2", "train.precision=bf16", "data.sequence_length=48", "data.reset_attention=true"),
    *("validation.every=1", "checkpoint.every=1", "checkpoint.asynchronous=true"),
    *("optimizer.bucket_size=2000", "train.global_batch_size=4"),
)


def run_on(
    device: FakeCard | None, run_file: Path, folder: Path, plan: Plan, position: Position, *more: str
) -> None:
    """A run on a card of its own, or on the CPU."""
    own = (f"log.directory={folder}", f"checkpoint.directory={folder / 'ck'}")
    job = prepare(run_config(run_file, *OVERRIDES, *own, *more), plan, position)
    train(job if device is None else replace(job, device=device))


def numbers(folder: Path) -> list[tuple[float, float, float | None]]:
    return [(m["loss"], m["grad_norm"], m.get("validation_loss")) for m in read_metrics(folder)]


# --- copies between a card and its host ---------------------------------------------------------------------


@dataclass(frozen=True)
class Tier:
    """A plan of one card that copies, and the waits that it needs: each by what it does without."""

    keys: dict[str, Any]
    waits: dict[str, tuple[type, str, Callable[..., None]]]
    more: tuple[str, ...] = ()


def nothing(*_: Any) -> None:
    pass


def forget_coming(self: HostChunk) -> None:
    self._coming = self._source = None  # pyright: ignore[reportPrivateUsage]


TIERS = {
    "optimizer on the host": Tier(
        {"optimizer_offload": [0.6]},
        {
            "a forward for stepped weights": (HostChunk, "finish_weights", nothing),
            "the host for a gradient": (HostChunk, "_finish_coming", forget_coming),
        },
    ),
    "optimizer on a disk": Tier(
        {"optimizer_offload": [1.0], "optimizer_disk": [0.5]}, {}, more=("checkpoint.asynchronous=false",)
    ),
    "activations": Tier(
        {"activation_offload": [3], "resident_parts": [4], "fetch_ahead": [1], "schedule": "gpipe"},
        {"a backward for activations, or an eviction for its copy": (HostLinks, "wait", nothing)},
    ),
    "pages": Tier(
        {
            "recompute": "full",
            "schedule": "gpipe",
            "parameter_offload": [5],
            "page_slots": [2],
            "page_group": 3,
        },
        {"a layer for its page": (HostLinks, "wait", nothing)},
    ),
}


@pytest.mark.parametrize("name", TIERS)
def test_copies_beside_the_compute_change_no_bit(
    name: str, run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    tier = TIERS[name]
    more = (*tier.more, f"memory.disk_directory={tmp_path / 'disk'}")
    plan = parse_plan(run_config(run_file, *OVERRIDES, *more), "1x4: 6@0", **tier.keys)
    card = FakeCard(bytes_per_second=1e5)
    run_on(None, run_file, tmp_path / "cpu", plan, Position(), *more)
    run_on(card, run_file, tmp_path / "card", plan, Position(), *more)
    assert card.faults == [] and card.num_pageable == 0
    # Of two saves in the background, that the card itself copies.
    assert (len(card.downloads) > 50) == ("checkpoint.asynchronous=false" not in more)
    assert all(sum(m["stage_seconds"]) == 0.0 for m in read_metrics(tmp_path / "card")), (
        "waits are no compute"
    )
    assert numbers(tmp_path / "card") == numbers(tmp_path / "cpu")
    assert same_saved(tmp_path / "card" / "ck", tmp_path / "cpu" / "ck")
    for wait, (owner, method, replacement) in tier.waits.items():
        folder = tmp_path / wait
        with monkeypatch.context() as without:
            without.setattr(owner, method, replacement)
            try:
                run_on(FakeCard(), run_file, folder, plan, Position(), *more)
            except TrainingError as error:
                assert "nan" in str(error)
            else:
                assert numbers(folder) != numbers(tmp_path / "cpu"), f"nothing shows that {wait} is needed"


# --- memory -------------------------------------------------------------------------------------------------


def test_a_card_that_is_too_small_says_so_and_a_tier_makes_room(run_file: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    keys = ("train.precision=fp32", "train.steps=1", "validation.every=0", "checkpoint.every=0")

    def run(name: str, **tiers: Any) -> FakeCard:
        plan = parse_plan(run_config(run_file, *OVERRIDES, *keys), "1x4: 6@0", **tiers)
        card = FakeCard(memory=3 << 20, outside=1 << 20)
        with card.counting():
            run_on(card, run_file, tmp_path / name, plan, Position(), *keys)
        return card

    with pytest.raises(
        TrainingError, match="(?s)out of memory in .*Tried to allocate.*1.0 MiB outside of torch"
    ):
        run("here")
    # Both moments lie on the host.
    card = run("away", optimizer_offload=[1.0])
    assert 0 < card.most_allocated < 2 << 20 and read_metrics(tmp_path / "away")[0]["step"] == 1


# --- messages and sums between cards ------------------------------------------------------------------------

SHAPE = "1x2: 6@0 / 1x2: 3@1 | 3@2"


class WithoutWaits(FakeNcclTransport):
    waits = False


@dataclass(frozen=True)
class Between:
    """Cards with these transports."""

    kind: type[transport.Transport] | None
    """None: CPUs."""
    plan: Plan
    port: int


def _run_between(rank: int, cases: dict[str, Between], run_file: Path, root: Path) -> None:
    """Run all cases; the faults of the cards, or of the run, are in a file of the rank."""
    kind_of = transport._kind_of  # pyright: ignore[reportPrivateUsage]
    for name, case in cases.items():
        as_rank(rank, 3, case.port)
        card = None if case.kind is None else FakeCard()
        transport._kind_of = kind_of if case.kind is None else _always(case.kind)  # pyright: ignore
        position = Position(rank, 3, rank, 3)
        fault = None
        try:
            run_on(card, run_file, root / name, case.plan, position)
        except TrainingError as error:
            fault = str(error)
        found = {"faults": [] if card is None else card.faults, "error": fault}
        (root / f"{name}-{rank}.json").write_text(json.dumps(found))


def _always(kind: type[transport.Transport]) -> Callable[..., type[transport.Transport]]:
    return lambda device, *, via_host: kind


def test_messages_and_sums_between_cards_change_no_bit(run_file: Path, tmp_path: Path) -> None:
    run = run_config(run_file, *OVERRIDES)
    sharded = parse_plan(
        run, SHAPE, optimizer_sharding=True, optimizer_share=[1, 1, 1], optimizer_offload=[0.6, 1.0, 0.0]
    )
    whole = parse_plan(run, SHAPE)
    cases = {
        "cpu": Between(None, sharded, free_port()),
        "nccl": Between(FakeNcclTransport, sharded, free_port()),
        "staged": Between(transport.HostStagedTransport, sharded, free_port()),
        "cpu, whole": Between(None, whole, free_port()),
        "nccl, whole": Between(FakeNcclTransport, whole, free_port()),
        "without waits": Between(WithoutWaits, whole, free_port()),
    }
    spawn(_run_between, 3, cases, run_file, tmp_path)
    found = {
        name: [json.loads((tmp_path / f"{name}-{r}.json").read_text()) for r in range(3)] for name in cases
    }
    for name in ("nccl", "staged", "nccl, whole"):
        assert found[name] == [{"faults": [], "error": None}] * 3
        other = "cpu, whole" if name == "nccl, whole" else "cpu"
        assert numbers(tmp_path / name) == numbers(tmp_path / other)
        assert same_saved(tmp_path / name / "ck", tmp_path / other / "ck")
    assert all("nan" in one["error"] for one in found["without waits"])
