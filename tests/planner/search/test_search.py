"""The search from problem to plan: its plans, the inputs that it refuses, its advice if nothing fits,
reports."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.by_hand import pipeline, plan_on
from tests.support.models import tiny_model
from tools.bench.problems import mixed_problem, small_problem
from yuan_train.config.cluster import CardCount, Cluster, DedicatedLink, Link, NodeGroup, load_cluster
from yuan_train.config.devices import GIB, DeviceType
from yuan_train.config.errors import ConfigError, NoPlanFits, SearchStopped
from yuan_train.config.express import is_expressible
from yuan_train.config.load import dump
from yuan_train.config.plan import PipelinePlan
from yuan_train.config.plan_constraints import load_plan, save_plan, validate_plan
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.costs.workload import PlanProblem
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.native.core import NAMES, DraftTable, PipelineRow, SpaceTable, StageRow
from yuan_train.planner.report.plan import layer_list, plan_html, plan_json, plan_table
from yuan_train.planner.search import drafts, search
from yuan_train.planner.search import find as find_module
from yuan_train.planner.search.search import SearchResult, search_plan, with_forecast

CONFIGS = Path(__file__).parents[3] / "configs"
MODEL = tiny_model(
    "yuan", num_layers=8, hidden_size=128, ffn_hidden_size=512, vocab_size=4096, max_sequence_length=256
)
NETWORK = Link(bandwidth=1e9, latency=1e-4)
VIRTUAL = ("interleaved_1f1b",)


def card(memory_gib: float = 4.0, *, speed: float = 1.0, bf16: bool = True) -> DeviceType:
    rate = 1e12 * speed
    return DeviceType(
        memory=int(memory_gib * GIB),
        reserved=GIB // 8,
        fp32=rate,
        fp16=rate,
        bf16=rate if bf16 else None,
        memory_bandwidth=1e11 * speed,
    )


def cluster(**types: tuple[int, DeviceType]) -> Cluster:
    """A cluster with one node per type, of (number of cards, device type)."""
    return Cluster(
        name="test",
        nodes=tuple(
            NodeGroup(name=name.lower(), device=name, devices=count, link=NETWORK, network=NETWORK)
            for name, (count, _) in types.items()
        ),
        device_types={name: device for name, (_, device) in types.items()},
    )


def problem(cards: Cluster, **changes: object) -> PlanProblem:
    given = {
        "cluster": cards,
        "model": MODEL,
        "sequence_length": 256,
        "global_batch_size": 16,
        "precision": "bf16",
    }
    return PlanProblem(**(given | changes))  # type: ignore[arg-type]


def find(given: PlanProblem, micro_batch_size: int | tuple[int, ...] = 1, **search: Any):
    """The search of the fastest 1F1B plan of one micro-batch size, without hosts, unless `search` says
    otherwise."""
    size = micro_batch_size if isinstance(micro_batch_size, int) else micro_batch_size[0]
    sizes = (size,) if isinstance(micro_batch_size, int) else micro_batch_size
    keys = {"schedule": ("1f1b",), "micro_batch_size": sizes, "offload": (), "simplicity": 0.0} | search
    return search_plan(given, SearchConfig(**keys), micro_batch_size=size)  # type: ignore[arg-type]


TWO_SPEEDS = cluster(Fast=(2, card(speed=3.0)), Slow=(2, card(speed=1.0)))


# --- plans -----------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=15)
@given(
    fast=st.integers(1, 3),
    slow=st.integers(0, 2),
    memory=st.sampled_from([0.2, 0.3, 4.0]),
    batch=st.sampled_from([4, 6, 16]),
    tied=st.booleans(),
    use_all=st.booleans(),
)
def test_every_plan_is_valid_and_fits(fast, slow, memory, batch, tied, use_all):
    types = {"Fast": (fast, card(memory, speed=3.0))} | ({"Slow": (slow, card())} if slow else {})
    given_problem = problem(
        cluster(**types), model=replace(MODEL, tie_embeddings=tied), global_batch_size=batch
    )
    try:
        result = find(given_problem, use_all_devices=use_all)
    except NoPlanFits as error:
        assert "Nearest" in str(error)
        return
    plan = result.best.plan
    assert plan.forecast is not None
    for stage in result.best.cost.stages:
        assert stage.memory.total <= stage.capacity_bytes
    costs = make_costs(given_problem)
    for candidate in (result.best, *result.runners_up):
        assert not list(validate_plan(candidate.plan))
        checked = cost_plan(costs, candidate.plan)
        assert checked.fits and checked.step_seconds == pytest.approx(candidate.step_seconds)
    assert plan.forecast.step_seconds == pytest.approx(result.best.step_seconds)
    assert 0 < plan.forecast.lower_bound_seconds <= plan.forecast.step_seconds
    assert all(result.best.step_seconds <= other.step_seconds * (1 + 1e-7) for other in result.runners_up)
    if use_all:
        assert len(plan.ranks) == fast + slow
        assert not result.left_out


@pytest.mark.parametrize(
    ("order", "keys", "expected"),
    [
        ("BAB", {}, ["012"]),
        ("ABA", {}, ["012"]),
        ("BABA", {"pipelines": (2,)}, ["012", "3"]),
        # Two equal pipelines would be B, A and A, B: one of them is not in the cluster's order.
        ("BAAB", {}, ["0123"]),
    ],
)
def test_a_fixed_order_is_the_clusters_where_equal_cards_stand_apart(order, keys, expected):
    kinds = {"A": card(speed=3.0), "B": card(speed=2.0)}
    nodes = tuple(
        NodeGroup(name=str(i), device=kind, devices=1, link=NETWORK, network=NETWORK)
        for i, kind in enumerate(order)
    )
    apart = Cluster(name="apart", nodes=nodes, device_types=kinds)
    plan = find(
        problem(apart), device_order="fixed", use_all_devices=True, replicas=(1,), tensor=(1,), **keys
    ).best.plan
    found = [
        "".join(plan.ranks[stage.ranks[0]].device[0] for stage in pipeline.stages)
        for pipeline in plan.pipelines
    ]
    assert found == expected


def test_same_input_same_plan_byte_for_byte(tmp_path):
    texts = []
    for name in ("a.yaml", "b.yaml"):
        save_plan(tmp_path / name, find(problem(TWO_SPEEDS)).best.plan)
        texts.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1]
    assert dump(load_plan(tmp_path / "a.yaml")).encode() == texts[0]


def test_uneven_cut_beats_the_even_split_on_the_laptop():
    laptop = load_cluster(CONFIGS / "cluster" / "laptop.yaml")
    result = find(problem(laptop, precision="fp32"))
    assert result.even_split is not None
    assert result.best.step_seconds < 0.7 * result.even_split.step_seconds
    assert layer_list(result.even_split) in ("3,3,2", "4,4")


def test_equal_pipelines_have_equal_cuts_and_share_the_batch():
    result = find(problem(TWO_SPEEDS), pipelines=(2,))
    plan = result.best.plan
    assert len(plan.pipelines) == 2
    cuts = [[stage.layers for stage in pipeline.stages] for pipeline in plan.pipelines]
    assert cuts[0] == cuts[1]
    assert [pipeline.num_sequences for pipeline in plan.pipelines] == [8, 8]
    assert result.best.cost.grad_reduce_seconds > 0


def test_a_slow_network_forbids_data_parallelism():
    """Two equal cards with a slow network: data parallelism would all-reduce all gradients, so a pipeline
    wins."""
    slow = Link(bandwidth=1e6, latency=0.0)
    nodes = tuple(NodeGroup(name=name, device="Fast", network=slow) for name in "ab")
    cards = Cluster(name="slow", nodes=nodes, device_types={"Fast": card(speed=3.0)})
    result = find(problem(cards, global_batch_size=2), use_all_devices=True, pipelines=(1, 2))
    untied = problem(cards, global_batch_size=2, model=replace(MODEL, tie_embeddings=False))
    assert len(find(untied, use_all_devices=True, pipelines=(1, 2)).best.plan.pipelines) == 1
    # With a tied embedding a pipeline reduces the embedding's gradient; data parallelism, every gradient.
    assert result.best.cost.tied_embedding_seconds > 0


def test_a_fraction_of_the_memory_is_filled():
    roomy = find(problem(cluster(Card=(1, card())))).best.cost.stages[0].memory.total
    cards = cluster(Card=(1, card(roomy / 0.97 / GIB)))
    given = problem(cards, memory_fraction=0.95)
    found, filled = find(given), find(problem(cards))
    memory = cards.device_type("Card").memory
    share, whole = (result.best.cost.stages[0].memory.total / memory for result in (found, filled))
    assert share <= 0.95 < whole == pytest.approx(0.97, rel=1e-6)
    assert filled.best.step_seconds < found.best.step_seconds
    assert found.lower_bound_seconds <= found.best.step_seconds
    assert "memory: at most 95% of what torch reports of a card (search.memory_fraction: 0.95)" in plan_table(
        found, given, verbose=True
    )
    # What is said where nothing fits.
    tight = problem(cluster(Card=(1, card(0.13))), memory_fraction=0.9)
    with pytest.raises(NoPlanFits, match=r"of 119.8 MiB \(90% of 133.1 MiB, search.memory_fraction\)"):
        find(tight)


def test_cards_of_several_types_in_a_node(tmp_path: Path) -> None:
    """The plan is that of two nodes joined by links like those inside."""
    types = {"Fast": card(speed=3.0), "Slow": card()}
    near = Link(bandwidth=4e9, latency=1e-5)
    mixed = NodeGroup(name="box", link=near, devices=tuple(CardCount(type=name, count=2) for name in types))
    assert [(c.name, c.type) for c in Cluster(name="m", nodes=(mixed,)).cards] == [
        ("box/0", "Fast"),
        ("box/1", "Fast"),
        ("box/2", "Slow"),
        ("box/3", "Slow"),
    ]
    apart = tuple(
        NodeGroup(name=name.lower(), device=name, devices=2, link=near, network=NETWORK) for name in types
    )
    joined = DedicatedLink(from_="fast", to="slow", bandwidth=4e9, latency=1e-5, both_ways=True)
    found = [
        find(problem(Cluster(name="c", nodes=nodes, links=links, device_types=types)))
        for nodes, links in (((mixed,), ()), (apart, (joined,)))
    ]
    assert found[0].best.step_seconds == pytest.approx(found[1].best.step_seconds, rel=1e-9)
    assert found[0].lower_bound_seconds == pytest.approx(found[1].lower_bound_seconds, rel=0.02)
    # A network between two nodes is slower: what is claimed to be equal is not equal of itself.
    far = Cluster(name="c", nodes=apart, device_types=types)
    assert find(problem(far)).best.step_seconds > 1.02 * found[0].best.step_seconds
    plan = found[0].best.plan
    assert [(rank.device, rank.type) for rank in plan.ranks] == [
        (c.name, c.type) for c in Cluster(name="m", nodes=(mixed,)).cards
    ]
    save_plan(tmp_path / "plan.yaml", plan)
    assert load_plan(tmp_path / "plan.yaml") == plan
    page = plan_html(found[0], problem(Cluster(name="c", nodes=(mixed,), device_types=types)))
    assert "box: 2 x Fast + 2 x Slow, inside 4 GB/s" in page


@pytest.mark.parametrize("path", sorted((CONFIGS / "cluster").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_cluster_file_plans(path):
    precision = "fp32" if path.stem == "rtx-mix" else "bf16"
    given_problem = problem(load_cluster(path), precision=precision, global_batch_size=24)
    if path.stem == "v100-t4":
        with pytest.raises(ConfigError, match=r"V100-16G\) have no bf16 units, and there are no other cards"):
            find(given_problem)
        given_problem = replace(given_problem, precision="fp16")
    # Of the largest, one number of pipelines: its hundreds of shapes take a minute.
    result = find(given_problem, **({"pipelines": (2,)} if path.stem == "geforce-40" else {}))
    assert not list(validate_plan(result.best.plan))


def test_full_recompute_only_where_memory_requires_it():
    model = replace(MODEL, num_layers=12)
    roomy = find(problem(cluster(Fast=(1, card(4.0))), model=model)).best
    assert roomy.plan.pipelines[0].stages[0].recompute == "none"
    need = roomy.cost.stages[0].memory.total / GIB
    tight = find(problem(cluster(Fast=(1, card(need - 0.013))), model=model)).best
    assert tight.plan.pipelines[0].stages[0].recompute == "full"
    assert tight.step_seconds > roomy.step_seconds


# --- refused inputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ({"tensor": (3,)}, r"search.tensor: \[3\] asks for .* cannot run yet, or not with this model; add 1"),
        ({"pipelines": (5,)}, r"no pipelines can be made: 4 cards, global_batch_size 16 .* pipelines \[5\]"),
        ({"num_micro_batches": (7,)}, r"num_micro_batches \[7\] has no solution; loosen"),
        (
            {"replicas": (5,)},
            r"num_micro_batches any, of which replicas \[5\] need at least 5, has no solution",
        ),
    ],
)
def test_search_keys_without_a_solution_are_refused(search, words):
    with pytest.raises(ConfigError, match=words):
        find(problem(TWO_SPEEDS), **search)


def test_more_cards_than_parts_of_the_model():
    many = problem(cluster(Fast=(12, card())))
    with pytest.raises(ConfigError, match="12 cards, .* that uses every card, with at most 10 stages"):
        find(many, use_all_devices=True, pipelines=(1,), tensor=(1,), replicas=(1,))
    assert (
        len(find(many, use_all_devices=True, pipelines=(1, 2), tensor=(1,), replicas=(1,)).best.plan.ranks)
        == 12
    )
    assert len(find(many, pipelines=(1,), tensor=(1,), replicas=(1,)).best.plan.ranks) <= 10
    # No equal pipelines of at most 10 stages have 23 cards; unlike ones do.
    unlike = find(problem(cluster(Fast=(23, card()))), use_all_devices=True, tensor=(1,), replicas=(1,))
    assert len(unlike.best.plan.ranks) == 23


def test_values_of_a_list_that_cannot_run_are_dropped():
    result = find(problem(TWO_SPEEDS), tensor=(1, 3), recompute=("selective", "none"))
    plan = result.best.plan
    assert {len(replica) for stage in plan.pipelines[0].stages for replica in stage.replicas} == {1}
    assert {stage.recompute for stage in plan.pipelines[0].stages} == {"none"}


def test_selective_recompute_is_chosen_where_it_is_enough():
    """The model fits this card only if some of its activations are recomputed."""
    given_problem = problem(cluster(Fast=(1, card(0.27))))
    results = {
        kinds: find(given_problem, micro_batch_size=4, recompute=kinds).best
        for kinds in (("selective",), ("full",))
    }
    best = find(given_problem, micro_batch_size=4).best
    assert {stage.recompute for stage in best.plan.pipelines[0].stages} == {"selective"}
    assert best.step_seconds <= results["selective",].step_seconds < results["full",].step_seconds
    with pytest.raises(NoPlanFits):
        find(given_problem, micro_batch_size=4, recompute=("none",))


MIXED = cluster(New=(2, card()), Old=(1, card(bf16=False)))


def test_cards_without_bf16_are_left_out_and_named():
    result = find(problem(MIXED))
    assert [item.card.name for item in result.left_out if "bf16" in item.reason] == ["old/0"]
    assert "Old" not in {entry.type for entry in result.best.plan.ranks}
    assert "1 Old (old/0): no bf16 units; set train.precision: fp16" in plan_table(result, problem(MIXED))


def test_why_cards_are_left_out():
    """One that a single pipeline could take gains nothing; two pipelines cannot share the odd one."""
    slow = find(problem(cluster(Fast=(2, card(speed=100.0)), Slow=(1, card(speed=0.01)))))
    assert [(item.card.name, item.reason) for item in slow.left_out] == [
        ("slow/0", "not in the fastest plan found")
    ]
    odd = find(problem(cluster(Fast=(3, card()))), pipelines=(2,), engine="megatron")
    (item,) = odd.left_out
    assert item.reason == "the Fasts do not divide into 2 equal pipelines"
    (item,) = find(problem(cluster(Fast=(3, card()))), pipelines=(1,), tensor=(2,)).left_out
    assert item.reason == "the Fasts do not divide into groups of 2 within their nodes"
    unlike = cluster(Fast=(1, card(speed=3.0)), Half=(1, card()), Slow=(1, card(speed=0.01)))
    (item,) = find(problem(unlike), pipelines=(2,)).left_out
    assert (item.card.name, item.reason) == ("slow/0", "not in the fastest plan found")


def test_fp16_uses_cards_without_bf16():
    result = find(problem(MIXED, precision="fp16"), use_all_devices=True)
    assert "Old" in {entry.type for entry in result.best.plan.ranks} and not result.left_out
    oldest = cluster(New=(2, card()), Oldest=(1, replace(card(bf16=False), fp16=None)))
    left_out = find(problem(oldest)).left_out
    assert [item.reason for item in left_out if "bf16" in item.reason] == [
        "no bf16 units; set train.precision: fp32 to use it"
    ]


def test_all_cards_cannot_be_used_where_some_lack_bf16():
    with pytest.raises(
        ConfigError, match=r"old/0 \(Old\) have no bf16 units, and search.use_all_devices requires them"
    ):
        find(problem(MIXED), use_all_devices=True)
    fp32 = find(problem(MIXED, precision="fp32"), use_all_devices=True)
    assert len(fp32.best.plan.ranks) == 3


# --- nothing fits ----------------------------------------------------------------------------------------


def test_nearest_miss_says_what_is_missing():
    small = cluster(Fast=(2, card(0.15, speed=3.0)))
    with pytest.raises(
        NoPlanFits, match=r"Nearest: \d stages?; stage \d \(fast/\d.*, Fast, .*\) needs .* MiB of 153.6 MiB"
    ):
        find(problem(small))
    assert NoPlanFits.exit_code == 3


def test_nearest_miss_says_what_recompute_would_need():
    tight = problem(cluster(Fast=(1, card(0.195))))
    both = r"with recompute: selective it needs .* MiB, with recompute: full it needs .* MiB"
    with pytest.raises(NoPlanFits, match=rf"needs .* of 199.7 MiB; {both}.* \[none, selective, full\]"):
        find(tight, recompute=("none",))
    with pytest.raises(NoPlanFits, match=r"MiB; with recompute: full it needs .*: \[none, full\]"):
        find(tight, recompute=("none", "selective"))


# --- reports ---------------------------------------------------------------------------------------------


def test_the_printed_table_is_short_and_names_the_bottleneck():
    result = find(problem(TWO_SPEEDS))
    text = plan_table(result, problem(TWO_SPEEDS))
    assert len(text.splitlines()) <= 12
    assert "the slowest" in text
    assert "even split: " in text
    assert not any(
        word in text for word in ("no plan takes less", "runner-up", "Megatron layout", "catalogue")
    )
    text = plan_table(result, problem(TWO_SPEEDS), verbose=True)
    assert len(text.splitlines()) <= 24 and "runner-up: " in text and "Megatron layout E" in text
    assert "Fast: estimated from the catalogue" in text.splitlines()[-1]
    forty = problem(
        load_cluster(CONFIGS / "cluster" / "geforce-40.yaml"), model=replace(MODEL, num_layers=60)
    )
    assert len(plan_table(find(forty, pipelines=(1,), use_all_devices=True), forty).splitlines()) <= 40


def shown(given: PlanProblem, *pipelines: PipelinePlan) -> SearchResult:
    """A result with a plan by hand in it."""
    found, costs = find(given), make_costs(given)
    plan = plan_on(given, *pipelines, optimizer_sharding=found.best.plan.optimizer_sharding)
    assert not list(validate_plan(plan))
    best = with_forecast(costs, replace(found.best, plan=plan, cost=cost_plan(costs, plan)), 0.0)
    return replace(found, best=best)


def test_unlike_pipelines_are_printed_apart():
    """Each stage of each, with its own layers and memory; alike ones together, with their share."""
    given = problem(cluster(Fast=(3, card(speed=3.0)), Slow=(4, card(2.0))))
    long = pipeline(4, [(((3,),), 3), (((4,),), 1), (((2,),), 4)])
    result = shown(given, pipeline(6, [(((0,),), 8)]), long, pipeline(6, [(((1,),), 8)]))
    lines = plan_table(result, given, verbose=True).splitlines()
    first = lines.index(" pipelines 0, 2: 6 micro-batches of 1 each, 12 of the batch's 16 sequences")
    second = lines.index(" pipeline 1: 4 micro-batches of 1, 4 of the batch's 16 sequences")
    assert "3 pipelines x 1 to 3 stages, 4 to 6 micro-batches of 1" in lines[0]
    rows = [*lines[first + 1 : second], *lines[second + 1 : second + 4]]
    stages = [stage for stage in result.best.cost.stages if stage.pipeline < 2]
    layers = ("0-7 +emb +head", "0-2 +emb", "3 ", "4-7 +head")
    for row, stage, words in zip(rows, stages, layers, strict=True):
        capacity = stage.card_bytes / GIB
        assert row.startswith(f" {stage.stage} ") and f"{stage.card.type} {stage.card.name} " in row
        assert f" {words}" in row and f"{stage.memory.total / GIB:.1f} / {capacity:.1f}" in row
    assert "x2" in rows[0] and "x2" not in "".join(rows[1:])
    assert " layers 8 | 3,1,4" in lines
    assert [item["num_micro_batches"] for item in plan_json(result, path=None)["pipelines"]] == [6, 4, 6]


def test_the_slowest_stage_is_the_busiest_and_not_one_whose_replicas_share_the_work():
    """Five layers on two replicas cost each micro-batch less of a step than three on one card."""
    given = problem(cluster(Slow=(3, card()), Fast=(1, card(speed=3.0))))
    result = shown(given, pipeline(16, [(((0,), (1,)), 5), (((2,),), 3), (((3,),), 0)]))
    work = [stage.forward_seconds + stage.backward_seconds for stage in result.best.cost.stages]
    assert work[0] == max(work)
    rows = {line.split()[0]: line for line in plan_table(result, given).splitlines()[2:5]}
    assert [number for number, row in rows.items() if "the slowest" in row] == ["1"]
    rows = plan_html(result, given).split("<tr>")
    assert ["slow/2" in row for row in rows if "the slowest" in row] == [True]


def test_the_reason_for_no_even_split():
    """One for each way to have none."""
    many = problem(cluster(Fast=(10, card(speed=3.0))))
    result = find(many, pipelines=(1,), tensor=(1,), replicas=(1,), use_all_devices=True)
    assert "no even split: it would have 10 stages, and the model has 8 layers" in plan_table(result, many)
    two = problem(cluster(Fast=(1, card(speed=3.0)), Slow=(1, card())))
    result = find(two, pipelines=(2,))
    assert "no even split: the cards, or the batch, do not divide into equal" in plan_table(result, two)
    ticks = iter(range(10_000))
    result = search_plan(
        problem(TWO_SPEEDS),
        SearchConfig(time_limit=1.0),
        micro_batch_size=1,
        clock=lambda: float(next(ticks)),
    )
    # Few cards have time for it, and the best so far is kept.
    assert result.stopped and " even split: " in plan_table(result, problem(TWO_SPEEDS))
    assert not result.exact and not list(validate_plan(result.best.plan))
    assert result.lower_bound_seconds <= result.best.step_seconds
    crowd = problem(cluster(Fast=(60, card())), global_batch_size=240)
    result = search_plan(
        crowd, SearchConfig(time_limit=1.0), micro_batch_size=1, clock=lambda: float(next(ticks))
    )
    assert "no even split: search.time_limit was over before its turn" in plan_table(result, crowd)


def test_page_is_self_contained_and_has_the_plan(tmp_path):
    result = find(problem(TWO_SPEEDS))
    page = plan_html(result, problem(TWO_SPEEDS))
    assert "http" not in page and "<script" not in page
    for word in ("prefers-color-scheme:dark", "@media print", "<svg", "Timeline of one step", "Runners-up"):
        assert word in page
    start = page.index('<pre id="plan">') + len('<pre id="plan">')
    text = page[start : page.index("</pre>", start)]
    path = tmp_path / "plan.yaml"
    path.write_text(
        text.replace("&quot;", '"').replace("&#x27;", "'").replace("&lt;", "<").replace("&amp;", "&")
    )
    assert load_plan(path) == result.best.plan


def test_tokens_are_divided_where_that_gains() -> None:
    """On cards that need it to keep the activations of long sequences; a plan says itself what it costs."""
    length = 8192
    short = problem(
        cluster(Card=(4, card(0.35))),
        model=replace(MODEL, max_sequence_length=length),
        sequence_length=length,
    )
    keys: dict[str, Any] = {"tensor": (2,), "recompute": ("none", "selective")}
    whole, divided, both = (
        find(short, **keys, sequence_parallel=choice).best for choice in ((False,), (True,), (False, True))
    )
    assert not whole.plan.sequence_parallel and divided.plan.sequence_parallel
    assert divided.step_seconds < whole.step_seconds
    assert replace(both.plan, forecast=None) == replace(divided.plan, forecast=None)
    for found in (whole, divided):
        assert cost_plan(make_costs(short), found.plan).step_seconds == found.step_seconds
    # The same cut with whole tokens does not fit.
    assert not cost_plan(make_costs(short), replace(divided.plan, sequence_parallel=False)).fits
    # Alone on each card there is nothing to divide.
    single = find(problem(TWO_SPEEDS), tensor=(1,), sequence_parallel=(False, True))
    assert not single.best.plan.sequence_parallel


def test_what_is_claimed_of_two_spaces_holds_in_both() -> None:
    """The one with whole tokens has no plan that fits, so that the other one's bound alone would be claimed;
    where neither is left out, no plan of either may be below the bound."""
    given = problem(TWO_SPEEDS)
    keys: dict[str, Any] = {"tensor": (1, 2), "pipelines": (1,)}
    whole, divided, both = (
        find(given, **keys, sequence_parallel=choice) for choice in ((False,), (True,), (False, True))
    )
    least = min(whole.lower_bound_seconds, divided.lower_bound_seconds)
    assert both.lower_bound_seconds == pytest.approx(least)
    assert both.best.plan.forecast is not None
    assert both.best.plan.forecast.lower_bound_seconds == both.lower_bound_seconds
    assert both.exact == (both.bound is None)
    assert not both.exact or least >= both.best.step_seconds * (1 - 1e-9)
    assert both.num_simulated == whole.num_simulated + divided.num_simulated


def test_a_space_without_a_plan_lowers_what_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its search was stopped: there may be a plan, as fast as its bound says."""
    given, keys = problem(TWO_SPEEDS), {"tensor": (1, 2), "pipelines": (1,)}
    search_one = search._search  # pyright: ignore[reportPrivateUsage]

    def stops_in_one(own: PlanProblem, *rest: Any, **others: Any) -> SearchResult:
        if own.sequence_parallel:
            raise SearchStopped("over")
        return replace(search_one(own, *rest, **others), exact=True, bound=None)

    alone = find(given, **keys, sequence_parallel=(False,))  # type: ignore[arg-type]
    monkeypatch.setattr(search, "_search", stops_in_one)
    found = find(given, **keys, sequence_parallel=(False, True))  # type: ignore[arg-type]
    assert found.best.step_seconds == alone.best.step_seconds
    assert found.stopped and not found.exact and found.bound is not None
    assert found.bound.seconds == found.lower_bound_seconds < found.best.step_seconds


@pytest.mark.parametrize(("schedules", "words"), [(("1f1b",), "search keys"), (VIRTUAL, "Add 1f1b")])
def test_why_no_plan_was_kept(
    monkeypatch: pytest.MonkeyPatch, schedules: tuple[str, ...], words: str
) -> None:
    """Drafts fit, and none of them is wanted: 1f1b is proposed only where it is not among the schedules."""
    monkeypatch.setattr(drafts, "judge", lambda *_: None)
    monkeypatch.setattr(find_module, "is_provable", lambda *_: False)
    monkeypatch.setattr(find_module, "with_special_plans", lambda space, ranked: [])
    with pytest.raises(NoPlanFits, match=words) as refused:
        find(problem(TWO_SPEEDS), schedule=schedules)
    assert ("1f1b to" in str(refused.value)) == (schedules == VIRTUAL)


# --- shapes ----------------------------------------------------------------------------------------------


ALONE: dict[str, Any] = {"pipelines": (1,), "tensor": (1,), "replicas": (1,)}
"""Search keys that leave one shape: one pipeline, one card per stage."""


def test_mixed_pipelines_shard_the_optimizer_state():
    """Each card has memory for the model's weights and gradients, and for half of its optimizer state."""
    cards = cluster(Fast=(1, card(0.195, speed=2.0)), Slow=(1, card(0.195)))
    search: dict[str, Any] = {"pipelines": (2,), "recompute": ("none",)}
    plan = find(problem(cards), **search).best.plan
    assert len(plan.pipelines) == 2 and plan.optimizer_sharding and not list(validate_plan(plan))
    with pytest.raises(NoPlanFits):
        find(problem(cards), optimizer_sharding=(False,), **search)


def test_interleaved_stages_are_found_where_the_best_cut_has_none():
    """The best 1F1B plan of this cluster has a pipeline of one stage, which has no virtual stages."""
    laptop = load_cluster(CONFIGS / "cluster" / "laptop.yaml")
    plain = find(problem(laptop, precision="fp32"))
    assert min(len(pipeline.stages) for pipeline in plain.best.plan.pipelines) == 1
    result = find(problem(laptop, precision="fp32"), schedule=("interleaved_1f1b",))
    assert result.best.plan.schedule == "interleaved_1f1b" and not list(validate_plan(result.best.plan))
    assert not result.exact
    one_layer = problem(laptop, precision="fp32", model=replace(MODEL, num_layers=1))
    with pytest.raises(NoPlanFits, match="virtual"):
        find(one_layer, schedule=("interleaved_1f1b",))


# --- the plans of one engine -----------------------------------------------------------------------------


MEGATRON: dict[str, Any] = {"engine": ("megatron",)}
EVERY = ("1f1b", "interleaved_1f1b", "zero_bubble", "gpipe")


def test_every_plan_shown_is_one_that_megatron_core_runs() -> None:
    given = problem(TWO_SPEEDS, global_batch_size=12)
    free = find(given, schedule=EVERY)
    found = find(given, schedule=EVERY, **MEGATRON)
    assert all(is_expressible(c.plan) for c in (found.best, *found.runners_up))
    # Else the restriction would not be seen here.
    assert not all(is_expressible(c.plan) for c in (free.best, *free.runners_up))
    assert free.best.step_seconds <= found.best.step_seconds
    both = find(given, schedule=EVERY, engine=("yuan", "megatron"))
    assert both.best.step_seconds == free.best.step_seconds


def test_cards_of_another_backend_are_left_out() -> None:
    other = card(speed=0.5)
    cards = cluster(Fast=(2, card(speed=3.0)), Other=(1, type(other)(**{**vars(other), "backend": "rccl"})))
    found = find(problem(cards), **MEGATRON)
    assert {entry.type for entry in found.best.plan.ranks} == {"Fast"}
    assert [left.card.type for left in found.left_out] == ["Other"]


def test_keys_that_leave_no_plan_for_it() -> None:
    with pytest.raises(
        ConfigError, match=r"search.recompute: \[selective\], but megatron-core .* has only none"
    ):
        find(problem(TWO_SPEEDS), recompute=("selective",), **MEGATRON)


@pytest.mark.parametrize(
    ("found", "taken"),
    [
        ([0.5, 0.5, 0.4], [0.5]),
        ([0.5, 0.4, 0.5, 0.4, 0.3], [0.4, 0.5]),
        ([0.6, 0.5, 0.4, 0.3], [0.3, 0.4, 0.5, 0.6]),
        ([None, 0.5], []),
    ],
)
def test_few_cards_are_searched_again_until_the_fastest_is_found_twice(
    found: list[float | None], taken: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most so many times, and not again if nothing fits."""
    left = iter(found)

    def search_space(*_: object, keeps_to_cards: bool) -> tuple[list[Any], list[Any], list[Any]]:
        step = next(left)
        return [], [] if step is None else [(step, object())], []

    monkeypatch.setattr(drafts, "search_space", search_space)
    none: Any = None
    pools = drafts.search_again(none, none, [], keeps_to_cards=False, times=4)
    assert [step for step, _ in pools.beside] == taken
    assert not pools.on_cards
    assert not pools.with_state


def test_pipelines_of_several_drafts_are_put_together() -> None:
    """Of all cards those that take most sequences in a second, with the whole batch between them."""
    problem = mixed_problem("l40s-a100-a10-2080ti")
    tables = drafts.make_tables(make_costs(problem), (1,), (1,))
    assert tables is not None
    pools, batch = list(map(len, tables.pools)), problem.global_batch_size

    def draft(*wanted: int, schedule: str = "1f1b") -> DraftTable:
        rows = [StageRow(width=1, num_replicas=1) for _ in wanted]
        for row, pool in zip(rows, wanted, strict=True):
            row.pools[0] = pool
        lines = [PipelineRow(0, batch // len(wanted), p, 1) for p in range(len(wanted))]
        return drafts.make_draft(NAMES.index(schedule), 1, lines, rows)

    def crossed(*known: tuple[float, DraftTable]) -> list[list[tuple[int, int]]]:
        found = drafts.cross_drafts(tables, SpaceTable(schedules=1 << NAMES.index("1f1b")), [list(known)])
        return [
            [(one.stages[p].pools[0], one.pipelines[p].num_micro_batches) for p in range(one.num_pipelines)]
            for _, one in found
        ]

    slow, fast = (2.0, draft(0, 1)), (1.0, draft(2, 2))
    assert not crossed(slow, (1.0, draft(2, 3, schedule="gpipe")))
    fastest, *others = crossed(slow, fast)
    assert sorted(pool for pool, _ in fastest) == [p for p in range(3) for _ in range(pools[p])]
    for one in (fastest, *others):
        assert sum(count for _, count in one) == batch
        shares = [{count for pool, count in one if (pool == 2) == is_fast} for is_fast in (True, False)]
        assert all(abs(a - 2 * b) <= 2 for a, b in itertools.product(*shares))


def test_few_cards_are_searched_by_numbers_of_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random drafts of any number of pipelines seldom lead to the two that are 10 % faster here."""
    monkeypatch.setattr(drafts, "LEAST_BUDGET", 600_000)
    monkeypatch.setattr(drafts, "FIRST_SEED", 2300)
    search = SearchConfig(simplicity=0.0, offload=())
    plan = search_plan(small_problem(14), search, micro_batch_size=1, again=False).best.plan
    assert sorted(len(pipeline.stages) for pipeline in plan.pipelines) == [3, 5]


def test_more_layers_than_the_core_counts_are_refused() -> None:
    given = problem(TWO_SPEEDS, model=replace(MODEL, num_layers=10_001))
    with pytest.raises(ConfigError, match="num_layers: wanted at most 10000 to plan for, got 10001"):
        find(given)
