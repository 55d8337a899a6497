"""Tokens per second of `yuan-train serve` beside transformers' own server, both on one core.

A CPU second is one of the server's process, which other work on the machine does not lengthen as it does the
wall's. transformers' server needs the package accelerate.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import torch

from tests.support.hf_decoders import save_model, write_tokenizer
from tests.support.spawn import free_port
from tools.bench.harness import ROOT, Row, case
from tools.bench.runs import bench_model, make_run
from yuan_train.checkpoint.hf import export_hf
from yuan_train.checkpoint.load import find_checkpoint
from yuan_train.config.plan import single_card_plan
from yuan_train.models.transformer import Transformer, init_weights, initial_rows
from yuan_train.parallel.apply import RankRuntime, parallelize
from yuan_train.parallel.device import CPU
from yuan_train.parallel.executor import Stopwatch
from yuan_train.parallel.zero import EngineOptions
from yuan_train.rl.experience import Ticket
from yuan_train.rl.generator import EngineShape, GenerationEngine, SamplingParams
from yuan_train.train.build import model_parts

ONE_CORE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
CORE = "0"


@dataclass(frozen=True)
class Measured:
    """One run of all streams."""

    wall_seconds: float
    cpu_seconds: float
    first_seconds: float
    """Until the last stream has its first piece."""
    texts: tuple[str, ...]


def make_model(folder: Path, layers: int, hidden: int) -> tuple[Path, Path, int]:
    """A Llama of random weights as a checkpoint and in Hugging Face's layout; and its parameters."""
    widths = {"num_key_value_heads": hidden // 128, "ffn_hidden_size": hidden * 8 // 3 // 64 * 64}
    keys = {"architecture": "llama", "vocab_size": 32_000, "max_sequence_length": 2048}
    model = Transformer(bench_model(layers, hidden, **widths, **keys))
    init_weights(model, seed=1)
    # Only bytes are ever the most probable: answers are as long as they may be, and all of text.
    model.embedding.weight.data[256:] = 0
    checkpoint = save_model(folder / "checkpoint", model, scale=2.0)
    (checkpoint / "step-00000001/tokenizer").mkdir()
    write_tokenizer(checkpoint / "step-00000001/tokenizer")
    published = Path(export_hf(find_checkpoint(checkpoint), folder / "hf", dtype="float32").path)
    write_tokenizer(published)
    settings = published / "tokenizer_config.json"
    plain = json.loads(settings.read_text())
    del plain["auto_map"]
    settings.write_text(json.dumps(plain | {"model_input_names": ["input_ids", "attention_mask"]}))
    return checkpoint, published, sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def server(words: Sequence[str], url: str, folder: Path) -> Any:
    """A server on core 0, once it answers at `url`."""
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            ["taskset", "-c", CORE, sys.executable, *words],
            env=os.environ | ONE_CORE,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    try:
        end = time.monotonic() + 180
        while True:
            try:
                httpx.get(url)
                break
            except httpx.TransportError:
                if time.monotonic() > end or process.poll() is not None:
                    raise SystemExit(f"no server: {(folder / 'said').read_text()[-2000:]}") from None
                time.sleep(0.2)
        yield process.pid
    except AssertionError as error:
        time.sleep(1)
        raise SystemExit(f"{error}\n{(folder / 'said').read_text()[-9000:]}") from None
    finally:
        process.terminate()
        process.wait(30)


def cpu_seconds(pid: int) -> float:
    """Of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def body_of(number: int, model: str, new_tokens: int) -> dict[str, Any]:
    text = f"Tell me something about the number {number:03d}, please."
    asked = {"messages": [{"role": "user", "content": text}], "max_tokens": new_tokens}
    return {"model": model, **asked, "temperature": 0, "stream": True}


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[float, str]:
    """Seconds of the clock at the first piece of text, and the whole text."""
    first, text = 0.0, ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
                first = first or (time.perf_counter() if text else 0.0)
    return first, text


async def _all(url: str, bodies: Sequence[dict[str, Any]]) -> list[tuple[float, str]]:
    async with httpx.AsyncClient(base_url=url, timeout=240) as client:
        return await asyncio.gather(*(_ask(client, body) for body in bodies))


def measure(url: str, pid: int, model: str, streams: int, new_tokens: int) -> Measured:
    """All streams at once, after one that warms up."""
    asyncio.run(_all(url, [body_of(999, model, 4)]))
    start, used = time.perf_counter(), cpu_seconds(pid)
    found = asyncio.run(_all(url, [body_of(n, model, new_tokens) for n in range(streams)]))
    wall = time.perf_counter() - start
    first = max(moment for moment, _ in found) - start
    assert all(text for _, text in found), "there are streams without text"
    return Measured(wall, cpu_seconds(pid) - used, first, tuple(text for _, text in found))


def generate_at_once(published: Path, streams: int, new_tokens: int) -> Measured:
    """transformers' `generate` of all chats as one batch, in a process of its own."""
    script = f"""
import json, sys, time, torch
sys.path.insert(0, {str(ROOT)!r})
from tools.bench.serve import body_of
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained({str(published)!r}, padding_side="left", pad_token="<|start|>")
model = AutoModelForCausalLM.from_pretrained({str(published)!r}, dtype=torch.float32)
chats = [body_of(n, "", 0)["messages"] for n in range({streams})]
batch = tokenizer.apply_chat_template(
    chats, add_generation_prompt=True, return_tensors="pt", padding=True, return_dict=True)
options = dict(do_sample=False, pad_token_id=tokenizer.pad_token_id)
model.generate(**batch, max_new_tokens=2, **options)
start, used = time.perf_counter(), time.process_time()
out = model.generate(**batch, max_new_tokens={new_tokens}, **options)
told = [time.perf_counter() - start, time.process_time() - used]
texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1]:], skip_special_tokens=True)
print(json.dumps([*told, texts]))
"""
    told = subprocess.run(
        ["taskset", "-c", CORE, sys.executable, "-c", script],
        env=os.environ | ONE_CORE,
        capture_output=True,
        text=True,
        check=True,
    )
    wall, used, texts = json.loads(told.stdout.splitlines()[-1])
    return Measured(wall, used, float("nan"), tuple(texts))


@case(
    "serve/transformers",
    formats={"tokens/CPU s": ".1f", "tokens/s": ".1f", "begun after s": ".1f"},
    streams=(16,),
    new_tokens=(64,),
    layers=(8,),
    hidden=(768,),
    turns=(2,),
)
def serve(streams: int, new_tokens: int, layers: int, hidden: int, turns: int) -> Iterator[Row]:
    """The same chats, greedy, in fp32, each server alone on core 0; the fastest of some turns. `generate` is
    transformers' own on a whole batch at once, without a server."""
    found: dict[str, list[Measured]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as name:
        folder = Path(name)
        checkpoint, published, parameters = make_model(folder, layers, hidden)
        for _ in range(turns):
            for name, words, model in servers(checkpoint, published, streams):
                port = free_port()
                with server([*words, "--port", str(port)], f"http://127.0.0.1:{port}/health", folder) as pid:
                    one = measure(f"http://127.0.0.1:{port}", pid, model, streams, new_tokens)
                found.setdefault(name, []).append(one)
            alone = generate_at_once(published, streams, new_tokens)
            found.setdefault("transformers generate, one batch", []).append(alone)
    texts = next(iter(found.values()))[0].texts
    for name, runs in found.items():
        best = min(runs, key=lambda one: one.wall_seconds)
        same = sum(a == b for a, b in zip(texts, best.texts, strict=True))
        row: Row = {"server": name, "parameters M": parameters // 10**6}
        row["tokens/CPU s"] = streams * new_tokens / min(one.cpu_seconds for one in runs)
        row |= {"tokens/s": streams * new_tokens / best.wall_seconds, "begun after s": best.first_seconds}
        yield row | {"texts as the first": f"{same} of {len(texts)}"}


def servers(checkpoint: Path, published: Path, streams: int) -> list[tuple[str, list[str], str]]:
    """Each server's name, command and what it calls the model."""
    own = ["-m", "yuan_train", "serve", "--checkpoint", str(checkpoint), "--slots", str(streams)]
    theirs = [*"-m transformers.commands.transformers_cli serve --device cpu --dtype float32".split()]
    # Its --continuous_batching asks a card for its memory, and ends on a CPU.
    return [
        ("yuan-train serve", [*own, "--device", "cpu"], "bench"),
        ("transformers serve", theirs, str(published)),
    ]


# --- an engine of ours beside transformers' `generate` -------------------------------------------------

SLOTS, PROMPT, TURNS = 16, 32, 25
SIZES: dict[str, dict[str, int]] = {
    "0.6 M": {"layers": 2, "hidden": 128, "ffn_hidden_size": 256, "vocab_size": 1024},
    "19 M": {"layers": 4, "hidden": 256, "ffn_hidden_size": 768, "vocab_size": 32000},
}


@case(
    "generation/transformers",
    formats={"ours, tokens/CPU s": ".0f", "theirs": ".0f", "ours / theirs": ".2f"},
    parameters=tuple(SIZES),
    draws=("greedy", "sampled"),
    new_tokens=(64,),
)
def beside_transformers(parameters: str, draws: str, new_tokens: int) -> Row:
    """The fastest of 25 turns of each, one after the other: tokens per processor second of 16 answers."""
    size = SIZES[parameters]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    keys = {"architecture": "llama", "max_sequence_length": 256, "tie_embeddings": False}
    run = make_run(bench_model(**size, **heads, **keys))
    options = EngineOptions(torch.float32, trained=False)
    parts = model_parts(run.model, torch.float32, initial=partial(initial_rows, run.model, seed=0))
    runtime = parallelize(single_card_plan(run), 0, parts, device=CPU, options=options)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, size["vocab_size"], (SLOTS, PROMPT), generator=generator)
    ours = _ours(runtime, prompts, new_tokens, greedy=draws == "greedy")
    theirs = _theirs(runtime, prompts, new_tokens, greedy=draws == "greedy")
    first, second = ours(), theirs()
    assert draws == "sampled" or first == second, "the most probable tokens differ"
    found = {"ours, tokens/CPU s": 0.0, "theirs": 0.0}
    for _ in range(TURNS):
        for name, write in zip(found, (ours, theirs), strict=True):
            start = time.process_time()
            write()
            found[name] = max(found[name], SLOTS * new_tokens / (time.process_time() - start))
    row: Row = {"parameters": parameters, "draws": draws, **found}
    return row | {"ours / theirs": found["ours, tokens/CPU s"] / found["theirs"]}


def _ours(
    runtime: RankRuntime, prompts: torch.Tensor, new_tokens: int, *, greedy: bool
) -> Callable[[], list[list[int]]]:
    for part in runtime.parts.values():
        part.eval()
    engine = GenerationEngine(
        runtime,
        EngineShape(slots=SLOTS, group=1, max_length=PROMPT + new_tokens),
        device=CPU.torch,
        dtype=torch.float32,
        stopwatch=Stopwatch(CPU),
        ranks=None,
    )
    tickets = [Ticket(number, tuple(ids), 1) for number, ids in enumerate(prompts.tolist())]
    params = SamplingParams(seed=0, max_new_tokens=new_tokens, stop_ids=frozenset(), greedy=greedy)
    return lambda: [list(sample.ids) for sample in engine.generate(tickets, params)]


def _theirs(
    runtime: RankRuntime, prompts: torch.Tensor, new_tokens: int, *, greedy: bool
) -> Callable[[], list[list[int]]]:
    from transformers import LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        made, published = Path(folder) / "made", Path(folder) / "hf"
        save_model(made, cast(Transformer, runtime.parts[0]))
        export_hf(find_checkpoint(made), published, dtype="float32")
        model: Any = LlamaForCausalLM.from_pretrained(published).eval()
    keys = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "eos_token_id": None}
    keys |= {"pad_token_id": 0} if greedy else {"pad_token_id": 0, "top_k": 0}

    @torch.no_grad()
    def write() -> list[list[int]]:
        ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=not greedy, **keys)
        return ids[:, PROMPT:].tolist()

    return write
