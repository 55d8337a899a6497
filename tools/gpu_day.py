"""What a card can prove: python tools/gpu_day.py [right|fast|streams|all] --device cuda --out DIR

    right    do the kernels and the step compute the right thing?
    fast     are the forecasts true, and how fast is a step?
    streams  copies, late copies, several ranks on the card, NCCL, lost ranks, megatron-core

Each check runs in a process of its own. When its seconds are over, its processes are ended, so that none ends
another. A check that has ended is a line on stdout and in DIR/checks.jsonl: {"check", "ok", "figure",
"seconds", "detail"}; `ok` is null for what cannot be had here, and `figure` says why. Logs are
DIR/CHECK/log.txt. At the end DIR/table.md and stderr have a table for docs/ran_on.md, of all lines of
DIR/checks.jsonl. The exit code is 1 if a check has failed.

`--device cpu` runs the same list on tiny sizes, so that no minute of a card is spent on errors of typing.
`--together 6` runs what only asks whether something is right beside each other, on a machine with many cores.
Nothing here needs a network. Packages that are missing are named, and what needs them is null.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, get_args

ROOT = Path(__file__).parents[1]
sys.path[:0] = [folder for folder in (str(ROOT), str(ROOT / "tools/types")) if folder not in sys.path]

Part = Literal["right", "fast", "streams"]
Line = dict[str, Any]
OURS = ("yuan_train", "yuan_kernels", "tests", "tools")
PART_SECONDS = 540.0
"""Of a part: a machine may end a command after ten minutes."""


@dataclass(frozen=True)
class Check:
    """A check: the function of its name in a module of tools/gpu_checks."""

    name: str
    part: Part
    module: str
    seconds: float
    """After which it is ended."""
    asks: str
    """What it answers, for the table."""
    on_card_only: str = ""
    """Why it has nothing to do without a card; empty if it runs on a CPU too."""


NEEDS_CARD = "needs a card"
IN_SUITE = "on a CPU the test suite runs these"
CHECKS = (
    Check("versions", "right", "machine", 40, "a product on the device is that of the CPU"),
    Check("memory", "right", "machine", 60, "memory as the catalogue has it; bytes of a context", NEEDS_CARD),
    Check("attention", "right", "machine", 60, "no attention keeps its scores, flash or not"),
    Check("documents", "right", "numbers", 60, "documents apart under every recompute"),
    Check("curves", "right", "numbers", 150, "losses and norms as on a CPU and as by the definitions"),
    Check("same_bits", "right", "numbers", 40, "a run twice gives the same bits"),
    Check("buffers", "right", "machine", 40, "bytes of gradient norm, embedding gradient, fp32 products"),
    Check("gpu_tests", "right", "machine", 100, "pytest -m gpu", IN_SUITE),
    Check("doctor", "right", "machine", 40, "yuan-train doctor"),
    Check("kernels", "right", "machine", 170, "our kernels against torch's"),
    Check("sanitizer", "right", "machine", 180, "compute-sanitizer finds nothing in our kernels", NEEDS_CARD),
    Check("profile", "fast", "speed", 180, "a profile of this card, and a plan from it"),
    Check("forecast", "fast", "speed", 100, "seconds and bytes of that plan's step as forecast"),
    Check("kernel_times", "fast", "speed", 60, "where the seconds of a step go"),
    Check("compiled", "fast", "speed", 150, "compiled layers and fp16 beside bf16; a narrow model"),
    Check("generation", "fast", "speed", 100, "tokens a second; a step of reinforcement learning"),
    Check("saves", "fast", "speed", 80, "what a save holds up; a run that changes its device"),
    Check("tiers", "streams", "tiers", 150, "optimizer, activations, parameters elsewhere: no bit changes"),
    Check("late_copies", "streams", "tiers", 60, "the same with copies that begin late"),
    Check("late_uncached", "streams", "tiers", 60, "and with memory that is returned at once", NEEDS_CARD),
    Check("nccl", "streams", "ranks", 40, "a group of one rank; bytes of a communicator"),
    Check("lost_rank", "streams", "ranks", 60, "one of four ranks is killed: all end and name it"),
    Check("full_card", "streams", "ranks", 60, "one of four runs out of memory: all end, named", NEEDS_CARD),
    Check("several_ranks", "streams", "ranks", 170, "plans of several ranks, all on one card", IN_SUITE),
    Check("megatron", "streams", "ranks", 100, "the engine of megatron-core: losses as ours"),
    Check("large_layers", "streams", "ranks", 80, "layers of Llama-3.1-8B: bytes as the planner has them"),
)
ALONE = ("memory", "kernels", "nccl", "megatron", "large_layers")
"""Checks of seconds, and of bytes of the whole card, besides those of part `fast`."""


def main(words: list[str] | None = None) -> int:
    """Run the checks that are asked for; 1 if one has failed."""
    options = parse(words)
    options.out.mkdir(parents=True, exist_ok=True)
    first, *others = choose(options.part, options.only)
    deadlines: dict[Part, float] = {}
    told = threading.Lock()

    def holds(check: Check) -> bool:
        end = deadlines.setdefault(check.part, time.monotonic() + options.budget)
        line = perform(check, options, min(check.seconds, end - time.monotonic()))
        text = json.dumps(line, default=str)
        with told, (options.out / "checks.jsonl").open("a") as file:
            print(text, flush=True)
            file.write(text + "\n")
        return line["ok"] is not False

    beside = [check for check in others if options.together > 1 and not is_alone(check)]
    found = [holds(first)]
    with ThreadPoolExecutor(options.together) as pool:
        found += pool.map(holds, beside)
    found += [holds(check) for check in others if check not in beside]
    table = make_table(options.out / "checks.jsonl")
    (options.out / "table.md").write_text(table)
    print(table, file=sys.stderr, end="")
    return int(not all(found))


def is_alone(check: Check) -> bool:
    """Whether others beside it would change its figure."""
    return check.part == "fast" or check.name in ALONE


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", default="all", choices=[*get_args(Part), "all"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", metavar="NAME,...", help="these checks alone, besides `versions`")
    budget = f"of a part ({PART_SECONDS:g})"
    parser.add_argument("--budget", type=float, default=PART_SECONDS, metavar="SECONDS", help=budget)
    at_a_time = "run so many checks at a time, all but those whose figures would change by it (1)"
    parser.add_argument("--together", type=int, default=1, metavar="N", help=at_a_time)
    control = "a negative control: disable this synchronisation (tests/support/ranks.py: disabled); a check "
    parser.add_argument("--without", default="", metavar="KEY", help=f"{control}that rests on it must fail")
    options = parser.parse_args(words)
    if options.together < 1:
        parser.error(f"--together {options.together}: wanted at least 1, which is one check after the other")
    unknown = set((options.only or "versions").split(",")) - {check.name for check in CHECKS}
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: wanted {', '.join(c.name for c in CHECKS)}")
    return options


def choose(part: str, only: str | None) -> list[Check]:
    """The checks to run: first `versions`, from which the table has its head."""
    chosen = [check for check in CHECKS if part in (check.part, "all")]
    if only is not None:
        chosen = [check for check in chosen if check.name in only.split(",")]
    return [CHECKS[0], *(check for check in chosen if check is not CHECKS[0])]


def perform(check: Check, options: argparse.Namespace, seconds: float) -> Line:
    """The line of a check, which gets so many seconds."""
    began = time.monotonic()
    ok, figure, detail = None, "", {}
    if check.on_card_only and options.device == "cpu":
        figure = check.on_card_only
    elif seconds <= 0:
        figure = "not run: the seconds of its part are over"
    else:
        ok, figure, detail = _in_process(check, options, seconds)
    took = round(time.monotonic() - began, 1)
    return {"check": check.name, "ok": ok, "figure": figure, "seconds": took, "detail": detail}


def _in_process(check: Check, options: argparse.Namespace, seconds: float) -> tuple[bool | None, str, Line]:
    """What a check says; or how its process ended, if it says nothing."""
    folder = (options.out / check.name).resolve()
    folder.mkdir(exist_ok=True)
    result = folder / "result.json"
    for old in (result, folder / "notes.jsonl"):
        old.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-day-", ignore_cleanup_errors=True) as scratch:
        arguments = (check, options.device, options.without, folder, Path(scratch))
        process = _server().Process(target=_run, args=arguments)
        process.start()
        process.join(seconds)
        ended = not process.is_alive()
        _end_all(process)
    noted = [json.loads(text) for text in _lines(folder / "notes.jsonl")]
    detail = {key: value for note in noted for key, value in note.items()}
    if result.exists():
        found = json.loads(result.read_text())
        return found["ok"], found["figure"], detail
    if not ended and seconds < check.seconds:
        return None, f"not done in the {seconds:.0f} s that were left of its part", detail
    how = f"ended by {_ending(process)}" if ended else f"ended after {seconds:.0f} s, its time"
    return False, f"{how}; see {check.name}/log.txt", detail


def _server() -> ForkServerContext:
    """The context whose processes are forked from a server that has imported what the checks import, and has
    not asked for a card."""
    from tests.support.spawn import start_server

    return start_server()


def _end_all(process: BaseProcess) -> None:
    """End the processes of a check: its own, and what it has started and left."""
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join()


def _ending(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _run(check: Check, device: str, without: str, folder: Path, scratch: Path) -> None:
    """The process of a check: write what it says, and whatever it raises."""
    os.setsid()
    log = os.open(folder / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        ok, figure = _call(check, device, without, folder, scratch)
    except BaseException as error:
        traceback.print_exc()
        ok, figure = _fault(error)
    temporary = folder / "result.json.tmp"
    temporary.write_text(json.dumps({"ok": ok, "figure": figure}))
    temporary.replace(folder / "result.json")


def _call(check: Check, device: str, without: str, folder: Path, scratch: Path) -> tuple[bool | None, str]:
    import torch

    from tools.gpu_checks.bench import Bench
    from yuan_train.parallel.environment import set_rank_defaults

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        # As the ranks of a run have it; CUDA has not been asked for anything yet.
        set_rank_defaults()
    module = check.module if "." in check.module else f"tools.gpu_checks.{check.module}"
    function = getattr(importlib.import_module(module), check.name)
    return function(Bench(torch.device(device), folder, scratch, without))


def _fault(error: BaseException) -> tuple[bool | None, str]:
    """(ok, figure) of what a check has raised: another project's package that is missing is no failure."""
    name = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and name not in OURS:
        return None, f"{name} is not installed"
    return False, f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


# --- the table ---------------------------------------------------------------------------------------------


def make_table(path: Path) -> str:
    """The table in Markdown of the lines of a file, of each check the last; and its head."""
    lines = {line["check"]: line for line in map(json.loads, _lines(path))}
    facts = lines["versions"]["detail"]
    asks = {check.name: check.asks for check in CHECKS}
    head = ", ".join(f"{key} {facts[key]}" for key in ("torch", "CUDA", "driver", "Python") if facts.get(key))
    date = datetime.datetime.now(datetime.UTC).date()
    words = {True: "yes", False: "**no**", None: "-"}
    rows = "".join(
        f"| {name}: {asks.get(name, '')} | {words[line['ok']]} | {_cell(line['figure'])} "
        f"| {line['seconds']} |\n"
        for name, line in lines.items()
    )
    lacking = f"; missing: {', '.join(facts['missing'])}" if facts.get("missing") else ""
    title = f"**{facts.get('device', 'unknown device')}**, {date}; {head}{lacking}."
    return f"{title}\n\n| check | holds | figure | seconds |\n|---|---|---|--:|\n{rows}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    multiprocessing.freeze_support()
    sys.exit(main())
