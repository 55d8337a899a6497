"""Reading and writing of plan files."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

from yuan_train.config.document import is_list, is_mapping, read_document
from yuan_train.config.dump import as_plain, dump, write_text
from yuan_train.config.errors import ConfigError, PlanError
from yuan_train.config.load import build
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import validate_plan

_KEPT = re.compile(r"plan(?:\.step-(\d+)(?:\.(\d+))?)?\.yaml")
"""Plans in a log directory: `plan.yaml`, and of later ones the step from which on they ran."""


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


def keep_plan(directory: str | Path, plan: Plan, *, step: int) -> Path:
    """Write the plan that runs from `step` on into a run's log directory; the file that holds it.

    Another plan that is found there stays: it may be the user's own, or what steps before this one ran with.
    Raises ConfigError if it cannot be written.
    """
    directory, text = Path(directory), dump(plan)
    found = plans_in(directory)
    for path in found:
        with contextlib.suppress(PlanError, OSError):
            # A plan by hand is written otherwise; reading one of thousands of ranks takes seconds.
            if path.read_bytes() == text.encode() or load_plan(path) == plan:
                return path
    taken = {path.name for path in found}
    names = (f"plan.step-{step}.{number}.yaml" for number in range(2, len(found) + 3))
    names = itertools.chain(["plan.yaml", f"plan.step-{step}.yaml"], names)
    path = directory / next(name for name in names if name not in taken)
    write_text(path, text)
    return path


def plans_in(directory: str | Path) -> list[Path]:
    """The plans in a run's log directory: `plan.yaml`, and those of later steps in their order."""
    found = {path: _KEPT.fullmatch(path.name) for path in Path(directory).glob("plan*.yaml")}
    order = {path: (int(match[1] or -1), int(match[2] or 0)) for path, match in found.items() if match}
    return sorted(order, key=order.__getitem__)


def plan_digest(plan: Plan) -> str:
    """What tells a plan from others: 16 hexadecimal digits of all that it says; 1 and 1.0 are the same."""
    return hashlib.sha256(json.dumps(_with_floats(as_plain(plan))).encode()).hexdigest()[:16]


def _with_floats(plain: Any) -> Any:
    if is_mapping(plain):
        return {key: _with_floats(value) for key, value in plain.items()}
    if is_list(plain):
        return [_with_floats(item) for item in plain]
    return float(plain) if type(plain) is int else plain
