"""The flow of reinforcement learning: complete, bounded in staleness, and free of circles."""

from dataclasses import replace

import pytest

from yuan_train.schedule.flow import Flow, FlowStep, check_flow, make_flow

CASES = [
    dict(num_batches=n, num_engines=e, staleness=s, shared=shared, scores_apart=apart)
    for n in (1, 2, 5)
    for e in (1, 3)
    for s in (0, 1, 3)
    for shared in (False, True)
    for apart in (False, True)
    if not (shared and (s or e > 1))
]


@pytest.mark.parametrize("case", CASES)
def test_every_flow_passes_its_checker(case: dict[str, int]) -> None:
    check_flow(make_flow(**case))  # type: ignore[arg-type]


def test_a_step_later_than_the_bound_waits_for_weights() -> None:
    flow = make_flow(num_batches=4, num_engines=1, staleness=1)
    assert flow.waits[FlowStep("generate", 1, 0)] == ()
    assert flow.waits[FlowStep("generate", 3, 0)] == (FlowStep("publish", 1),)
    assert [step.kind for step in flow.programs["policy"]][:3] == ["score", "train", "publish"]
    with pytest.raises(ValueError, match="generate 3 of engine 0 may begin before publish 1 has ended"):
        check_flow(replace(flow, waits={**flow.waits, FlowStep("generate", 3, 0): ()}))


def test_a_stricter_bound_than_the_waits_is_a_fault() -> None:
    with pytest.raises(ValueError, match="generate 1 of engine 0 may begin before publish 0"):
        check_flow(replace(make_flow(num_batches=3, num_engines=1, staleness=1), staleness=0))


def test_a_circle_is_named() -> None:
    flow = make_flow(num_batches=2, num_engines=1, staleness=0)
    circle = {**flow.waits, FlowStep("generate", 0, 0): (FlowStep("publish", 0),)}
    with pytest.raises(ValueError, match="nobody goes on: policy at score 0, engine 0 at generate 0"):
        check_flow(replace(flow, waits=circle))


def test_missing_and_unordered_steps_are_named() -> None:
    flow = make_flow(num_batches=2, num_engines=2, staleness=1)
    without = {**flow.programs, "engine 1": flow.programs["engine 1"][:1]}
    with pytest.raises(ValueError, match="nobody does generate 1 of engine 1"):
        check_flow(replace(flow, programs=without))
    early = {**flow.waits, FlowStep("score", 0): (FlowStep("generate", 0, 0),)}
    with pytest.raises(ValueError, match="score 0 may begin before generate 0 of engine 1"):
        check_flow(replace(flow, waits=early))
    twice = Flow({"policy": (FlowStep("train", 0),) * 2}, {}, 0, 0)
    with pytest.raises(ValueError, match="a step appears twice"):
        check_flow(twice)
