"""python tools/show_run.py runs/tiny: first and last loss, and the forecast and measured step time."""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

WARM_UP_STEPS = 3
"""The median leaves these out, because the first steps also fill caches and buffers."""


def main(arguments: list[str] | None = None) -> int:
    """Print a summary of a run. Returns the exit code: 2 if its directory has no finished step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="log directory of a run")
    directory: Path = parser.parse_args(arguments).directory
    try:
        steps = read_steps(directory / "metrics.jsonl")
    except (OSError, ValueError) as error:
        print(f"error: {directory / 'metrics.jsonl'}: {error}; train first", file=sys.stderr)
        return 2
    print("\n".join(describe(steps)))
    return 0


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are training steps. Raises ValueError if there are none."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    steps = [line for line in lines if line.get("loss") is not None and line.get("step_seconds") is not None]
    if not steps:
        raise ValueError("no finished step")
    return steps


def describe(steps: list[dict[str, Any]]) -> list[str]:
    """Loss, speed, and the deviation of the forecast."""
    first, last = steps[0], steps[-1]
    measured = statistics.median(step["step_seconds"] for step in steps[WARM_UP_STEPS:] or steps)
    lines = [
        f"steps        {first['step']} to {last['step']}",
        f"loss         {first['loss']:.3f} -> {last['loss']:.3f}",
        f"step time    {measured:.3f} s measured (median)",
    ]
    forecast = last.get("forecast_step_seconds")
    if forecast:
        error = forecast / measured - 1
        lines.append(
            f"             {forecast:.3f} s forecast, {abs(error):.0%} {'above' if error > 0 else 'below'}"
        )
    if last.get("tokens_per_second"):
        lines.append(f"speed        {last['tokens_per_second']:,.0f} tokens/s in the last step")
    return lines


if __name__ == "__main__":
    sys.exit(main())
