"""Constraints on runs; the model by path; every shipped file."""

from pathlib import Path

import pytest

from tests.support.cases import table
from yuan_train.config.cluster import load_cluster
from yuan_train.config.errors import ConfigError
from yuan_train.config.load import build, dump, parse_document
from yuan_train.config.model import load_model
from yuan_train.config.run import HostCopies, RunConfig, load_run, validate_run

MODEL = """\
name: toy
num_layers: 4
hidden_size: 64
num_attention_heads: 4
ffn_hidden_size: 256
vocab_size: 1000
max_sequence_length: 512
"""
# The documented form.
RUN = """\
model: ../model/toy.yaml
data:
  train: [{prefix: data/corpus, weight: 1.0}]
  validation: []
  tokenizer: data/tokenizer
  sequence_length: 512
  reset_position_ids: true
  reset_attention: false
  reset_filter: false
train: {steps: 100, global_batch_size: 16, micro_batch_size: 1, seed: 1234, precision: bf16}
optimizer: {learning_rate: 3e-4, minimum_learning_rate: 3e-5, warmup_steps: 10, decay_steps: 100,
            schedule: cosine, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, clip_grad_norm: 1.0}
validation: {every: 0, batches: 8}
checkpoint: {directory: runs/tiny/checkpoints, every: 50, keep: 3, resume: auto}
log: {directory: runs/tiny, every: 1}
search: {}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("model", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "toy.yaml").write_text(MODEL)
    return tmp_path


def load(folder: Path, text: str = RUN, *overrides: str) -> RunConfig:
    path = folder / "run" / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_run(path, overrides)


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(folder, text, *overrides)
    return str(error.value).replace(f"{folder}/", "")


def test_the_example(folder: Path) -> None:
    run = load(folder)
    assert (run.model.name, run.optimizer.epsilon, run.decay_steps) == ("toy", 1e-8, 100)
    assert run.data.resets
    assert run.search.time_limit == 60.0
    assert load(folder, RUN, "search.tensor=[1,2]").search.tensor == (1, 2)


def test_written_and_read_again(folder: Path) -> None:
    run = load(folder, RUN, "search.time_limit=90 s", "train.timeout=2 min")
    assert build(parse_document(dump(run), name="f"), RunConfig, validate=validate_run) == run


def test_the_model_may_be_inside_the_file(folder: Path) -> None:
    inside = "model:\n" + "".join(f"  {line}\n" for line in MODEL.splitlines())
    assert load(folder, RUN.replace("model: ../model/toy.yaml\n", inside)) == load(folder)


def test_violations_of_the_model_name_its_own_file(folder: Path) -> None:
    (folder / "model" / "toy.yaml").write_text(MODEL.replace("num_layers: 4", "num_layer: 4"))
    reported = refusal(folder, RUN)
    assert (
        "model/toy.yaml:2: model.num_layer: unknown key 'num_layer'; did you mean 'num_layers'?" in reported
    )
    assert "model.num_layers: missing" in reported


def test_overrides_reach_the_model(folder: Path) -> None:
    assert load(folder, RUN, "model.num_layers=2").model.num_layers == 2
    reported = refusal(folder, RUN, "model.num_attention_heads=5", "model.head_dim=0")
    assert "command line 'model.num_attention_heads=5': model.num_attention_heads: 5 heads do not" in reported


def test_a_model_on_the_command_line_is_relative_to_the_working_directory(folder: Path) -> None:
    assert load(folder, RUN, "model=configs/model/tiny.yaml").model.name == "tiny"
    with pytest.raises(
        ConfigError, match=r"command line 'model=nowhere\.yaml': model: nowhere\.yaml: no such file"
    ):
        load(folder, RUN, "model=nowhere.yaml")


@table(r"""
before => after | message
../model/toy.yaml => toy.yaml | run/run.yaml:1: model: run/toy.yaml: no such file
sequence_length: 512 => sequence_length: 513 |
    run.yaml:6: data.sequence_length: 513 tokens, but the model allows 512
micro_batch_size: 1 => micro_batch_size: 3 |
    run.yaml:10: train.global_batch_size: 16 sequences do not divide into
minimum_learning_rate: 3e-5 => minimum_learning_rate: 3e-3 |
    optimizer.minimum_learning_rate: greater than learning_rate
warmup_steps: 10 => warmup_steps: 100 |
    optimizer.warmup_steps: 100 warm-up steps leave none of the 100 decay steps
tokenizer: data/tokenizer\n  sequence => sequence |
    run.yaml:2: data.tokenizer: resets at document ends need the tokenizer's
validation: [] => split: [0.9, 0.05] |
    data.split: wanted two shares above 0 that sum to 1, got [0.9, 0.05]
validation: [] => split: [1.0, 0.0] | data.split: wanted two shares above 0
validation: [] => split: [0.9] | data.split[1]: missing
validation: [] => split: [0.9, 0.1]\n  validation: [{prefix: v}] | data.split: give either split or validation
validation: {every: 0 => validation: {every: 5 |
    validation.every: there is no validation data; give data.validation
train: [{prefix: data/corpus, weight: 1.0}] => train: [] | data.train: wanted at least one, got none
search: {} => search: {tensor: 2} | search.tensor: wanted a list, got 2
global_batch_size: 16 => global_batch_size: 100000000000000000000 |
    run.yaml:10: train.global_batch_size: wanted less than or equal to 131072, got 100000000000000000000
log: {directory: runs/tiny, => log: {project: '', directory: runs/tiny, |
    log.project: wanted at least 1 character, got ""
search: {} => search: {tensor: []} | search.tensor: wanted at least one, got none
{directory: runs/tiny/checkpoints, every: 50, => {in_memory: 10, |
    run.yaml:14: checkpoint.in_memory: 10, but there is no checkpoint.directory, from which a run
""")
def test_messages(folder: Path, before: str, after: str, message: str) -> None:
    assert before in RUN
    assert message in refusal(folder, RUN.replace(before, after, 1))


def test_what_compiled_layers_cannot_do(folder: Path) -> None:
    assert load(folder, RUN, "train.compile=true").feasible_search.tensor == (1,)
    assert load(folder, RUN, "search.tensor=[2]").feasible_search.tensor == (2,)
    load(folder, RUN, "train.compile=true", "search={tensor: [1], schedule: [gpipe]}")
    wrong = "search={tensor: [1, 2], schedule: [1f1b, zero_bubble]}"
    load(folder, RUN, wrong, "data.reset_attention=true")
    reported = refusal(folder, RUN, "train.compile=true", wrong, "data.reset_attention=true")
    for words in (
        "train.compile: true, but data.reset_attention gives each micro-batch other ranges",
        "search.schedule: zero_bubble splits backwards, and the backward of a compiled layer",
        "search.tensor: [1, 2] shares each layer, and the collectives inside cannot be compiled",
    ):
        assert words in reported


def test_state_on_disks_is_not_copied_to_memory(folder: Path) -> None:
    disks = ("search={offload: [optimizer, disk]}", "memory.disk_directory=/tmp")
    load(folder, RUN, *disks)
    reported = refusal(folder, RUN, *disks, "checkpoint.in_memory=10")
    assert "search.offload: disk, but checkpoint.in_memory would copy what is there to host" in reported
    copies = load(folder, RUN, "checkpoint.in_memory=10").host_copies
    assert copies == HostCopies(kept=2, trained_bytes=12, frozen_bytes=2)
    assert copies.keys == "checkpoint.in_memory" and not load(folder).host_copies.keys


def test_no_tokenizer_where_document_ends_do_not_matter(folder: Path) -> None:
    text = RUN.replace("  tokenizer: data/tokenizer\n", "").replace("ids: true", "ids: false")
    assert not load(folder, text).data.resets


def test_a_trial_run_may_end_in_the_warm_up(folder: Path) -> None:
    run = load(folder, RUN.replace("decay_steps: 100,", ""), "optimizer.warmup_steps=1000")
    assert run.train.steps < run.optimizer.warmup_steps < run.decay_steps


# --- what is shipped -------------------------------------------------------------------------------------

LOADERS = {"model": load_model, "run": load_run, "cluster": load_cluster}
SHIPPED = [
    path
    for path in sorted(Path(__file__).parents[2].glob("configs/*/*.yaml"))
    # Files to begin with, which tests/cli/test_init.py fills in and loads.
    if path.parent.name != "init"
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_shipped_file_loads(path: Path) -> None:
    if path.name.startswith("rl-"):
        with pytest.raises(ConfigError, match="`yuan-train rl`"):
            load_run(path)
        return
    config = LOADERS[path.parent.name](path)
    if not isinstance(config, RunConfig):
        assert config.name == path.stem


@pytest.mark.parametrize("name", ["yuan2-2b", "yuan2-51b", "yuan2-102b"])
def test_published_runs_train_on_300_billion_tokens(name: str) -> None:
    run = load_run(f"configs/run/{name}.yaml")
    tokens = run.train.steps * run.train.global_batch_size * run.data.sequence_length
    assert tokens == pytest.approx(300.0e9, rel=1e-4)
    assert (run.optimizer.beta1, run.optimizer.beta2, run.optimizer.weight_decay) == (0.9, 0.95, 0.1)
    assert run.decay_steps == run.train.steps
    assert run.optimizer.minimum_learning_rate == pytest.approx(run.optimizer.learning_rate / 10)


@pytest.mark.parametrize(("name", "billions", "base"), [("m32", 2000.7, 10000), ("m32-sft", 79.6, 40890)])
def test_published_runs_of_m32(name: str, billions: float, base: float) -> None:
    run = load_run(f"configs/run/yuan2-{name}.yaml")
    tokens = run.train.steps * run.train.global_batch_size * run.data.sequence_length
    assert tokens == pytest.approx(billions * 1e9, rel=1e-3)
    assert (run.model.parameters, run.model.rope_base) == (39_942_842_368, base)
