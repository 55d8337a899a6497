"""Optimizer state on disks, in the forecast."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.evaluate.test_any_plan import EIGHT, PAIR, plan_of
from tests.planner.search.test_search import MODEL, problem
from tests.support.project import with_stages
from yuan_train.cli.main import main
from yuan_train.config.cluster import Cluster, Disk
from yuan_train.config.devices import GIB
from yuan_train.config.load import dump
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import save_plan, validate_plan
from yuan_train.config.units import DISK_CHUNK, written_words
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan

N = 4 * MODEL.layer_parameters + MODEL.embedding_parameters
"""Parameters of the first stage of PAIR."""


def away(x: float, on_disk: float = 0.0) -> Plan:
    plan = plan_of((4, PAIR))
    stages = (replace(s, optimizer_offload=x, optimizer_disk=on_disk) for s in plan.pipelines[0].stages)
    return with_stages(plan, *stages)


def cost_on(nodes: Cluster, plan: Plan) -> PlanCost:
    return cost_plan(make_costs(problem(nodes, global_batch_size=plan.global_batch_size)), plan)


def with_disk(disk: Disk) -> Cluster:
    return replace(EIGHT, nodes=tuple(replace(node, disk=disk) for node in EIGHT.nodes))


def test_a_disk_is_read_and_written_once_a_step_and_spares_the_host():
    disk = Disk(read=2e9, write=1e9, capacity=4 * GIB)
    found = cost_on(with_disk(disk), away(0.5, 0.8))
    first = found.stages[0]
    # The four cards of a node share its disk: 12 bytes of each of these parameters come and go.
    assert found.update_seconds == pytest.approx(0.5 * 0.8 * N * 12 * (4 / 2e9 + 4 / 1e9), rel=0.01)
    assert first.disk_bytes == pytest.approx(0.5 * 0.8 * N * 12, rel=0.01)
    slots = 4 * 16 * min(DISK_CHUNK, 0.5 * 0.8 * N)
    assert first.host_bytes == pytest.approx(0.5 * 0.2 * N * 16 + slots, rel=0.01)
    assert found.disk_bytes == pytest.approx(sum(stage.disk_bytes for stage in found.stages))
    # The card holds what it held before.
    on_host = cost_on(EIGHT, away(0.5))
    assert [stage.memory for stage in found.stages] == [stage.memory for stage in on_host.stages]
    assert on_host.disk_bytes == 0.0 and on_host.step_seconds < found.step_seconds
    # A node's default, which is of four cards.
    assert cost_on(EIGHT, away(0.5, 0.8)).update_seconds == pytest.approx(found.update_seconds)


def test_a_disk_that_is_too_small_does_not_fit():
    plan = away(0.5, 1.0)
    needed = 4 * max(stage.disk_bytes for stage in cost_on(EIGHT, plan).stages)
    assert cost_on(with_disk(Disk(read=1e9, write=1e9, capacity=round(needed) + 1)), plan).fits
    assert not cost_on(with_disk(Disk(read=1e9, write=1e9, capacity=round(needed) - 9)), plan).fits


def test_state_on_a_disk_is_a_part_of_what_is_offloaded():
    violation = next(iter(validate_plan(away(0.0, 0.5))))
    assert (
        violation.path[-1] == "optimizer_disk" and "optimizer_offload is 0; set it too" in violation.message
    )


def test_simulate_says_what_a_day_writes_to_disks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_plan(tmp_path / "plan.yaml", away(1.0, 1.0))
    (tmp_path / "cluster.yaml").write_text(dump(EIGHT))
    given = ["simulate", "--plan", str(tmp_path / "plan.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(given) == 0
    assert written_words(found["disk_bytes"], found["step_seconds"]) in capsys.readouterr().out
    assert written_words(12e9, 31.0) == "11.2 GiB written a step, 30.4 TiB a day"
    assert written_words(12e9, None) == "11.2 GiB written a step"
