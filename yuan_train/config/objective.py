"""What a run minimises: the loss of the next token, of preference pairs, or of a reward model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from yuan_train.config.errors import Violation

if TYPE_CHECKING:
    from yuan_train.config.run import RunConfig

ObjectiveKind = Literal["language_model", "dpo", "reward"]

DEFAULTS: dict[str, dict[str, Any]] = {
    "language_model": {},
    "dpo": {"beta": 0.1, "smoothing": 0.0, "loss": "sigmoid"},
    "reward": {"margin": 0.0},
}
"""The fields that each kind takes, and their defaults."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The loss of a run; see `docs/rl.md`. `language_model` reads `data.train`, the others `data.pairs`."""

    kind: ObjectiveKind = "language_model"
    """Next token, direct preference optimisation, or a reward model's ranking of pairs."""
    beta: Annotated[float, Gt(0)] | None = None
    """Of `dpo`: how much a preference weighs against the distance from the reference; None: 0.1."""
    smoothing: Annotated[float, Ge(0), Lt(0.5)] | None = None
    """Of `dpo`: the probability that a pair's label is wrong (cDPO); None: 0."""
    loss: Literal["sigmoid", "ipo"] | None = None
    """Of `dpo`; None: sigmoid."""
    margin: Annotated[float, Ge(0)] | None = None
    """Of `reward`: by how much the chosen answer's score should be greater; None: 0."""

    def __post_init__(self) -> None:
        for name, value in DEFAULTS.get(self.kind, {}).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def reads_pairs(self) -> bool:
        """Whether rows 2i and 2i + 1 of a micro-batch are the chosen and the rejected answer of one pair."""
        return self.kind != "language_model"


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """What a run begins with; a run that is resumed goes on with its own checkpoint instead."""

    checkpoint: str | None = None
    """Weights, of a checkpoint or of the newest in a folder of them; the optimizer begins anew, at step 0.
    None draws them from train.seed. A reward model takes all but the head of a language model."""


def objective_constraints(run: RunConfig) -> Iterator[Violation]:
    """Yield the violated constraints between a run's objective and the rest of it."""
    objective, data = run.objective, run.data
    for name in ("beta", "smoothing", "loss", "margin"):
        if getattr(objective, name) is not None and name not in DEFAULTS[objective.kind]:
            kind = next(kind for kind, fields in DEFAULTS.items() if name in fields)
            yield Violation(
                ("objective", name), f"goes with kind: {kind}, not {objective.kind}; leave it out"
            )
    if objective.loss == "ipo" and objective.smoothing:
        yield Violation(("objective", "smoothing"), "goes with loss: sigmoid; set it to 0 for ipo")
    if objective.kind != "reward" and run.model.output == "value":
        yield Violation(("model", "output"), "value needs objective.kind: reward; set it to vocabulary")
    if not objective.reads_pairs:
        if data.pairs is not None:
            kinds = "objective.kind: dpo or reward"
            yield Violation(("data", "pairs"), f"is read with {kinds}; give data.train instead")
        if not data.train:
            yield Violation(("data", "train"), "wanted at least one, got none")
        return
    if data.pairs is None:
        wanted = 'a .jsonl file of {"prompt": ..., "chosen": ..., "rejected": ...}'
        yield Violation(("data", "pairs"), f"missing; objective.kind {objective.kind} reads {wanted}")
    for name in ("train", "validation", "split"):
        if getattr(data, name):
            what_to_do = "leave it out; `yuan-train evaluate --pairs` measures held-out pairs"
            yield Violation(("data", name), f"is not read with objective.kind {objective.kind}; {what_to_do}")
    for name in ("fim_rate", "loss_after_separator", "loss_on_answers", "mask_loss_after_eod"):
        if getattr(data, name):
            yield Violation(("data", name), "is for documents; pairs have a loss on their answers alone")
    sizes = {("train", "micro_batch_size"): (run.train.micro_batch_size,)}
    sizes |= {("search", "micro_batch_size"): run.search.micro_batch_size or ()}
    for path, found in sizes.items():
        if any(size % 2 for size in found):
            shown = ", ".join(map(str, found))
            yield Violation(path, f"{shown}: rows 2i and 2i + 1 are one pair; wanted even numbers")
    if objective.kind == "dpo" and run.checkpoint.directory is not None and run.log.directory is None:
        what = "the reference's log-probabilities are kept there (reference.npy) for a run that is resumed"
        yield Violation(("log", "directory"), f"missing; {what}")
