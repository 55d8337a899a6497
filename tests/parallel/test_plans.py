"""Every kind of plan against one process: losses, gradient norms and weights, with negative controls."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.project import difference, parse_plan, read_metrics, run_config
from tests.support.ranks import Case, run_alone, run_cases, same_saved, saved_tensors
from tests.support.spawn import free_port
from yuan_train.config.devices import DeviceType
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import RunConfig
from yuan_train.parallel.grid import Grid

# In the short form of `parse_plan`.
PLANS: dict[str, dict[str, Any]] = yaml.safe_load("""
wide, narrow, wide: {text: "1x8: 2@0,1 | 2@2 | 2@3,4"}
one, then two replicas: {text: "1x8: 3@0 | 3@1;2"}
two wide replicas: {text: "1x8: 3@0,1;2,3 | 3@4"}
pipelines of different widths: {text: "1x4: 2@0,1 | 4@2 / 1x4: 3@3 | 3@4,5"}
empty first and last stages: {text: "1x8: 0@0 | 6@1,2 | 0@3"}
an empty stage between: {text: "1x8: 3@0 | 0@1 | 3@2"}
replicas beside another pipeline:
  {text: "1x4: 3@0;1 | 3@2 / 2x2: 6@3", schedule: gpipe, optimizer_sharding: true}
fewer micro-batches than stages: {text: "4x2: 1@0 | 2@1 | 2@2 | 1@3"}
two zero-bubble pipelines in Vs:
  {text: "1x5: 1@0 | 2@1 | 2@1 | 1@0 / 1x3: 2@2 | 1@3 | 1@3 | 2@2", schedule: zero_bubble}
sharded state of different widths: {text: "1x4: 2@0,1 | 4@2 / 1x4: 3@3 | 3@4,5", optimizer_sharding: true}
unequal shares of replicas: {text: "1x8: 3@0;1 | 3@2", optimizer_sharding: true, optimizer_share: [1, 4]}
unequal shares of mixed pipelines:
  {text: "1x4: 4@0 | 2@1 / 2x2: 6@2", optimizer_sharding: true, optimizer_share: [1, 0.001, 5]}
# Of one worker there are two stages, of another one.
tokens divided:
  {text: "1x4: 2.5@0,1 selective | 3.5@2 / 2x2: 1@3,4 full:1 | 2@5 | 3@3,4", schedule: interleaved_1f1b,
   sequence_parallel: true, optimizer_sharding: true}
tokens divided, zero bubble:
  {text: "1x8: 2@0,1 selective:1 | 4@2,3", schedule: zero_bubble, sequence_parallel: true}
tokens divided, activations on hosts:
  {text: "1x8: 2@0,1 selective:1 | 4@2,3", sequence_parallel: true, activation_offload: [2, 3],
   resident_parts: [4, 6]}
half layers beside whole ones:
  {text: "1x4: 2.5@0,1 | 3.5@2 / 1x4: 3@3 | 0.5@4 | 2.5@5", optimizer_sharding: true,
   optimizer_share: [1, 3, 7, 1, 2]}
half layers, virtual stages:
  {text: "1x8: 0.5@0 | 0.5@1 | 1.5@0 | 1@1 selective | 2@0 full:1 | 0.5@1", schedule: interleaved_1f1b}
half layers, zero bubble: {text: "1x8: 1.5@0 | 2@1 | 1.5@1 | 1@0", schedule: zero_bubble}
deeper warm-up, replicas: {text: "1x8: 2@0 | 2@1;2 | 2@3", in_flight: [5, 5, 2]}
shallower warm-up: {text: "1x8: 2@0 | 3@1 | 1@2", in_flight: [2, 1, null]}
recompute of all kinds: {text: "1x8: 2@0,1 selective | 3@2;3 full:2 | 1@4"}
recompute of all kinds, interleaved:
  {text: "1x8: 1@0 selective | 2@1 full:1 | 1@2 | 1@0 | 1@1 full | 0@2 selective",
   schedule: interleaved_1f1b}
recompute of all kinds, zero bubble:
  {text: "1x8: 1@0,1 selective | 2@2 full:1 | 2@2 selective:1 | 1@0,1", schedule: zero_bubble}
""")
FP32_TOO = ("wide, narrow, wide", "tokens divided")
"""The second has state that is shared, both kinds of recompute, and stages of several workers."""
STEPS = 2
"""The second one has the loss after an update, and begins with what the first has left behind; what it leaves
is compared too."""
TOLERANCE = {"fp32": 1e-5, "fp64": 1e-12}


def overrides(precision: str, folder: Path | None = None) -> tuple[str, ...]:
    saves = (f"checkpoint.directory={folder}",) if folder else ()
    steps = (f"train.steps={STEPS}", f"validation.every={STEPS}")
    # One bucket a layer: many reductions inside each last backward.
    return (f"train.precision={precision}", *steps, "optimizer.bucket_size=1", *saves)


Alone = tuple[list[dict[str, Any]], dict[str, torch.Tensor]]
"""The metrics of a run, and all that its checkpoint holds."""


def alone_in(precision: str, run_file: Path, folder: Path) -> Alone:
    curve = run_alone(Case(run_file, folder, None, overrides(precision, folder / "ck")))
    return curve, saved_tensors(folder / "ck")


@pytest.fixture(scope="module")
def exact(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """One process in fp64."""
    return alone_in("fp64", run_file, tmp_path_factory.mktemp("exact"))


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_every_plan_computes_what_one_process_computes(
    run_file: Path, tmp_path: Path, exact: Alone, precision: str
) -> None:
    curve, weights = exact if precision == "fp64" else alone_in(precision, run_file, tmp_path / "alone")
    run = run_config(run_file, *overrides(precision))
    # fp64 shows that the computation is the same; fp32 that it also is in the precision used in practice.
    names = PLANS if precision == "fp64" else FP32_TOO
    plans = {name: parse_plan(run, **PLANS[name]) for name in names}
    for name, plan in plans.items():
        assert not list(validate_plan(plan)), name
    cases = {
        name: Case(run_file, tmp_path / name, plan, overrides(precision, tmp_path / f"{name} ck"))
        for name, plan in plans.items()
    }
    run_cases(list(cases.values()))
    for name, case in cases.items():
        ours = read_metrics(case.folder)
        for key in ("loss", "grad_norm"):
            assert difference(ours, curve, key) < TOLERANCE[precision] * (10 if key == "grad_norm" else 1), (
                name
            )
        validated = curve[-1]["validation_loss"]
        assert ours[-1]["validation_loss"] == pytest.approx(validated, rel=TOLERANCE[precision]), name
        saved = saved_tensors(tmp_path / f"{name} ck")
        assert saved.keys() == weights.keys(), name
        for key, tensor in weights.items():
            scale = float(tensor.abs().max())
            # AdamW divides by the root of the second moment, which amplifies rounding errors of the gradient.
            worst = float((saved[key] - tensor).abs().max()) / scale
            assert worst < TOLERANCE[precision] * 1e3, (name, key)


CONTROLS = {
    "tensor_all_reduce": "wide, narrow, wide",
    "tensor_broadcast": "wide, narrow, wide",
    "grad_all_reduce": "one, then two replicas",
    "recompute": "recompute of all kinds, zero bubble",
    "sharded_grad_reduce": "sharded state of different widths",
    "sharded_weight_sync": "unequal shares of replicas",
    "complete_gradients": "two zero-bubble pipelines in Vs",
    "token_reduce_scatter": "tokens divided",
}


def test_without_a_synchronisation_the_result_differs(run_file: Path, tmp_path: Path, exact: Alone) -> None:
    run = run_config(run_file, *overrides("fp64"))
    cases = {
        without: Case(
            run_file, tmp_path / without, parse_plan(run, **PLANS[name]), overrides("fp64"), without=without
        )
        for without, name in CONTROLS.items()
    }
    # The embedding and the head, which are one matrix.
    tied = parse_plan(run, **PLANS["empty first and last stages"])
    cases["tied"] = replace(cases["grad_all_reduce"], folder=tmp_path / "tied", plan=tied, port=free_port())
    hosted, host = parse_plan(run, "1x8: 3@0 | 3@1", optimizer_offload=[1.0, 0]), "host_weight_sync"
    cases[host] = Case(run_file, tmp_path / host, hosted, overrides("fp64"), without=host)
    divided = parse_plan(run, **PLANS["tokens divided, zero bubble"])
    keys = overrides("fp64", tmp_path / "ck")
    norms = Case(run_file, tmp_path / "norms", divided, keys, without="head_norm_reduce")
    run_cases([*cases.values(), norms])
    for name, case in cases.items():
        ours = read_metrics(case.folder)
        assert max(difference(ours, exact[0], key) for key in ("loss", "grad_norm")) > 1e-4, name
    # Of norms that meet a part of the tokens the weights show it, as those of all plans are compared: of the
    # loss and the norm of all gradients they are too small a part.
    wanted, found = exact[1], saved_tensors(tmp_path / "ck")
    names = [key for key in wanted if key.startswith("weights.layers.") and key.endswith("norm.weight")]
    assert len(names) == 18
    for key in [*names, "weights.layers.0.filter.conv2.bias"]:
        assert float((found[key] - wanted[key]).abs().max()) > 1e-5, key


OFFLOADED = {
    "replicated": ("1x4: 2@0,1 | 4@2 / 1x4: 6@3", {}),
    "sharded": ("1x4: 2@0,1 | 4@2 / 1x4: 6@3", {"optimizer_sharding": True, "optimizer_share": [1, 3, 2]}),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_on_the_host_changes_no_bit(run_file: Path, tmp_path: Path, precision: str) -> None:
    run = run_config(run_file, *overrides(precision))
    cases: dict[tuple[str, float], Case] = {}
    # Under fp32 no weights beside the masters: the shares of the host alone.
    plans = OFFLOADED if precision == "bf16" else {"sharded": OFFLOADED["sharded"]}
    for name, (text, keys) in plans.items():
        for x in (0.0, 0.3, 1.0) if name == "sharded" and precision == "bf16" else (0.0, 0.3):
            plan = parse_plan(run, text, optimizer_offload=[x] * text.count("@"), **keys)
            folder = tmp_path / f"{name} {x}"
            cases[name, x] = Case(run_file, folder, plan, overrides(precision, folder / "ck"))
    run_cases(list(cases.values()))
    for (name, x), case in cases.items():
        plain = cases[name, 0.0].folder
        for ours, theirs in zip(read_metrics(case.folder), read_metrics(plain), strict=True):
            assert (ours["loss"], ours["grad_norm"]) == (theirs["loss"], theirs["grad_norm"]), (name, x)
        assert same_saved(plain / "ck", case.folder / "ck"), (name, x)


def test_messages_via_host_change_no_bit(run_file: Path, tmp_path: Path) -> None:
    run = run_config(run_file, *overrides("fp32"))
    plan = parse_plan(run, "1x4: 1@0,1 | 3@2 | 2@3,4 / 1x4: 6@5")
    red = DeviceType(memory=2**30, fp32=1e12, memory_bandwidth=1e12)
    kinds = {"red": red, "blue": replace(red, backend="rccl")}
    ranks = tuple(replace(r, type="blue" if r.rank in (2, 5) else "red") for r in plan.ranks)
    mixed = replace(plan, ranks=ranks, device_types=kinds)
    assert not list(validate_plan(mixed)) and all(Grid(mixed).via_host.values())
    assert not any(Grid(plan).via_host.values())
    cases = {
        "direct": Case(run_file, tmp_path / "direct", plan, overrides("fp32")),
        "via host": Case(run_file, tmp_path / "via host", mixed, overrides("fp32")),
        "empty": Case(run_file, tmp_path / "empty", mixed, overrides("fp32"), without="host_copy"),
    }
    run_cases(list(cases.values()))
    direct, via_host, empty = (read_metrics(case.folder) for case in cases.values())
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in via_host] == [line[key] for line in direct]
    assert difference(empty, direct, "loss") > 1e-4


def test_a_checkpoint_of_one_plan_loads_under_others(run_file: Path, tmp_path: Path) -> None:
    # Saved with uneven stages, the first two ranks wide, and sharded state; loaded under other plans.
    steps = ("train.precision=fp64", "optimizer.decay_steps=20", "validation.every=0")
    run = run_config(run_file, *steps)
    shares = {"optimizer_share": [1, 2, 3, 1, 1, 4], "optimizer_offload": [0, 0, 0.7, 0, 1, 0.2]}
    text = "1x4: 1@0,1 | 2@2 | 2@3 | 1@4 / 1x4: 3@5 | 3@6"
    first = parse_plan(run, text, optimizer_sharding=True, **shares)
    saved = (*steps, "train.steps=2", f"checkpoint.directory={tmp_path / 'ck'}")
    run_cases([Case(run_file, tmp_path / "first", first, saved)])
    curve = run_alone(Case(run_file, tmp_path / "alone", None, (*steps, "train.steps=4")))
    shares = {"optimizer_share": [1, 1, 9], "optimizer_offload": [0, 0.5, 0.25]}
    others = {
        "two stages": parse_plan(run, "1x8: 2@0 | 4@1"),
        "another width": parse_plan(run, "1x8: 2@0 | 4@1,2", optimizer_sharding=True),
        "other shares": parse_plan(run, "1x4: 4@0,1 | 2@2 / 1x4: 6@3", optimizer_sharding=True, **shares),
        "a V": parse_plan(run, "1x8: 1@0 | 2@1 | 2@1 | 1@0", schedule="zero_bubble"),
    }
    resumed = (*steps, f"checkpoint.resume={tmp_path / 'ck'}")

    def still(name: str) -> Case:
        """Loaded and saved again without a step, no bit may change."""
        again = ("train.steps=2", f"checkpoint.directory={tmp_path / f'{name} still ck'}")
        return Case(run_file, tmp_path / f"{name} still", others[name], (*resumed, *again))

    continued = [
        Case(run_file, tmp_path / name, others[name], (*resumed, "train.steps=4"))
        for name in ("other shares", "a V")
    ]
    run_cases([*map(still, others), *continued])
    for case in continued:
        lines = read_metrics(case.folder)
        assert [line["step"] for line in lines] == [3, 4], case.folder.name
        assert difference(lines, curve[2:]) < 1e-12, case.folder.name
    for name in others:
        assert same_saved(tmp_path / f"{name} still ck", tmp_path / "ck"), name


@st.composite
def valid_plans(draw: st.DrawFn, run: RunConfig, max_ranks: int = 5) -> dict:
    """A random valid plan over at most `max_ranks` ranks, as the arguments of `parse_plan`."""
    budget = max_ranks
    texts: list[str] = []
    shares = draw(st.sampled_from([[(1, 8)], [(2, 4)], [(1, 5), (1, 3)], [(1, 4), (2, 2)], [(4, 1), (1, 4)]]))
    rank = 0
    for p, (size, number) in enumerate(shares):
        left = budget - (len(shares) - 1 - p)
        stages: list[str] = []
        num_stages = draw(st.integers(1, min(3, left)))
        cuts = sorted(draw(st.lists(st.integers(0, 6), min_size=num_stages - 1, max_size=num_stages - 1)))
        bounds = [0, *cuts, 6]
        for s in range(num_stages):
            room = left - (num_stages - 1 - s)
            width = draw(st.sampled_from([w for w in (1, 2) if w <= room]))
            most = min(room // width, number, 2)
            count = draw(st.integers(1, most))
            ranks = [list(range(rank + r * width, rank + (r + 1) * width)) for r in range(count)]
            stages.append(f"{bounds[s + 1] - bounds[s]}@" + ";".join(",".join(map(str, r)) for r in ranks))
            rank += width * count
            left -= width * count
        budget = left + (len(shares) - 1 - p)
        texts.append(f"{size}x{number}: " + " | ".join(stages))
    text, sharded = " / ".join(texts), draw(st.booleans())
    num_stages = text.count("@")
    shares = st.lists(st.sampled_from([1, 0.1, 3]), min_size=num_stages, max_size=num_stages)
    return {
        "text": text,
        "schedule": draw(st.sampled_from(["1f1b", "gpipe", "zero_bubble"])),
        "optimizer_sharding": sharded,
        "sequence_parallel": "," in text and draw(st.booleans()),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "optimizer_share": draw(shares) if sharded else [1] * num_stages,
    }


def test_random_valid_plans(run_file: Path, tmp_path: Path, exact: Alone) -> None:
    run = run_config(run_file, *overrides("fp64"))
    found: list[dict] = []

    @settings(derandomize=True, deadline=None, max_examples=6)
    @given(valid_plans(run))
    def collect(plan: dict) -> None:
        found.append(plan)

    collect()
    cases = [
        Case(run_file, tmp_path / str(i), parse_plan(run, **plan), overrides("fp64"))
        for i, plan in enumerate(found)
    ]
    for case, plan in zip(cases, found, strict=True):
        assert case.plan is not None and not list(validate_plan(case.plan)), plan
    run_cases(cases)
    for case, plan in zip(cases, found, strict=True):
        for key in ("loss", "grad_norm"):
            assert difference(read_metrics(case.folder), exact[0], key) < 1e-11, plan
