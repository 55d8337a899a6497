"""Every constraint on a plan, with its message."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parallel.test_grid import run_of
from tests.support.cases import table
from tests.support.models import tiny_model
from tests.support.project import parse_plan, stage_text
from yuan_train.config.errors import PlanError
from yuan_train.config.load import build, dump, parse_document
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import keep_plan, load_plan, plans_in, validate_plan

# The documented form; stage 0 is at line 28, stage 1 at line 29.
PLAN = """\
version: 1
cluster: mixed
model:
  name: toy
  num_layers: 24
  hidden_size: 64
  num_attention_heads: 4
  ffn_hidden_size: 256
  vocab_size: 1024
  max_sequence_length: 4096
  attention: localized_filter
sequence_length: 4096
global_batch_size: 40
schedule: 1f1b
optimizer_sharding: true
ranks:
  - {rank: 0, device: a100-0/0, type: A100-80G}
  - {rank: 1, device: a100-0/1, type: A100-80G}
  - {rank: 2, device: t4-0/0, type: T4}
  - {rank: 3, device: t4-0/1, type: T4}



pipelines:
  - micro_batch_size: 1
    num_micro_batches: 40
    stages:
      - {replicas: [[0, 1]], layers: [0, 16], embedding: true, recompute: none, optimizer_offload: 0.0}
      - {replicas: [[2], [3]], layers: [16, 24], head: true, recompute: full, optimizer_offload: 0.0}
forecast:
  step_seconds: 1.5
  tokens_per_second: 1e5
  bubble_fraction: 0.1
  lower_bound_seconds: 1.2
  source: estimated
  stages:
    - {pipeline: 0, stage: 0, forward_seconds: 0.1, backward_seconds: 0.2, peak_memory_bytes: 7,
       memory: {parameters: 1, gradients: 1, optimizer: 1, activations: 1, logits: 1, buffers: 1,
                reserved: 1}}
"""


def load(folder: Path, text: str = PLAN) -> Plan:
    path = folder / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    return load_plan(path)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(PlanError) as error:
        load(folder, text)
    return str(error.value).replace(f"{folder}/", "")


def test_the_example(tmp_path: Path) -> None:
    plan = load(tmp_path)
    assert plan.world_size == 4
    first, last = plan.pipelines[0].stages
    assert (first.num_layers, first.ranks, last.replicas) == (16, (0, 1), ((2,), (3,)))
    assert plan.forecast and plan.forecast.stages[0].memory.total == 7
    card = plan.device_type(2)
    assert card and card.bf16 is None


def test_a_log_directory_keeps_every_plan(tmp_path: Path) -> None:
    """The user's own, though written by hand or torn, and one for each plan that steps ran with."""
    plan = load(tmp_path)
    torn = tmp_path / "torn" / "plan.yaml"
    torn.parent.mkdir()
    torn.write_text("version: 1\n")
    assert keep_plan(torn.parent, plan, step=0).name == "plan.step-0.yaml"
    others = [replace(plan, cluster=f"other {i}") for i in range(3)]
    assert keep_plan(tmp_path, plan, step=3).read_text() == PLAN
    names = [keep_plan(tmp_path, other, step=10).name for other in others[:2]]
    assert names == ["plan.step-10.yaml", "plan.step-10.2.yaml"]
    assert [keep_plan(tmp_path, other, step=20).name for other in others] == [*names, "plan.step-20.yaml"]
    assert [path.name for path in plans_in(tmp_path)] == ["plan.yaml", *names, "plan.step-20.yaml"]
    assert [load_plan(path) for path in plans_in(tmp_path)] == [plan, *others]
    new = keep_plan(tmp_path / "new", plan, step=5)
    assert new.name == "plan.yaml" and load_plan(new) == plan


@table(r"""
before => after | message
[16, 24] => [17, 24] |
    plan.yaml:29: pipelines[0].stages[1].layers: layer 16 dropped: no stage holds it; this stage must begin at
    layer 16
[16, 24] => [20, 24] | layers 16 to 19 dropped
[16, 24] => [15, 24] |
    plan.yaml:29: pipelines[0].stages[1].layers: layer 15 is held twice; this stage must begin at layer 16
[16, 24] => [16, 23] |
    stages[1].layers: the stages hold layers up to 23, but the model has 24; the last stage must end at 24
[0, 16] => [1, 16] | plan.yaml:28: pipelines[0].stages[0].layers: layer 0 dropped
[16, 24] => [24, 16] | [24, 16] ends before it begins; layers are [first, end)
[16, 24] => [16] | stages[1].layers[1]: missing
[16, 24] => [16, 20, 24] | plan.yaml:29: pipelines[0].stages[1].layers:
[16, 24] => [-1, 24] | stages[1].layers[0]: wanted greater than or equal to 0, got -1
embedding: true, recompute => recompute |
    plan.yaml:28: pipelines[0].stages[0].embedding: the first stage must hold the embedding;
    set embedding: true
head: true, recompute => recompute |
    plan.yaml:29: pipelines[0].stages[1].head: the last stage must hold the head; set head: true
head: true => head: true, embedding: true |
    stages[1].embedding: only the first stage may hold it; set embedding: false
embedding: true => embedding: true, head: true |
    stages[0].head: only the last stage may hold it; set head: false
rank: 1, => rank: 0, | plan.yaml:18: ranks[1].rank: wanted 1, got 0; list each rank once, in order, from 0
a100-0/1 => a100-0/0 | plan.yaml:16: ranks: card 'a100-0/0' is named 2 times; one rank per card
[[0, 1]] => [[0, 0]] | plan.yaml:28: pipelines[0].stages[0].replicas: rank 0 is named twice in this stage
[[2], [3]] => [[2], [1]] |
    stages[1].replicas: rank 1 is named twice: stage 0 has it already, and schedule 1f1b gives a rank one
    stage
[[2], [3]] => [[2], [4]] | stages[1].replicas: there is no rank 4; ranks has 4, from 0
[[2], [3]] => [[2]] | plan.yaml:20: ranks[3]: rank 3 works in no stage; leave it out or give it one
[[2], [3]] => [[2], []] | stages[1].replicas[1]: wanted at least one, got none
[[2], [3]] => [] | stages[1].replicas: wanted at least one, got none
[[0, 1]] => [[0], [1, 3]] | stages[0].replicas: replicas of different widths [1, 2]; make them equal
num_attention_heads: 4 => num_attention_heads: 9\n  head_dim: 8 |
    plan.yaml:29: pipelines[0].stages[0].replicas[0]: 2 ranks cannot share 9 heads; use 1 ranks
ffn_hidden_size: 256 => ffn_hidden_size: 255 | 2 ranks cannot share 255 feed-forward columns
vocab_size: 1024 => vocab_size: 1023 | 2 ranks cannot share 1023 vocabulary rows
hidden_size: 64 => hidden_size: 66\n  head_dim: 16 | 2 ranks cannot share 33 filter channels
global_batch_size: 40 => global_batch_size: 64 |
    plan.yaml:13: global_batch_size: 64, but the pipelines take 40 sequences
sequence_length: 4096\nglobal => sequence_length: 5000\nglobal |
    plan.yaml:12: sequence_length: 5000 tokens, but the model allows 4096
num_micro_batches: 40 => num_micro_batches: 1 | 2 replicas for 1 micro-batches; some would idle; use fewer
version: 1 => version: 2 | plan.yaml:1: version: wanted 1, got 2; plan again with this release
num_attention_heads: 4 => num_attention_heads: 7 |
    plan.yaml:7: model.num_attention_heads: 7 heads do not divide
optimizer_offload: 0.0 => optimizer_share: 0 | stages[0].optimizer_share: wanted greater than 0
optimizer_offload: 0.0 => optimizer_offload: 1.5 | stages[0].optimizer_offload: wanted less than or equal to 1
recompute: full => recompute: full, in_flight: 4 |
    stages[0].in_flight: stage 0 holds 3 micro-batches and stage 1 holds 4; set in_flight: 4
recompute: full => recompute: full, in_flight: 1 |
    stages[1].in_flight: 1, but each of 2 replicas must hold one
layers: [0, 16] => layers: [0, 15.25] | stages[0].layers[1]: wanted a multiple of 0.5, got 15.25
layers: [0, 16] => layers: [0, 15.5] | stages[1].layers: layers [15.5, 16) dropped
recompute: none => recompute: none, recompute_layers: 2 |
    stages[0].recompute_layers: 2 layers, but recompute is none; set recompute
recompute: full => recompute: full, recompute_layers: 9 |
    stages[1].recompute_layers: 9 layers, but the stage holds 8; leave the key out
recompute: full => recompute: full, recompute_layers: 0 | stages[1].recompute_layers: wanted greater than 0
schedule: 1f1b => schedule: 1f2b |
    plan.yaml:14: schedule: wanted '1f1b', 'gpipe', 'interleaved_1f1b' or 'zero_bubble'
embedding: true => embeding: true |
    stages[0].embeding: unknown key 'embeding'; did you mean 'embedding'? (has: replicas, layers
""")
def test_violated_constraints(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in PLAN
    assert message in refusal(tmp_path, PLAN.replace(before, after, 1))


def test_all_violations_in_one_pass(tmp_path: Path) -> None:
    text = PLAN.replace("[16, 24]", "[17, 23]").replace("head: true, ", "").replace("size: 40", "size: 41")
    reported = refusal(tmp_path, text)
    for part in ("layer 16 dropped", "up to 23", "must hold the head", "41, but the pipelines take 40"):
        assert part in reported
    assert len(reported.splitlines()) == 4


def test_optimizer_shares_need_optimizer_sharding(tmp_path: Path) -> None:
    text = PLAN.replace("optimizer_offload: 0.0", "optimizer_share: 3", 1)
    assert load(tmp_path, text).optimizer_shares == (3, 3, 1, 1)
    reported = refusal(tmp_path, text.replace("optimizer_sharding: true", "optimizer_sharding: false"))
    assert (
        "plan.yaml:28: pipelines[0].stages[0].optimizer_share: 3, but optimizer_sharding is false" in reported
    )


def test_tokens_are_divided_by_tensor_parallel_groups(tmp_path: Path) -> None:
    divided = PLAN.replace("optimizer_sharding: true", "optimizer_sharding: true\nsequence_parallel: true")
    assert load(tmp_path, divided).sequence_parallel and not load(tmp_path, PLAN).sequence_parallel
    short = divided.replace("\nsequence_length: 4096", "\nsequence_length: 1")
    assert "sequences have 1 tokens, fewer than a group of 2 has ranks" in refusal(tmp_path, short)
    alone = divided.replace("[[0, 1]]", "[[0], [1]]")
    assert "sequence_parallel: true, but no stage is a tensor-parallel group" in refusal(tmp_path, alone)


def test_a_tensor_parallel_group_shares_a_backend(tmp_path: Path) -> None:
    mixed = PLAN.replace("a100-0/1, type: A100-80G", "amd-0/0, type: MI300X")
    reported = refusal(tmp_path, mixed)
    assert "stages[0].replicas[0]: A100-80G and MI300X cards have no common backend beside gloo" in reported
    apart = load(tmp_path, PLAN.replace("t4-0/0, type: T4", "amd-0/0, type: MI300X"))
    assert apart.via_host((0, 2)) and apart.via_host((2, 3)) and not apart.via_host((0, 1, 3))
    own = "device_types: {T4: {memory: 15 GiB, fp32: 8 TFLOP/s, memory_bandwidth: 320 GB/s, backend: gloo}}"
    assert load(tmp_path, f"{PLAN}{own}\n").via_host((2, 3)), "a card with no backend of its own"


def test_all_stages_of_a_rank_have_one_share(tmp_path: Path) -> None:
    text = (
        PLAN.replace("[[2], [3]], layers: [16, 24]", "[[0, 1]], layers: [16, 24], optimizer_share: 2")
        .replace("schedule: 1f1b", "schedule: zero_bubble")
        .replace("  - {rank: 2, device: t4-0/0, type: T4}\n  - {rank: 3, device: t4-0/1, type: T4}\n", "")
    )
    reported = refusal(tmp_path, text)
    assert "stages[1].optimizer_share: 2, but rank 0 has 1 in stage 0; give all stages of a rank" in reported
    assert len(reported.splitlines()) == 1


def test_a_width_that_does_not_divide_names_those_that_do(tmp_path: Path) -> None:
    # 12 heads, 36 columns, 24 rows and 6 channels: 1, 2, 3 and 6 divide them all.
    sizes = {
        "num_attention_heads: 4": "num_attention_heads: 12",
        "ffn_hidden_size: 256": "ffn_hidden_size: 36",
    }
    sizes |= {"vocab_size: 1024": "vocab_size: 24", "hidden_size: 64": "hidden_size: 12\n  head_dim: 2"}
    text = PLAN.replace("[[2], [3]]", "[[5]]").replace("[[0, 1]]", "[[0, 1, 2, 3, 4]]")
    for before, after in sizes.items():
        text = text.replace(before, after, 1)
    assert "5 ranks cannot share 12 heads; use 1 or 2 or 3 or 6 ranks" in refusal(tmp_path, text)


def test_a_rank_works_in_one_pipeline(tmp_path: Path) -> None:
    again = PLAN[PLAN.index("  - micro_batch_size") : PLAN.index("forecast:")]
    text = PLAN.replace("forecast:", again + "forecast:").replace("size: 40", "size: 80")
    reported = refusal(tmp_path, text)
    assert (
        "pipelines[1].stages[0].replicas: rank 0 is named twice: it works in pipeline 0 already" in reported
    )


def test_missing_and_torn_files_are_plan_errors(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such file"):
        load_plan(tmp_path / "nowhere.yaml")
    assert "not YAML" in refusal(tmp_path, PLAN[:700])
    assert "missing" in refusal(tmp_path, PLAN[: PLAN.index("pipelines:")])


# --- any valid plan --------------------------------------------------------------------------------------


def model(**changes: Any) -> ModelConfig:
    return tiny_model("yuan", **({"num_layers": 24, "ffn_hidden_size": 256, "vocab_size": 1024} | changes))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Valid plans: pipelines cut at any layers, each stage with replicas of one width."""
    num_layers, texts, rank = draw(st.integers(1, 12)), list[str](), 0
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.lists(st.integers(0, num_layers), max_size=3)))
        stages = list[str]()
        for first, last in itertools.pairwise([0, *cuts, num_layers]):
            width, number = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2))
            kind = draw(st.sampled_from(["none", "full"]))
            stages.append(f"{stage_text(last - first, rank, width, number)} {kind}")
            rank += width * number
        texts.append(f"{draw(st.integers(1, 3))}x{draw(st.integers(2, 6))}: {' | '.join(stages)}")
    text = " / ".join(texts)
    offload = [draw(st.floats(0, 1)) for _ in range(text.count("@"))]
    plan = parse_plan(run_of(num_layers, 1), text, optimizer_offload=offload)
    batch = sum(pipeline.num_sequences for pipeline in plan.pipelines)
    return replace(plan, model=model(num_layers=num_layers), global_batch_size=batch)


@given(plans())
def test_valid_plans_pass_and_are_read_back(plan: Plan) -> None:
    assert not list(validate_plan(plan))
    assert build(parse_document(dump(plan), name="f"), Plan, validate=validate_plan, error=PlanError) == plan


@given(plans(), st.data())
def test_a_moved_layer_boundary_is_always_refused(plan: Plan, data: st.DataObject) -> None:
    p = data.draw(st.integers(0, len(plan.pipelines) - 1))
    stages = plan.pipelines[p].stages
    s = data.draw(st.sampled_from([i for i, stage in enumerate(stages) if stage.num_layers]))
    text = dump(plan)
    value = parse_document(text, name="f").value
    value["pipelines"][p]["stages"][s]["layers"][data.draw(st.integers(0, 1))] += data.draw(
        st.sampled_from([-1, 1])
    )
    with pytest.raises(PlanError, match=r"layers|wanted greater"):
        build(parse_document(dump(value), name="f"), Plan, validate=validate_plan, error=PlanError)


def test_in_flight_is_for_1f1b_only(tmp_path: Path) -> None:
    text = PLAN.replace("recompute: none", "recompute: none, in_flight: 5")
    plan = load(tmp_path, text)
    assert plan.pipelines[0].depths("1f1b") == (5, 2) and plan.pipelines[0].depths("gpipe") is None
    reported = refusal(tmp_path, text.replace("schedule: 1f1b", "schedule: gpipe"))
    assert "stages[0].in_flight: 5, but schedule gpipe sets it; leave it out" in reported
