"""Reading and writing of plan files."""

from __future__ import annotations

from pathlib import Path

from yuan_train.config.document import read_document
from yuan_train.config.dump import dump, write_text
from yuan_train.config.errors import ConfigError, PlanError
from yuan_train.config.load import build
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import validate_plan


def load_plan(path: str | Path) -> Plan:
    """Read a plan. Raises PlanError with every violated constraint."""
    try:
        document = read_document(path)
    except ConfigError as error:
        raise PlanError(str(error)) from None
    return build(document, Plan, validate=validate_plan, error=PlanError)


def save_plan(path: str | Path, plan: Plan) -> None:
    """Write a plan atomically. Raises ConfigError if it fails."""
    write_text(path, dump(plan))
