"""Wrong inputs as people make them: where, what came, what was wanted, what to do; exit code 2."""

from pathlib import Path

import pytest

from tests.support.cases import table
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
SLIPS = table(r"""
there => written | message
RTX-4090 => H100 |
    cluster.yaml:4: nodes[0].device: unknown card 'H100' ... H100-80G, H100-PCIe or H100-NVL? known
RTX-4090 => V100 | cluster.yaml:4: nodes[0].device ... did you mean V100-16G or V100-32G?
RTX-4090 => RTX-5091 | unknown card 'RTX-5091'; did you mean RTX-5090? ... device_types
RTX-4090 => A6001 | unknown card 'A6001' ... known are ... device_types
10 Gb/s => 10 GbE | cluster.yaml:7: nodes[0].network.bandwidth ... such as 25 GB/s ... 'GbE'
bandwidth: 12 => bandwith: 12 |
    cluster.yaml:6 ... 'bandwith'; did you mean 'bandwidth'? (has: bandwidth, latency, stream)
devices: 2 => devices: 0 | cluster.yaml:5: nodes[0].devices: wanted greater than 0, got 0
devices: 2 => devices: two | cluster.yaml:5 ... wanted an integer, got "two"
devices: 2 => gpus: 2 | cluster.yaml:5 ... unknown key 'gpus'; did you mean 'devices'?
latency: 15 us => latency: 15 | cluster.yaml:6 ... a number with a unit, such as 10 us ... got 15
devices: 2\n    link: {bandwidth: 12 GB/s, latency: 15 us}\n => devices: 2\n |
    nodes[0]: 2 cards ... need 'link' between
name: b => name: a | cluster.yaml:8: nodes[1].name ... already a node called 'a'; use another
nodes: => node: | cluster.yaml:2: node: unknown key 'node'; did you mean 'nodes'?
name: mine\n => name: mine\n\tx: 1\n | cluster.yaml:2: not YAML: found a tab
name: mine\n => name: mine\nhost: a\n | cluster.yaml:2: host: unknown key 'host' ... has: name
learning_rate: 3e-4 => lr: 3e-4 | run.yaml:7 ... 'lr'; did you mean 'learning_rate'?
global_batch_size: 16 => batch_size: 16 | run.yaml:6 ... did you mean 'global_batch_size'?
sequence_length: 2048 => seq_len: 2048 | run.yaml:4 ... did you mean 'sequence_length'?
schedule: cosine => schedule: cosin | run.yaml:7 ... wanted 'cosine', 'linear' ... got "cosin"
precision: bf16 => precision: fp8 | run.yaml:6 ... 'bf16', 'fp16', 'fp32' or 'fp64' ... got "fp8"
steps: 100 => steps: -1 | run.yaml:6: train.steps: wanted greater than 0, got -1
sequence_length: 2048 => sequence_length: 2k | run.yaml:4 ... wanted an integer, got "2k"
qwen2.5-0.5b => qwen2.5-0.6b | run.yaml:1: model ... did you mean qwen2.5-0.5b? ... wanted a model file
model: qwen2.5-0.5b\ndata => data | model: missing; name a model (or start.checkpoint
qwen2.5-0.5b => Qwen/Qwen2.5-0.5B | run.yaml:1 ... no such folder ... yuan-train import-hf Qwen/Qwen2.5
qwen2.5-0.5b => cluster.yaml | run.yaml:1: model ... a cluster file; wanted a model file
weight: 1.0 => weight: -1 | run.yaml:3: data.train[0].weight: wanted greater than 0, got -1
every: 10 => to: [tensorbord] | run.yaml:8: log.to[0]: wanted 'tensorboard' ... got "tensorbord"
model: qwen2.5-0.5b => model: [qwen | run.yaml:2: not YAML: did not find expected ',' or ']'
model: qwen2.5-0.5b => start: {checkpoint: runs/no} | run.yaml:1: start.checkpoint ... name a checkpoint
""")
"""What must be in a message, in parts that ` ... ` divides."""
MORE_WORDS = table(r"""
more | message
train.stepps=5 | command line 'train.stepps=5' ... did you mean 'steps'?
train.steps | command line 'train.steps': wanted key.path=value
search.schedule=[2f2b] | search.schedule[0]: wanted '1f1b', 'gpipe' ... got "2f2b"
--profile run.yaml | run.yaml: a run file; wanted a profile (yuan-train profile writes one)
train.trace=true | command line 'train.trace=true' ... wanted keys and values (first_step, steps, ... got true
train.steps=ten | command line 'train.steps=ten' ... wanted an integer, got "ten"
--report plan.pdf | --report: plan.pdf ... wanted a name that ends in .html
data.split=[0.5,0.6] | data.split: wanted two shares above 0 that sum to 1
search.time_limit=soon | search.time_limit: wanted a number with a unit ... got 'soon'
""")
WORDS = table(r"""
words | message
plan --cluser cluster.yaml | unknown argument '--cluser'; did you mean --cluster?
plan --cluster nowhere.yaml --config run.yaml | nowhere.yaml: no such file ... discover or init cluster
plan --cluster laptob --config run.yaml |
    laptob: no such file; did you mean laptop? ... wanted a cluster file (yuan-train discover or init cluster
    writes one)
plan --cluster cluster.yaml | give --model F, or --config F
plan --cluster run.yaml --config run.yaml |
    run.yaml: a run file; wanted a cluster file (yuan-train discover or init cluster writes one)
plan --cluster cluster.yaml --config cluster.yaml |
    cluster.yaml: a cluster file; wanted a run file (yuan-train init pretrain writes one)
launch --config run.yaml --plan run.yaml | run.yaml: a run file; wanted a plan (yuan-train plan writes one)
simulate --plan cluster.yaml | cluster.yaml: a cluster file; wanted a plan (yuan-train plan writes one)
show runs/no | runs/no: no such directory; wanted the log directory of a run (log.directory)
import-hf nowhere --out runs/x | nowhere: no such directory; give a folder with config.json
import-hf nowhere --out / | nowhere: no such directory
generate --checkpoint runs/no --prompt x | runs/no: no such directory; give a checkpoint
preprocess --input no.jsonl --tokenizer t --out x | no.jsonl: cannot read ... check --input
tokenizer --input chats.jsonl --vocab-size 300 --out x |
    chats.jsonl:1: no key 'text'; the line has 'messages' ... --messages-key messages
import-hf model/config.json --out x | model/config.json: is a file; give the folder ... : model
import-hf saved --out x | saved: is a checkpoint already, and needs no import
generate --checkpoint model --prompt x |
    model: there is no checkpoint here ... yuan-train import-hf model --out runs/model
show run.yaml | run.yaml: is a file; wanted the log directory of a run (log.directory)
plan --cluster model --config run.yaml | model: cannot be read: it is a folder; wanted a file
inspect weights.gguf | weights.gguf: cannot be read: it is no text (byte 1 is not UTF-8)
trace saved --out t.json --step 3 | --step is the step to draw ... --draw F.svg
plan --cluster cluster.yaml --model qwen3-0.5b | qwen3-0.5b ... did you mean qwen3-0.6b?
discover --hosts , --out x | --hosts ... wanted names of machines, such as a,b,c
plan --cluster cluster.yaml --config run.yaml --out model | --out: model: is a folder; wanted a file
plan --cluster cluster.yaml --config run.yaml --report run.yaml/x.html |
    --report: run.yaml/x.html: ... run.yaml is a file; wanted another place
profile --config run.yaml --out . | --out: .: is a folder; wanted a file to write
simulate --plan run.yaml --trace /dev/null | --trace: /dev/null: is no file; wanted a file to write
evaluate --checkpoint saved --token-ids 1 --logits run.yaml/x | run.yaml is a file; wanted another place
tokenizer --input chats.jsonl --vocab-size 300 --out run.yaml/x | run.yaml is a file; wanted another place
init sft --out - | --out: '-': wanted a name, such as ./-
init sft --out run.yaml | run.yaml: is there already; wanted another name (--out F)
init sfd | invalid choice: 'sfd' ... choose from ... pretrain
keys runn | runn: no key ... did you mean
""")


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


@SLIPS
def test_slips_in_files(there: str, written: str, message: str, refuse: Refuse) -> None:
    (name,) = (name for name, text in FILES.items() if there in text)
    Path(name).write_text(FILES[name].replace(there, written, 1))
    check(message, refuse(*PLAN.split()))


@MORE_WORDS
def test_slips_behind_plan(more: str, message: str, refuse: Refuse) -> None:
    check(message, refuse(*PLAN.split(), *more.split()))


@WORDS
def test_slips_on_the_command_line(words: str, message: str, refuse: Refuse) -> None:
    check(message, refuse(*words.split()))


def check(message: str, said: str) -> None:
    assert [part for part in message.split(" ... ") if part not in said] == [], said


def test_there_are_forty() -> None:
    assert sum(len(cases.args[1]) for cases in (SLIPS, MORE_WORDS, WORDS)) >= 40
