"""Wrong inputs as people make them: where, what came, what was wanted, what to do; exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import Refuse

FILES = {
    "cluster.yaml": """name: mine
nodes:
  - name: a
    device: RTX-4090
    devices: 2
    link: {bandwidth: 12 GB/s, latency: 15 us}
    network: {bandwidth: 10 Gb/s, latency: 50 us}
  - name: b
    device: RTX-3090
    devices: 2
    link: {bandwidth: 12 GB/s, latency: 15 us}
    network: {bandwidth: 10 Gb/s, latency: 50 us}
""",
    "run.yaml": """model: qwen2.5-0.5b
data:
  train: [{prefix: data/corpus, weight: 1.0}]
  sequence_length: 2048
  reset_position_ids: false
train: {steps: 100, global_batch_size: 16, precision: bf16}
optimizer: {learning_rate: 3e-4, schedule: cosine}
log: {directory: runs/mine, every: 10}
""",
    "chats.jsonl": '{"messages": [{"role": "user", "content": "hi"}]}\n',
}
PLAN = "plan --cluster cluster.yaml --config run.yaml"
RUN_FILE = "wanted a run file (yuan-train init pretrain writes one)"
CLUSTER_FILE = "wanted a cluster file (yuan-train discover or init cluster writes one)"
PLAN_FILE = "wanted a plan (yuan-train plan writes one)"

C, R = "cluster.yaml", "run.yaml"
SLIPS: list[tuple[str, str, str, list[str]]] = [
    # file, what stands there, what a person wrote, and what the message must have
    (
        C,
        "RTX-4090",
        "H100",
        ["cluster.yaml:4: nodes[0].device: unknown card 'H100'", "H100-80G, H100-PCIe or H100-NVL? known"],
    ),
    (C, "RTX-4090", "V100", ["cluster.yaml:4: nodes[0].device", "did you mean V100-16G or V100-32G?"]),
    (C, "RTX-4090", "RTX-5091", ["unknown card 'RTX-5091'; did you mean RTX-5090?", "device_types"]),
    (C, "RTX-4090", "A6001", ["unknown card 'A6001'", "known are ", "device_types"]),
    (C, "10 Gb/s", "10 GbE", ["cluster.yaml:7: nodes[0].network.bandwidth", "such as 25 GB/s", "'GbE'"]),
    (
        C,
        "bandwidth: 12",
        "bandwith: 12",
        ["cluster.yaml:6", "'bandwith'; did you mean 'bandwidth'? (has: bandwidth, latency, stream)"],
    ),
    (C, "devices: 2", "devices: 0", ["cluster.yaml:5: nodes[0].devices: wanted greater than 0, got 0"]),
    (C, "devices: 2", "devices: two", ["cluster.yaml:5", 'wanted an integer, got "two"']),
    (C, "devices: 2", "gpus: 2", ["cluster.yaml:5", "unknown key 'gpus'; did you mean 'devices'?"]),
    (C, "latency: 15 us", "latency: 15", ["cluster.yaml:6", "a number with a unit, such as 10 us", "got 15"]),
    (C, "    link: {bandwidth: 12 GB/s, latency: 15 us}\n", "", ["nodes[0]: 2 cards", "need 'link' between"]),
    (C, "name: b", "name: a", ["cluster.yaml:8: nodes[1].name", "already a node called 'a'; use another"]),
    (C, "nodes:", "node:", ["cluster.yaml:2: node: unknown key 'node'; did you mean 'nodes'?"]),
    (C, "name: mine\n", "name: mine\n\tx: 1\n", ["cluster.yaml:2: not YAML: found a tab"]),
    (C, "name: mine\n", "name: mine\nhost: a\n", ["cluster.yaml:2: host: unknown key 'host'", "has: name"]),
    (R, "learning_rate: 3e-4", "lr: 3e-4", ["run.yaml:7", "'lr'; did you mean 'learning_rate'?"]),
    (R, "global_batch_size: 16", "batch_size: 16", ["run.yaml:6", "did you mean 'global_batch_size'?"]),
    (R, "sequence_length: 2048", "seq_len: 2048", ["run.yaml:4", "did you mean 'sequence_length'?"]),
    (R, "schedule: cosine", "schedule: cosin", ["run.yaml:7", "wanted 'cosine', 'linear'", 'got "cosin"']),
    (R, "precision: bf16", "precision: fp8", ["run.yaml:6", "'bf16', 'fp16', 'fp32' or 'fp64'", 'got "fp8"']),
    (R, "steps: 100", "steps: -1", ["run.yaml:6: train.steps: wanted greater than 0, got -1"]),
    (R, "sequence_length: 2048", "sequence_length: 2k", ["run.yaml:4", 'wanted an integer, got "2k"']),
    (
        R,
        "qwen2.5-0.5b",
        "qwen2.5-0.6b",
        ["run.yaml:1: model", "did you mean qwen2.5-0.5b?", "wanted a model file"],
    ),
    (R, "model: qwen2.5-0.5b\n", "", ["model: missing; name a model (or start.checkpoint"]),
    (
        R,
        "qwen2.5-0.5b",
        "Qwen/Qwen2.5-0.5B",
        ["run.yaml:1", "no such folder", "yuan-train import-hf Qwen/Qwen2.5"],
    ),
    (R, "qwen2.5-0.5b", "cluster.yaml", ["run.yaml:1: model", "a cluster file; wanted a model file"]),
    (R, "weight: 1.0", "weight: -1", ["run.yaml:3: data.train[0].weight: wanted greater than 0, got -1"]),
    (R, "every: 10", "to: [tensorbord]", ["run.yaml:8: log.to[0]: wanted 'tensorboard'", 'got "tensorbord"']),
    (R, "model: qwen2.5-0.5b", "model: [qwen", ["run.yaml:2: not YAML: did not find expected ',' or ']'"]),
    (
        R,
        "model: qwen2.5-0.5b",
        "start: {checkpoint: runs/no}",
        ["run.yaml:1: start.checkpoint", "name a checkpoint"],
    ),
]
WORDS: list[tuple[str, list[str]]] = [
    ("plann", ["there is no command 'plann'; did you mean 'plan'?", "has: plan, simulate"]),
    ("plan --cluser cluster.yaml", ["unknown argument '--cluser'; did you mean --cluster?"]),
    (
        "plan --cluster nowhere.yaml --config run.yaml",
        ["nowhere.yaml: no such file", "discover or init cluster"],
    ),
    ("plan --cluster laptob --config run.yaml", ["laptob: no such file; did you mean laptop?", CLUSTER_FILE]),
    ("plan --cluster cluster.yaml", ["give --model F, or --config F"]),
    ("plan --cluster run.yaml --config run.yaml", ["run.yaml: a run file; " + CLUSTER_FILE]),
    ("plan --cluster cluster.yaml --config cluster.yaml", ["cluster.yaml: a cluster file; " + RUN_FILE]),
    ("launch --config run.yaml --plan run.yaml", ["run.yaml: a run file; " + PLAN_FILE]),
    ("simulate --plan cluster.yaml", ["cluster.yaml: a cluster file; " + PLAN_FILE]),
    (f"{PLAN} train.stepps=5", ["command line 'train.stepps=5'", "did you mean 'steps'?"]),
    (f"{PLAN} train.steps", ["command line 'train.steps': wanted key.path=value"]),
    (f"{PLAN} search.schedule=[2f2b]", ["search.schedule[0]: wanted '1f1b', 'gpipe'", 'got "2f2b"']),
    (
        f"{PLAN} --profile run.yaml",
        ["run.yaml: a run file; wanted a profile (yuan-train profile writes one)"],
    ),
    ("show runs/no", ["runs/no: no such directory; wanted the log directory of a run (log.directory)"]),
    ("import-hf nowhere --out runs/x", ["nowhere: no such directory; give a folder with config.json"]),
    ("generate --checkpoint runs/no --prompt x", ["runs/no: no such directory; give a checkpoint"]),
    ("preprocess --input no.jsonl --tokenizer t --out x", ["no.jsonl: cannot read", "check --input"]),
    (
        f"{PLAN} train.trace=true",
        ["command line 'train.trace=true'", "wanted keys and values (first_step, steps,", "got true"],
    ),
    (
        "tokenizer --input chats.jsonl --vocab-size 300 --out x",
        ["chats.jsonl:1: no key 'text'; the line has 'messages'", "--messages-key messages"],
    ),
    ("import-hf model/config.json --out x", ["model/config.json: is a file; give the folder", ": model"]),
    ("import-hf saved --out x", ["saved: is a checkpoint already, and needs no import"]),
    (
        "generate --checkpoint model --prompt x",
        ["model: there is no checkpoint here", "yuan-train import-hf model --out runs/model"],
    ),
    ("show run.yaml", ["run.yaml: is a file; wanted the log directory of a run (log.directory)"]),
    ("plan --cluster model --config run.yaml", ["model: cannot be read: it is a folder; wanted a file"]),
    ("inspect weights.gguf", ["weights.gguf: cannot be read: it is no text (byte 1 is not UTF-8)"]),
    ("trace saved --out t.json --step 3", ["--step is the step to draw", "--draw F.svg"]),
    (f"{PLAN} train.steps=ten", ["command line 'train.steps=ten'", 'wanted an integer, got "ten"']),
    (f"{PLAN} --report plan.pdf", ["--report: plan.pdf", "wanted a name that ends in .html"]),
    (f"{PLAN} data.split=[0.5,0.6]", ["data.split: wanted two shares above 0 that sum to at most 1"]),
    (f"{PLAN} search.time_limit=soon", ["search.time_limit: wanted a number with a unit", "got 'soon'"]),
    ("plan --cluster cluster.yaml --model qwen3-0.5b", ["qwen3-0.5b", "did you mean qwen3-0.6b?"]),
    ("discover --hosts , --out x", ["--hosts", "wanted names of machines, such as a,b,c"]),
    ("init sft --out run.yaml", ["run.yaml: is there already; wanted another name (--out F)"]),
    ("init sfd", ["invalid choice: 'sfd'", "choose from", "pretrain"]),
    ("keys runn", ["runn: no key", "did you mean"]),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "llama"}')
    Path("saved/step-00000001").mkdir(parents=True)
    Path("saved/step-00000001/state.json").write_text("{}")
    Path("weights.gguf").write_bytes(b"a\xff\xfe")


@pytest.mark.parametrize(
    ("name", "there", "written", "parts"), SLIPS, ids=[slip[2].strip()[:24] or "left out" for slip in SLIPS]
)
def test_slips_in_files(name: str, there: str, written: str, parts: list[str], refuse: Refuse) -> None:
    assert there in FILES[name]
    Path(name).write_text(FILES[name].replace(there, written, 1))
    message = refuse(*PLAN.split())
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(("words", "parts"), WORDS, ids=[words[:40] for words, _ in WORDS])
def test_slips_on_the_command_line(words: str, parts: list[str], refuse: Refuse) -> None:
    message = refuse(*words.split())
    assert [part for part in parts if part not in message] == [], message


def test_there_are_forty() -> None:
    assert len(SLIPS) + len(WORDS) >= 40
