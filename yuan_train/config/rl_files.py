"""Reading of run files of reinforcement learning."""

from __future__ import annotations

from pathlib import Path

from yuan_train.config.document import read_document
from yuan_train.config.errors import ConfigError
from yuan_train.config.load import build
from yuan_train.config.rl import RLConfig
from yuan_train.config.rl_constraints import validate_rl
from yuan_train.config.run_files import is_rl_document, with_overrides


def is_rl_run(path: str | Path) -> bool:
    """Whether a file is the run file of reinforcement learning. Raises ConfigError if it cannot be read."""
    return is_rl_document(read_document(path))


def load_rl(path: str | Path, overrides: tuple[str, ...] = ()) -> RLConfig:
    """Read a run file and the model that it names. Raises ConfigError with every violation."""
    document = read_document(path)
    if not is_rl_document(document):
        raise ConfigError(
            f"{path}: no run of reinforcement learning, which has the key `algorithm`: `yuan-train train`"
        )
    return build(with_overrides(document, overrides), RLConfig, validate=validate_rl)
