"""Rank coordinates, edges, buckets: every rank and every unit occurs once. No process is started."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.project import MODEL, make_plan, parse_plan
from yuan_train.config.load import Document, build
from yuan_train.config.plan import Plan
from yuan_train.config.run import RunConfig
from yuan_train.parallel.grid import Bucket, Grid, unit_of


def run_of(num_layers: int, batch: int, *, tied: bool = True) -> RunConfig:
    values = {
        "model": MODEL | {"num_layers": num_layers, "tie_embeddings": tied},
        "data": {"train": [{"prefix": "nowhere"}], "sequence_length": 8, "reset_position_ids": False},
        "train": {"steps": 1, "global_batch_size": batch},
        "optimizer": {"learning_rate": 1e-3},
    }
    return build(Document("run.yaml", values, {}), RunConfig)


def plan_of(cuts: list[list[int]], *, tied: bool = True) -> Plan:
    return make_plan(run_of(sum(cuts[0]), len(cuts), tied=tied), cuts)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any), st.integers(1, 4), st.booleans())
def test_every_rank_has_coordinates_and_every_unit_a_bucket(
    cut: list[int], num_pipelines: int, tied: bool
) -> None:
    plan = plan_of([cut] * num_pipelines, tied=tied)
    grid = Grid(plan)
    assert [coord.rank for coord in grid.coords] == list(range(plan.world_size))
    units = [unit for bucket in grid.buckets for unit in bucket.units]
    assert units == ["embedding", *(f"layers.{i}" for i in range(sum(cut))), "head"]
    for bucket in grid.buckets:
        per_pipeline = 2 if tied and bucket.units == ("embedding",) and len(cut) > 1 else 1
        assert len(bucket.owners) == per_pipeline * num_pipelines
    assert len(set(grid.edges)) == len(grid.edges) == 2 * num_pipelines * (len(cut) - 1)
    shares = sorted((grid.first_sequence(coord), grid.pipeline(coord).num_sequences) for coord in grid.coords)
    assert {first for first, _ in shares} == set(range(0, num_pipelines))


def test_peers_stay_within_their_pipeline() -> None:
    grid = Grid(plan_of([[1, 2], [1, 2]]))
    assert [grid.peer(coord, 1 - coord.stages[0], 0) for coord in grid.coords] == [1, 0, 3, 2]


def test_owners_of_different_widths_share_slices() -> None:
    # Widths 2 and 3 need six slices; a rank of the first owner holds three of them, one of the second two.
    bucket = Bucket(("layers.0",), ((0, 1), (2, 3, 4)))
    assert bucket.num_slices == 6
    wanted = [[0, 1, 2], [3, 4, 5], [0, 1], [2, 3], [4, 5], []]
    assert [list(bucket.slices_of(rank)) for rank in range(6)] == wanted
    assert [bucket.slice_group(i) for i in range(6)] == [(0, 2), (0, 2), (0, 3), (1, 3), (1, 4), (1, 4)]


def test_replicas_and_virtual_stages() -> None:
    run = run_of(6, 8)
    replicated = Grid(parse_plan(run, "1x8: 3@0;1 | 3@2,3"))
    assert replicated.workers(0) == ((0, 1), (2,)) and replicated.replicas(0) == ((0,), (1,), (2, 3))
    assert [replicated.peer(replicated.coords[2], 0, m) for m in range(4)] == [0, 1, 0, 1]
    looped = Grid(parse_plan(run, "1x8: 1@0|2@1|2@0|1@1", schedule="interleaved_1f1b"))
    assert looped.coords[0].stages == (0, 2) and looped.workers(0) == ((0,), (1,), (0,), (1,))
    # Rank 1 sends both activations and gradients to rank 0: two edges.
    assert len(set(looped.edges)) == len(looped.edges) == 6


def test_ten_thousand_ranks() -> None:
    plan = plan_of([[1] * 10] * 1000)
    grid = Grid(plan)
    assert len(grid.coords) == 10_000 and grid.coords[9_999].stages == (9,)
    # The tied embedding has owners of its own, hence its own bucket; the head shares the last layer's.
    assert len(grid.buckets) == 11


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("embedding.weight", "embedding"),
        ("layers.12.filter.conv1.bias", "layers.12"),
        ("final_norm.weight", "head"),
        ("head.weight", "head"),
    ],
)
def test_units_of_parameters(name: str, unit: str) -> None:
    assert unit_of(name) == unit


def test_an_untied_head_is_owned_by_last_stages_alone() -> None:
    tied, untied = Grid(plan_of([[1, 1]])), Grid(plan_of([[1, 1]], tied=False))
    assert tied.buckets[0].owners == ((0,), (1,)) and untied.buckets[0].owners == ((0,),)
    assert replace(untied.buckets[-1], units=()).owners == ((1,),)


def test_experts_are_cut_where_any_pipeline_divides_them() -> None:
    run = run_of(1, 3)
    mixture = replace(run.model, num_experts=8, experts_per_token=2, router="softmax")
    run = replace(run, model=mixture)
    text, counts = "1x1: 1@0,1 / 1x1: 1@2,3,4 / 1x1: 1@5", [(5, 3), (0, 7, 1), None]
    buckets = [b for b in Grid(parse_plan(run, text, experts=counts)).buckets if "experts" in b.units[0]]
    wanted = [((0, 5), ((0,), (3,), (5,))), ((5, 7), ((1,), (3,), (5,))), ((7, 8), ((1,), (4,), (5,)))]
    assert [(b.experts, b.owners) for b in buckets] == wanted
    # Divided alike, a rank's experts are one bucket, and one that has none is in none.
    alike = parse_plan(run, "1x1: 1@0,1 / 1x2: 1@2,3", experts=[(8, 0), (8, 0)])
    buckets = [b for b in Grid(alike).buckets if "experts" in b.units[0]]
    assert [(b.experts, b.owners) for b in buckets] == [(None, ((0,), (2,)))]
