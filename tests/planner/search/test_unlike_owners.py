"""Owners of the same weights on unlike cards: found in a plan, and no choice of the planner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parallel.test_grid import run_of
from tests.support.project import parse_plan
from yuan_train.config.devices import DeviceType
from yuan_train.config.plan import Plan, unlike_owners
from yuan_train.config.run import SearchConfig
from yuan_train.planner.search.candidate import is_wanted
from yuan_train.planner.search.shapes import read_options

A, V = "A100-80G", "V100-32G"


def plan_on(text: str, types: list[str], *, tied: bool = False, **keys) -> Plan:
    plan = parse_plan(run_of(6, 8), text, **keys)
    ranks = tuple(replace(entry, type=kind) for entry, kind in zip(plan.ranks, types, strict=True))
    return replace(plan, ranks=ranks, model=replace(plan.model, tie_embeddings=tied))


PAIR = "1x4: 6@0 / 1x4: 6@1"


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        (plan_on(PAIR, [A, V]), (0, 1)),
        (plan_on(PAIR, [A, A]), None),
        (plan_on(PAIR, [A, V], optimizer_sharding=True), None),
        (plan_on(PAIR, [A, A], optimizer_offload=[0.5, 0.0]), (0, 1)),
        (plan_on(PAIR, [A, A], optimizer_offload=[0.5, 0.5]), None),
        (plan_on("1x8: 3@0;1 | 3@2", [A, V, A]), (0, 1)),
        # Of a pipeline's stages none holds what another does, but the tied embedding.
        (plan_on("1x8: 3@0 | 3@1", [A, V]), None),
        (plan_on("1x8: 3@0 | 3@1", [A, V], tied=True), (0, 1)),
        # The norms are whole on each rank of a group.
        (plan_on("1x8: 6@0,1", [A, V], optimizer_sharding=True), (0, 1)),
    ],
)
def test_ranks_that_step_the_same_weights_unlike(plan: Plan, found: tuple[int, int] | None) -> None:
    assert unlike_owners(plan) == found


def test_simulated_cards_are_processors() -> None:
    plan = plan_on(PAIR, ["fast", "slow"])
    card = DeviceType(memory=1 << 30, fp32=1e12, memory_bandwidth=1e11, host_link=1e10, slowdown=1.0)
    simulated = {"fast": card, "slow": replace(card, slowdown=2.0)}
    assert unlike_owners(plan) == (0, 1)
    assert unlike_owners(replace(plan, device_types=simulated)) is None


def test_the_planner_shards_the_state_of_unlike_owners() -> None:
    unlike, alike = plan_on(PAIR, [A, V]), plan_on(PAIR, [A, A])

    def wanted(plan: Plan, **search) -> bool:
        config = SearchConfig(**search)
        return is_wanted(plan, read_options(config, micro_batch_size=1, model=plan.model, num_cards=2))

    assert not wanted(unlike) and wanted(replace(unlike, optimizer_sharding=True)) and wanted(alike)
    # Who asks for nothing else gets it, and is told at the start of the run.
    assert wanted(unlike, optimizer_sharding=(False,))
