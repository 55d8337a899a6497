"""A step beside TRL's GRPOTrainer on one core: the same Llama, first weights, prompts, lengths and rewards.

    bash tools/check_trl.sh       # once: installs TRL; then, with that environment's Python
    PYTHONPATH=. build/checks/trl-1.16.0-transformers-5.23.0/bin/python -m tools.bench rl/trl

The task of tools/rl_tasks.py `copy`: `a =` is to be answered by a and the end. TRL generates with Hugging
Face's `generate`. TRL and what it needs are imported where they are called: other cases do without.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tools import rl_tasks
from tools.bench.harness import MISSED, Row, case
from tools.bench.runs import yuan_train
from yuan_train.config.rl import load_rl
from yuan_train.models.transformer import Transformer, init_weights

CHANGES = (
    *("model.architecture=llama", "model.attention=", "model.norm_epsilon=1e-6", "data.max_prompt_tokens=2"),
    "train.pack=false",  # TRL pads too, in one pass of all samples
    *("train.micro_batch_size=512", "log.every=1000"),
)
WARM_UP = 5
NEARNESS = 0.05


@case(
    "rl/trl",
    formats=dict.fromkeys(("ours, s a step", "TRL's", "ours, reward of 1.20", "TRL's reward"), ".3f"),
    costs={"ours, s a step": 0.15},
    seeds=(3,),
    steps=(60,),
)
def beside_trl(seeds: int, steps: int) -> Iterator[Row]:
    """Processor seconds a step, and the reward of the last 20 steps, of each seed and in the mean."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    rows: list[Row] = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as name:
            (mine, reward), (its, its_reward) = (run(Path(name), seed, steps) for run in (ours, theirs))
        row: Row = {"seed": f"{seed}", "ours, s a step": mine, "TRL's": its}
        rows.append(row | {"ours, reward of 1.20": reward, "TRL's reward": its_reward})
    mean = {key: statistics.fmean(row[key] for row in rows) for key in rows[0] if key != "seed"}
    mine, its, reward, its_reward = mean.values()
    yield from rows
    off = abs(reward - its_reward)
    missed = f"{mine / its:.2f} of TRL's seconds, rewards {off:.3f} apart"
    yield {"seed": "mean", **mean, MISSED: missed if mine > its or off > NEARNESS else ""}


def ours(folder: Path, seed: int, steps: int) -> tuple[float, float]:
    """Processor seconds a step, those of the reward functions' processes too, and the reward at the end."""
    words = [*rl_tasks.run_words(folder, "copy", CHANGES), f"train.seed={seed}", f"log.directory={folder}"]

    def seconds(steps: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        yuan_train("rl", *words, f"train.steps={steps}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    start = seconds(WARM_UP)
    return (seconds(steps) - start) / (steps - WARM_UP), statistics.fmean(rl_tasks.rewards(folder)[-20:])


def theirs(folder: Path, seed: int, steps: int) -> tuple[float, float]:
    """The same of TRL's trainer."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    seconds: list[float] = []
    rewards: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds.append(time.process_time())

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            rewards.extend([float(logs["reward"])] if logs and "reward" in logs else [])

    run = load_rl(rl_tasks.CONFIG, CHANGES)
    draw = random.Random(seed)
    answers = [draw.randrange(10) for _ in range(run.train.prompts_per_step * steps)]
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
            **{"loss_type": "grpo", "scale_rewards": "group", "beta": 0.0, "temperature": 1.0, "top_k": 0},
            **{"gradient_checkpointing": False, "bf16": False, "use_cpu": True, "seed": seed},
            **{"logging_steps": 1, "save_strategy": "no", "report_to": []},
            **{"disable_tqdm": True, "log_level": "error"},
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{a} =", "answer": str(a)} for a in answers]),
        processing_class=_tokenizer(),
        callbacks=[Clock()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return (seconds[-1] - seconds[WARM_UP - 1]) / (steps - WARM_UP), statistics.fmean(rewards[-20:])


def _their_model(seed: int) -> Any:
    """Hugging Face's Llama with the weights that ours begins with."""
    from transformers import LlamaForCausalLM

    from tools.check_trl import published, published_config

    config = load_rl(rl_tasks.CONFIG, CHANGES).model
    model = Transformer(config, dtype=torch.float32)
    init_weights(model, seed=seed)
    ends = {"eos_token_id": rl_tasks.END, "pad_token_id": rl_tasks.END}
    found = LlamaForCausalLM(published_config(config, **ends))
    found.load_state_dict(
        published(config, {name: p.detach().clone() for name, p in model.named_parameters()})
    )
    return found


def _tokenizer() -> Any:
    """The ten digits, `=` and the end, as words."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # pyright: ignore[reportMissingImports]
    from transformers import PreTrainedTokenizerFast

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
