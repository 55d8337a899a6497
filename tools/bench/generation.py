"""Benchmark of generation: an engine of ours beside transformers' `generate`, on one core."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tools.bench.engine import make_parts
from tools.bench.harness import Row, case
from tools.bench.runs import make_run
from yuan_train.checkpoint.hf import export_hf, weights_state
from yuan_train.checkpoint.load import find_checkpoint
from yuan_train.checkpoint.save import save_checkpoint
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import single_card_plan
from yuan_train.config.run import RunConfig
from yuan_train.parallel.apply import RankRuntime, parallelize
from yuan_train.parallel.device import CPU
from yuan_train.parallel.executor import Stopwatch
from yuan_train.parallel.zero import EngineOptions
from yuan_train.rl.experience import Ticket
from yuan_train.rl.generator import Drawing, Engine

SLOTS, PROMPT, TURNS = 16, 32, 25
SIZES: dict[str, dict[str, int]] = {
    "0.6 M": {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "vocab_size": 1024},
    "19 M": {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 768, "vocab_size": 32000},
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
    run = make_run(ModelConfig(name="bench", **size, **heads, **keys))
    options = EngineOptions(torch.float32, trained=False)
    runtime = parallelize(single_card_plan(run), 0, make_parts(run.model), device=CPU, options=options)
    prompts = torch.randint(
        1, size["vocab_size"], (SLOTS, PROMPT), generator=torch.Generator().manual_seed(0)
    )
    ours = _ours(runtime, prompts, new_tokens, greedy=draws == "greedy")
    theirs = _theirs(runtime, run, prompts, new_tokens, greedy=draws == "greedy")
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
    engine = Engine(
        runtime,
        slots=SLOTS,
        group=1,
        max_prompt_tokens=PROMPT,
        max_new_tokens=new_tokens,
        prefill_chunk=512,
        device=CPU.torch,
        dtype=torch.float32,
        stopwatch=Stopwatch(CPU),
        ranks=None,
    )
    tickets = [Ticket(number, tuple(ids), 1) for number, ids in enumerate(prompts.tolist())]
    drawing = Drawing(seed=0, max_new_tokens=new_tokens, stop_ids=frozenset(), greedy=greedy)
    return lambda: [list(sample.ids) for sample in engine.generate(tickets, drawing)]


def _theirs(
    runtime: RankRuntime, run: RunConfig, prompts: torch.Tensor, new_tokens: int, *, greedy: bool
) -> Callable[[], list[list[int]]]:
    from transformers import LlamaForCausalLM

    tensors = {f"weights.{name}": weight.detach() for name, weight in runtime.parts[0].named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        made, published = Path(folder) / "made", Path(folder) / "hf"
        save_checkpoint(made, step=1, tensors=tensors, state=weights_state(run.model) | {"step": 1})
        export_hf(find_checkpoint(made), published, dtype="float32")
        model: Any = LlamaForCausalLM.from_pretrained(published).eval()
    keys = {
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if not greedy:
        keys |= {"top_k": 0}

    @torch.no_grad()
    def write() -> list[list[int]]:
        ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=not greedy, **keys)
        return ids[:, PROMPT:].tolist()

    return write
