"""`yuan-train up --hosts a,b,c --model M --data D`: discover, profile, plan and launch, each as a command.

Every step is a command of its own that is printed before it runs, and leaves its files in one folder. A step
whose files are there, made by the same command of the same files, is not repeated.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yuan_train.cli.launch_hosts import blind_hosts
from yuan_train.cli.up_run import Aim, find_aim, run_text
from yuan_train.config.cluster import load_cluster
from yuan_train.config.errors import ConfigError
from yuan_train.config.load import write_text
from yuan_train.machine.hosts import RemoteHost, parse_hosts

JOURNAL = "steps.json"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's subparsers."""
    parser = subparsers.add_parser(
        "up",
        help="from names of machines to a run, in one go",
        description="Finds the cards of machines, measures them, plans and trains. Each step is printed as "
        "the command that it is, and can be typed again. Called again, it repeats only steps whose files are "
        "missing or older than what they are made of.",
    )
    parser.add_argument("--hosts", required=True, metavar="A,B,C", help="the machines, over ssh")
    parser.add_argument(
        "--model", required=True, metavar="M", help="a name of configs/model, a model file, a Hugging Face "
        "folder (with weights: they are trained on), its config.json, or a checkpoint to train on",
    )  # fmt: skip
    parser.add_argument(
        "--data", required=True, metavar="D", help="text, .jsonl or .parquet: a file or a folder of them; or "
        "the prefix of token files that preprocess has written",
    )  # fmt: skip
    parser.add_argument("--tokenizer", metavar="DIR", help="default: the model's; else one is trained")
    parser.add_argument("--steps", type=int, metavar="N", help="default: the data once")
    parser.add_argument("--out", default="up", metavar="DIR", help="folder of all files (up)")
    parser.add_argument("--ssh", default="ssh", metavar="CMD", help="called as CMD HOST COMMAND... (ssh)")
    parser.add_argument("--rendezvous", metavar="HOST[:PORT]", help="where ranks meet: the first machine")
    parser.add_argument("--copy", action="store_true", help="copy to the machines what they lack")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and run none")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the run")
    parser.set_defaults(run=run)


@dataclass(frozen=True, kw_only=True)
class UpStep:
    """A command, and the files that it reads and makes."""

    words: list[str]
    reads: tuple[str, ...]
    makes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The command's name."""
        return self.words[0]

    @property
    def line(self) -> str:
        """The command as it can be typed."""
        return shlex.join(["yuan-train", *self.words])


def run(arguments: argparse.Namespace) -> int:
    """Take the steps; returns the exit code of the first that fails. Raises ConfigError for wrong input."""
    hosts = parse_hosts(arguments.hosts, arguments.ssh)
    if arguments.steps is not None and arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps}: wanted a number of steps from 1 on")
    out = Path(arguments.out)
    aim = find_aim(arguments.model, arguments.data, arguments.tokenizer, out)
    before, after = list(_files_first(arguments, aim, out)), list(_then_run(arguments, aim, out))
    if arguments.dry_run:
        for step in (*before, *after):
            print(step.line)
        return 0
    began = time.monotonic()
    journal = _Journal(out / JOURNAL)
    total = len(before) + len(after)
    for number, step in enumerate(before, 1):
        if code := _take(step, journal, f"{number}/{total}", began, done=_is_found(step, hosts)):
            return code
    _write_run(arguments, aim, hosts, journal)
    for number, step in enumerate(after, len(before) + 1):
        if code := _take(step, journal, f"{number}/{total}", began):
            return code
    return 0


def _files_first(arguments: argparse.Namespace, aim: Aim, out: Path) -> Iterator[UpStep]:
    """What needs no run file: the cluster, weights, tokenizer and token files."""
    cluster = str(out / "cluster.yaml")
    yield UpStep(
        words=["discover", "--hosts", arguments.hosts, *_ssh(arguments), "--out", cluster],
        reads=(),
        makes=(cluster,),
    )
    if aim.weights is not None:
        model = str(out / "model")
        words = ["import-hf", aim.weights, "--out", model]
        yield UpStep(words=words, reads=(aim.weights,), makes=(f"{model}/latest",))
    if not aim.texts:
        return
    if aim.vocabulary is not None:
        words = ["tokenizer", "--input", *aim.texts, "--vocab-size", str(aim.vocabulary)]
        yield UpStep(
            words=[*words, "--out", str(aim.tokenizer)],
            reads=aim.texts,
            makes=(f"{aim.tokenizer}/tokenizer.model",),
        )
    words = ["preprocess", "--input", *aim.texts, "--tokenizer", str(aim.tokenizer), "--out", aim.prefix]
    yield UpStep(
        words=words + (["--messages-key", "messages"] if aim.are_chats else []),
        reads=(*aim.texts, str(aim.tokenizer)),
        makes=(f"{aim.prefix}.bin", f"{aim.prefix}.idx"),
    )


def _then_run(arguments: argparse.Namespace, aim: Aim, out: Path) -> Iterator[UpStep]:
    """What needs the run file, and then trains."""
    cluster, config, profile, plan = (
        str(out / name) for name in ("cluster.yaml", "run.yaml", "profile.json", "plan.yaml")
    )
    meeting = ["--rendezvous", arguments.rendezvous] if arguments.rendezvous else []
    where = ["--hosts", arguments.hosts, *_ssh(arguments), *meeting, *(["--copy"] if arguments.copy else [])]
    files = ["--cluster", cluster, "--config", config]
    overrides = arguments.overrides
    yield UpStep(
        words=["profile", *files, "--out", profile, *where, *overrides],
        reads=(cluster, config),
        makes=(profile,),
    )
    report = str(out / "plan.html")
    yield UpStep(
        words=["plan", *files, "--profile", profile, "--out", plan, "--report", report, *overrides],
        reads=(cluster, config, profile),
        makes=(plan, report),
    )
    yield UpStep(words=["launch", "--config", config, "--plan", plan, *where, *overrides], reads=(), makes=())


def _ssh(arguments: argparse.Namespace) -> list[str]:
    return ["--ssh", arguments.ssh] if arguments.ssh != "ssh" else []


class _Journal:
    """By step, the command that made its files, and the size and time of what it read and made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.found = {}

    def has(self, step: UpStep) -> bool:
        """Whether the step's files are those that it would make."""
        return bool(step.makes) and self.found.get(step.name) == _entry(step)

    def note(self, name: str, entry: Any) -> None:
        """Keep what a step has made."""
        self.found[name] = entry
        write_text(self.path, json.dumps(self.found, indent=1) + "\n")


def _entry(step: UpStep) -> Any:
    return {
        "command": step.line,
        "reads": [_stamp(Path(path)) for path in step.reads],
        "makes": [_stamp(Path(path)) for path in step.makes],
    }


def _stamp(path: Path) -> list[Any]:
    """Name, size and time of a file; of a folder those of its files."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    return [[str(one), one.stat().st_size, one.stat().st_mtime_ns] for one in files if one.exists()]


def _is_found(step: UpStep, hosts: Sequence[RemoteHost]) -> bool:
    """Whether the cluster file is there for these machines, perhaps with changes by hand."""
    path = Path(step.makes[0])
    if step.name != "discover" or not path.exists():
        return False
    return [node.name for node in load_cluster(path).nodes] == [host.address for host in hosts]


def _take(step: UpStep, journal: _Journal, number: str, began: float, *, done: bool = False) -> int:
    """Run a step unless its files are fresh; returns its exit code."""
    head = f"[{number}, {time.monotonic() - began:.0f} s]"
    if done or journal.has(step):
        print(f"{head} kept: {', '.join(step.makes)}, of: {step.line}", file=sys.stderr)
        return 0
    print(f"{head} $ {step.line}", file=sys.stderr, flush=True)
    code = _call([sys.executable, "-m", "yuan_train", *step.words])
    if code:
        print(
            f"error: step {number}, {step.name}, failed (exit code {code}); what it said is above. Mend that "
            "and type `up` again as before: the steps that are done are kept",
            file=sys.stderr,
        )
        return code
    if step.makes:
        journal.note(step.name, _entry(step))
    return 0


def _call(command: Sequence[str]) -> int:
    """Run a command to its end; a terminal's Ctrl-C reaches it too, and SIGTERM is passed on."""
    process = subprocess.Popen(command)
    previous = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    return code if code >= 0 else 1


def _write_run(
    arguments: argparse.Namespace, aim: Aim, hosts: Sequence[RemoteHost], journal: _Journal
) -> None:
    """Write the run file, unless it was changed by hand."""
    path = Path(arguments.out) / "run.yaml"
    there = path.read_text(encoding="utf-8") if path.exists() else None
    if there is not None and there != journal.found.get("run"):
        print(f"kept: {path}, as it was changed by hand", file=sys.stderr)
        return
    saves: str | None = str(Path(arguments.out) / "checkpoints")
    given = any(word.startswith("checkpoint.directory=") for word in arguments.overrides)
    if not given and len(hosts) > 1 and (blind := blind_hosts(hosts, saves)):
        print(
            f"note: {saves} of {hosts[0].address} is not seen by {', '.join(blind)}, so nothing is saved; in "
            "a folder that all share: checkpoint.directory=/shared/folder",
            file=sys.stderr,
        )
        saves = None
    cluster = load_cluster(Path(arguments.out) / "cluster.yaml")
    text = run_text(aim, cluster, out=Path(arguments.out), steps=arguments.steps, saves=saves)
    if there != text:
        write_text(path, text)
        print(f"wrote {path}: look at it, change it, and type `up` again", file=sys.stderr)
    journal.note("run", text)
