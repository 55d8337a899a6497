"""A step beside TRL's GRPOTrainer on one core: the same Llama, first weights, prompts, lengths and rewards.

    bash tools/check_trl.sh       # once: installs TRL; then, with that environment's Python
    PYTHONPATH=. build/checks/trl-1.16.0-transformers-5.23.0/bin/python tools/bench_trl.py [--seeds 3]

The task of tools/rl_tasks.py `copy`: `a =` is to be answered by a and the end. TRL generates with Hugging
Face's `generate`. Prints processor seconds a step, and the mean reward of the last 20 steps (of 1.20), of
each seed and in the mean. Exits with 1 if ours is slower, or the means are further apart than 0.05.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rl_tasks
import torch
from check_trl import published
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer, models, pre_tokenizers  # pyright: ignore[reportMissingImports]
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from yuan_train.cli.main import main as yuan_train
from yuan_train.config.rl import load_rl
from yuan_train.models.transformer import Transformer, init_weights

CONFIG = "configs/run/rl-tiny.yaml"
CHANGES = (
    "model.architecture=llama",
    "model.attention=",
    "model.norm_epsilon=1e-6",
    "data.max_prompt_tokens=2",
    "train.pack=false",  # TRL pads too, in one pass of all samples
    "train.micro_batch_size=512",
)
WARM_UP, LAST = 5, 20
NEARNESS = 0.05


def main() -> int:
    """Train with both, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if options.steps < WARM_UP + LAST or options.seeds < 1:
        parser.error(f"wanted at least {WARM_UP + LAST} steps and one seed")
    torch.set_num_threads(1)
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "TRL": []}
    with tempfile.TemporaryDirectory() as name:
        for seed in range(options.seeds):
            folder = Path(name) / str(seed)
            folder.mkdir()
            for label, run in (("ours", ours), ("TRL", theirs)):
                seconds, reward = run(folder, seed, options.steps)
                found[label].append((seconds, reward))
                print(f"seed {seed}, {label}: {seconds:.3f} CPU s a step, reward {reward:.3f}", flush=True)
    means = {
        label: [statistics.fmean(values) for values in zip(*runs, strict=True)]
        for label, runs in found.items()
    }
    for label, (seconds, reward) in means.items():
        print(f"mean, {label}: {seconds:.3f} CPU s a step, reward {reward:.3f}")
    (mine, my_reward), (its, its_reward) = means["ours"], means["TRL"]
    return int(mine > its or abs(my_reward - its_reward) > NEARNESS)


def ours(folder: Path, seed: int, steps: int) -> tuple[float, float]:
    """Processor seconds a step, those of the reward functions' processes too, and the reward at the end."""
    _run_ours(folder / "warm", seed, WARM_UP)
    before = _processor_seconds()
    _run_ours(folder / "warm", seed, WARM_UP)
    between = _processor_seconds()
    rewards = _run_ours(folder / "ours", seed, steps)
    seconds = (_processor_seconds() - between - (between - before)) / (steps - WARM_UP)
    return seconds, statistics.fmean(rewards[-LAST:])


def _run_ours(folder: Path, seed: int, steps: int) -> list[float]:
    rl_tasks.make("copy", folder / "copy.jsonl")
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    functions = (
        f"[{{python: '{rl_tasks.__file__}:right'}}, {{python: '{rl_tasks.__file__}:ends', weight: 0.2}}]"
    )
    code = yuan_train(
        [
            *("rl", "--config", CONFIG, *CHANGES, f"data.prompts=[{{file: '{folder / 'copy.jsonl'}'}}]"),
            *(f"reward.functions={functions}", "data.evaluation=", "evaluation.every=0"),
            *(f"train.seed={seed}", f"train.steps={steps}", "train.device=cpu", "checkpoint.directory="),
            *(f"log.directory={folder}", "log.every=1000"),
        ]
    )
    if code:
        raise SystemExit(code)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["reward"] for line in lines]


def _processor_seconds() -> float:
    """Of this process and of those that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


# --- TRL --------------------------------------------------------------------------------------------------


class _Clock(TrainerCallback):
    """Processor seconds at the end of each step, and its reward."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.rewards: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(time.process_time())

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if logs and "reward" in logs:
            self.rewards.append(float(logs["reward"]))


def theirs(folder: Path, seed: int, steps: int) -> tuple[float, float]:
    """The same of TRL's trainer."""
    run = load_rl(CONFIG, CHANGES)
    draw = random.Random(seed)
    answers = [draw.randrange(10) for _ in range(run.train.prompts_per_step * steps)]
    data = Dataset.from_list([{"prompt": f"{a} =", "answer": str(a)} for a in answers])
    clock = _Clock()
    optimizer = run.optimizer
    trainer = GRPOTrainer(
        model=_their_model(seed),
        reward_funcs=[_right, _ends],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=run.samples_per_step,
            num_generations=run.algorithm.group,
            max_completion_length=run.generation.max_new_tokens,
            max_steps=steps,
            learning_rate=optimizer.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_epsilon=optimizer.epsilon,
            max_grad_norm=optimizer.clip_grad_norm,
            reward_weights=[1.0, 0.2],
            loss_type="grpo",
            scale_rewards="group",
            beta=0.0,
            temperature=1.0,
            top_k=0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            seed=seed,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            log_level="error",
        ),
        train_dataset=data,
        processing_class=_tokenizer(),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    seconds = (clock.seconds[-1] - clock.seconds[WARM_UP - 1]) / (steps - WARM_UP)
    return seconds, statistics.fmean(clock.rewards[-LAST:])


def _their_model(seed: int) -> Any:
    """Hugging Face's Llama with the weights that ours begins with."""
    config = load_rl(CONFIG, CHANGES).model
    model = Transformer(config, dtype=torch.float32)
    init_weights(model, seed=seed)
    found = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.key_value_heads,
            intermediate_size=config.ffn_hidden_size,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.norm_epsilon,
            rope_theta=config.rope_base,
            tie_word_embeddings=False,
            max_position_embeddings=config.max_sequence_length,
            eos_token_id=rl_tasks.END,
            pad_token_id=rl_tasks.END,
        )
    )
    found.load_state_dict(published({name: p.detach().clone() for name, p in model.named_parameters()}))
    return found


def _tokenizer() -> Any:
    """The ten digits, `=` and the end, as words."""
    words = {**{str(digit): digit for digit in range(10)}, "=": rl_tasks.EQUALS, "<end>": rl_tasks.END}
    tokenizer: Any = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", padding_side="left"
    )


def _right(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
    return [rl_tasks.right(ids, wanted) for ids, wanted in zip(completion_ids, answer, strict=True)]


def _ends(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [rl_tasks.ends(ids, "stop" if ids[-1] == rl_tasks.END else "limit") for ids in completion_ids]


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
