"""What a step of reinforcement learning tells: a line of metrics.jsonl, and a few of its answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from yuan_train.config.errors import ConfigError
from yuan_train.data.prompts import text_of
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.rl.experience import Group
from yuan_train.train.metrics import StepMetrics, close_quietly, open_after, write_lines

SAMPLES_PER_STEP = 4
CURVES = (
    "reward",
    "reward_std",
    "entropy_estimate",
    "kl",
    "truncated",
    "clipped",
    "generation_seconds",
    "training_seconds",
    "samples_per_second",
)


@dataclass(frozen=True, kw_only=True)
class RLMetrics(StepMetrics):
    """One batch, trained. Means are over its answers or their tokens; None: nothing was trained of it."""

    reward: float
    reward_std: float
    rewards: dict[str, float | None]
    """Mean score by function, over the answers that it scored."""
    answer_tokens: dict[str, float]
    """`mean` and `max`."""
    truncated: float
    """Share of the answers that reached max_new_tokens."""
    entropy_estimate: float
    """-mean log-probability of the tokens that were drawn."""
    kl: float | None
    """The estimate of the divergence from the reference; None without one."""
    ratio_mean: float | None
    """Of the policy to that which drew, before clipping, over all updates; and the largest."""
    ratio_max: float | None
    clipped: float | None
    """Share of the tokens outside the clip, or with AIPO beyond rho, over all updates."""
    log_prob_gap: dict[str, float | None]
    """`mean` and `max` of |log pi - log mu| before the first step: what generation and training compute
    differently, and in async mode what the batches between have changed."""
    version: int
    """Batches trained when the answers were drawn."""
    staleness_mean: float
    staleness_max: int
    groups_zero_variance: int
    """Groups of equal rewards among those that were scored."""
    groups_filtered: int
    """Those of them that were replaced."""
    groups_failed: int
    """Groups without a reward, which were replaced."""
    next_ticket: int
    optimizer_steps: int
    """Since the start of the run."""
    rounds: int
    """Of generation, in which each answer under way gets a token; of the pipeline or engine with the most."""
    slots_filled: float
    """Share of the slots that got a token, over the rounds of all pipelines or engines."""
    generation_seconds: float
    scoring_seconds: float
    """Where engines of their own score, while they draw and the policy trains, that of the slowest."""
    training_seconds: float
    sync_seconds: float
    """0 where generation uses the policy's own weights, as `sync_bytes`."""
    sync_bytes: int
    wait_seconds: float
    """In which it neither generates nor trains."""
    idle_policy: float
    """Share of the step in which the policy's cards do not train."""
    idle_generation: float
    """Share of the step in which the engines' cards do not generate."""
    samples_per_second: float
    value_loss: float | None = None
    """The critic's; None without one."""
    explained_variance: float | None = None
    """Of the returns, by the critic's values; None also where all returns are equal."""
    evaluation: dict[str, float] | None = None
    """`pass_1`, `pass_k` and `mean_reward`, if it was due."""
    evaluation_at_start: dict[str, float] | None = None
    """The same of the weights before the first step, in that step's line."""

    @property
    def highlights(self) -> tuple[str, ...]:
        """The reward, and the length of answers; the loss says little, and comes last."""
        shown = [f"reward {self.reward:.3f}", f"tokens {self.answer_tokens['mean']:.1f}"]
        if self.evaluation is not None:
            shown.append(f"pass@1 {self.evaluation['pass_1']:.3f}")
        return (*shown, f"loss {self.loss:.4f}")

    @property
    def figures(self) -> dict[str, float]:
        """What trackers draw, by name."""
        found = super().figures | {name: getattr(self, name) for name in CURVES}
        found |= {f"reward/{name}": value for name, value in self.rewards.items()}
        found |= {f"answer_tokens/{name}": value for name, value in self.answer_tokens.items()}
        found |= {f"evaluation/{name}": value for name, value in (self.evaluation or {}).items()}
        return {name: value for name, value in found.items() if value is not None}


class SampleLog:
    """samples.jsonl: a few answers of each step."""

    def __init__(self, directory: str | None, tokenizer: Tokenizer | None, *, first_step: int) -> None:
        """Lines of `first_step` and later ones are replaced. Raises ConfigError if it cannot be written."""
        self._tokenizer = tokenizer
        self._file: TextIO | None = None
        if directory is not None:
            path = Path(directory) / "samples.jsonl"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open_after(path, first_step)
            except OSError as error:
                raise ConfigError(f"log.directory: {path} cannot be written: {error}") from None

    def write(self, step: int, groups: Sequence[Group], labels: Sequence[str]) -> None:
        """The first answers to the first prompts of a batch. Raises TrainingError if the disk is full."""
        if self._file is None:
            return
        lines: list[str] = []
        for group in groups[:SAMPLES_PER_STEP]:
            sample = group.samples[0]
            line: dict[str, Any] = {
                "step": step,
                "ticket": group.ticket,
                "sample": sample.number,
                "prompt": group.prompt.text,
                "text": text_of(sample.said, self._tokenizer),
                "answer": group.prompt.answer,
                "reward": group.rewards[0],
                "rewards": dict(zip(labels, group.scores[0], strict=True)),
                "tokens": len(sample.ids),
                "ended": sample.ended,
            }
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        write_lines(self._file, lines)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            close_quietly(self._file)
