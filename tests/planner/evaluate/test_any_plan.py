"""Plans of every kind: tensor-parallel stages, replicas, mixed pipelines, virtual stages, ZeRO."""

from dataclasses import replace

import pytest

from tests.planner.by_hand import pipeline, plan_on, stage_times
from tests.planner.search.test_search import MODEL, NETWORK, card, problem
from tests.support.project import on_devices, with_stages
from yuan_train.config.cluster import Cluster, NodeGroup
from yuan_train.config.errors import PlanError
from yuan_train.config.express import read_blocks, read_layout, to_blocks, to_layout
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import ScheduleName
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.evaluate.simulator import simulate, simulate_schedule
from yuan_train.schedule.schedules import ProgramShape, make_schedule
from yuan_train.schedule.step import one_worker_each

EIGHT = Cluster(
    name="eight",
    nodes=(
        NodeGroup(name="a", device="Card", devices=4, link=NETWORK, network=NETWORK),
        NodeGroup(name="b", device="Card", devices=4, link=NETWORK, network=NETWORK),
    ),
    device_types={"Card": card(8.0)},
)


def plan_of(*pipelines, schedule: ScheduleName = "1f1b", sharded=False):
    """A plan of these pipelines, each (number of micro-batches, [(replicas, number of layers), ...])."""
    made = [pipeline(count, stages) for count, stages in pipelines]
    plan = plan_on(problem(EIGHT), *made, schedule=schedule, optimizer_sharding=sharded)
    assert not list(validate_plan(plan))
    return plan


def cost(plan):
    return cost_plan(make_costs(problem(EIGHT, global_batch_size=plan.global_batch_size)), plan)


def on_cards(plan, numbers):
    """The plan with its ranks on other cards; 0 to 3 are in one node, 4 to 7 in the other."""
    return on_devices(plan, *(EIGHT.cards[number].name for number in numbers))


ONE = (((0,),), 8)
PAIR = [(((0,),), 4), (((1,),), 4)]


def test_tensor_parallel_halves_the_work_and_adds_all_reduces():
    alone, pair = cost(plan_of((4, [ONE]))), cost(plan_of((4, [(((0, 1),), 8)])))
    assert pair.stages[0].memory.parameters == pytest.approx(alone.stages[0].memory.parameters / 2, rel=1e-3)
    # 3 all-reduces of a hidden state each way and layer, at 1e-4 s and two rounds each, and one at each end.
    allreduce_seconds = 2 * (1e-4 + 256 * 128 * 2 / 2 / 1e9)
    assert pair.stages[0].forward_seconds > 8 * 3 * allreduce_seconds
    assert pair.stages[0].memory.total < alone.stages[0].memory.total


def test_replicas_share_the_micro_batches():
    single, double = cost(plan_of((8, [ONE]))), cost(plan_of((8, [(((0,), (1,)), 8)])))
    assert double.compute_seconds == pytest.approx(single.compute_seconds / 2)
    assert double.grad_reduce_seconds > 0 == single.grad_reduce_seconds
    assert len(double.simulations[0].busy_seconds) == 2


def test_owners_shard_the_optimizer():
    pipelines = [(4, [ONE]), (4, [(((1,),), 8)])]
    full, sharded = cost(plan_of(*pipelines)), cost(plan_of(*pipelines, sharded=True))
    assert sharded.stages[0].memory.optimizer == pytest.approx(full.stages[0].memory.optimizer / 2)
    assert sharded.update_seconds == pytest.approx(full.update_seconds / 2)


def test_an_owner_holds_its_share_of_the_optimizer():
    plan = plan_of((4, [ONE]), (4, [(((1,),), 3), (((2,),), 5)]), sharded=True)
    equal = cost(plan)
    (first,), second = plan.pipelines[0].stages, plan.pipelines[1].stages
    heavy = replace(
        plan,
        pipelines=(
            replace(plan.pipelines[0], stages=(replace(first, optimizer_share=3.0),)),
            replace(plan.pipelines[1], stages=(second[0], replace(second[1], optimizer_share=0.5))),
        ),
    )
    assert not list(validate_plan(heavy))
    mixed = cost(heavy)
    # 3 of 3 + 1, or of 3 + 0.5 for the later layers: a stage counts the most over its layers.
    ratios = [
        b.memory.optimizer / a.memory.optimizer for a, b in zip(equal.stages, mixed.stages, strict=True)
    ]
    assert ratios == pytest.approx([3 / 3.5 * 2, 1 / 4 * 2, 0.5 / 3.5 * 2])
    updates = [b.update_seconds / a.update_seconds for a, b in zip(equal.stages, mixed.stages, strict=True)]
    assert updates == pytest.approx(ratios)


def test_optimizer_state_on_the_host_leaves_the_card_and_takes_time():
    plan = plan_of((4, PAIR))
    stages = (replace(stage, optimizer_offload=0.25) for stage in plan.pipelines[0].stages)
    here, away = cost(plan), cost(with_stages(plan, *stages))
    assert away.stages[0].memory.optimizer == pytest.approx(0.75 * here.stages[0].memory.optimizer)
    assert away.stages[0].memory.parameters == here.stages[0].memory.parameters
    # A parameter's fp32 gradient is copied to the host at 16 GB/s and its bf16 weight back. Meanwhile the
    # host, at 25 GB/s, reads the gradient, reads and writes 12 bytes of state, and writes the weight. The
    # slowest counts, or the card, which steps its own part beside it.
    n = 4 * MODEL.layer_parameters + MODEL.embedding_parameters
    host = max(4 / 16e9, (4 + 2 * 12 + 2) / 25e9, 2 / 16e9)
    assert away.update_seconds == pytest.approx(max(0.75 * here.update_seconds, 0.25 * n * host), rel=0.01)


def test_mixed_pipelines_wait_for_each_other():
    pipelines = [(5, [ONE]), (3, [(((1,),), 3), (((2,),), 5)])]
    result = cost(plan_of(*pipelines))
    slowest = max(simulation.step_seconds for simulation in result.simulations)
    assert result.compute_seconds == slowest
    assert result.grad_reduce_seconds > 0
    assert len(result.stages) == 3


def test_virtual_stages_fill_faster_and_count_the_whole_card():
    plain = cost(plan_of((8, PAIR)))
    looped = [(((r,),), 2) for r in (0, 1, 0, 1)]
    virtual = cost(plan_of((8, looped), schedule="interleaved_1f1b"))
    assert len(virtual.simulations[0].busy_seconds) == 2
    first, third = virtual.stages[0], virtual.stages[2]
    assert first.memory == third.memory
    states = plain.stages[0].memory.parameters
    assert first.memory.parameters == pytest.approx(states)


def test_zero_bubble_splits_the_backward():
    # 2 workers, f = 1, b = 2 in two halves, free messages, m = 2: 1F1B takes (2 + 1) * 3 = 9.
    times = stage_times((1, 1), (2, 2), (0,))
    assert simulate_schedule(ProgramShape("1f1b", one_worker_each(2), 2), times).step_seconds == 9
    assert simulate_schedule(ProgramShape("zero_bubble", one_worker_each(2), 2), times).step_seconds < 9


def test_a_worker_sends_itself_nothing():
    workers = ((0,), (1,), (1,), (0,))
    times = stage_times((1,) * 4, (2,) * 4, (5, 1000, 5))
    steps = make_schedule("zero_bubble", num_micro_batches=1, workers=workers)
    result = simulate(steps, times, workers=workers)
    # 4 forwards, 2 messages down, 4 input gradients, 2 messages up, and the last weights.
    assert result.step_seconds == 4 + 10 + 4 + 10 + 1
    assert sum(result.busy_seconds) == 12


@pytest.mark.parametrize("text", ["Ettt|tt|ttL", "E|ttttttt|L", "Et*4,|t*3L", "Et*7L"])
def test_layouts_are_read_back(text):
    counts = read_layout(text, num_layers=7)
    stages = [(((r,),), n) for r, n in enumerate([*counts[:-1], counts[-1] + 1])]
    (planned,) = plan_of((8, stages)).pipelines
    again = read_layout(to_layout(planned), num_layers=8)
    assert again == (*counts[:-1], counts[-1] + 1)
    assert read_blocks(to_blocks(planned), num_layers=8) == again


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Ettt|tt", "wanted one E"),
        ("Ettx|L", "not made of E, t"),
        ("Et*99999999999|L", "not made of E, t"),
        ("Et|L", "1 layers, but the model has 7; assign every layer once"),
    ],
)
def test_wrong_layouts_are_refused(text, words):
    with pytest.raises(PlanError, match=words):
        read_layout(text, num_layers=7)


def test_a_stage_without_units_passes_on_whole_micro_batches():
    stages = [(((0,),), 4), (((1,),), 0), (((2,),), 4)]
    plan = plan_of((4, stages))
    larger = replace(plan, global_batch_size=16, pipelines=(replace(plan.pipelines[0], micro_batch_size=4),))
    for activations, gradients in (
        (t.send_activation_seconds, t.send_gradient_seconds) for t in cost(larger).times
    ):
        assert activations[0] == activations[1] == gradients[0] == gradients[1]
        assert activations[0] > cost(plan).times[0].send_activation_seconds[0]


def test_both_ends_of_a_tied_model_on_a_card_count_the_matrix_once():
    """In a V, the first card has the first and the last stage; as if it had them in one."""
    v = plan_of((4, [(((0,),), 2), (((1,),), 2), (((1,),), 2), (((0,),), 2)]), schedule="zero_bubble")
    matrix = MODEL.embedding_parameters
    found = {}
    for tied in (True, False):
        plan = replace(v, model=replace(MODEL, tie_embeddings=tied))
        costs = make_costs(problem(EIGHT, model=plan.model, global_batch_size=4))
        found[tied] = cost_plan(costs, plan)
    first, same = found[True].stages[0], found[False].stages[0]
    assert same.memory.parameters - first.memory.parameters == pytest.approx(2 * matrix)
    assert same.memory.optimizer - first.memory.optimizer == pytest.approx(12 * matrix)
    assert found[True].stages[1].memory == found[False].stages[1].memory
    held = MODEL.parameters - 4 * MODEL.layer_parameters
    assert first.memory.parameters == pytest.approx(2 * held)
    # The optimizer steps all that the card holds: two of the cards' stages.
    alone = cost(plan_of((4, [ONE])))
    assert found[True].update_seconds == pytest.approx(alone.update_seconds * held / MODEL.parameters)
