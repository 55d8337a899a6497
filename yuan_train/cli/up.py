"""Finds the cards of machines, measures them, plans and trains. Each step is printed as the command that it
is, and can be typed again. Called again, it repeats only steps whose files are missing or older than what
they are made of."""

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
from yuan_train.cli.main import place_to_write
from yuan_train.config.cluster import Cluster, load_cluster
from yuan_train.config.errors import ConfigError, hearing
from yuan_train.config.load import dump_plain, write_text
from yuan_train.config.model import STATE, load_model, locate_model
from yuan_train.config.plan import PROCESSOR, is_real_card
from yuan_train.data.indexed import IndexedDataset, idx_path, strip_suffix
from yuan_train.data.text import LINE_SUFFIXES, PARQUET_SUFFIX
from yuan_train.machine.hosts import RemoteHost, parse_hosts

JOURNAL = "steps.json"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--hosts", required=True, metavar="A,B,C", help="the machines, over ssh")
    add(
        "--model", required=True, metavar="M", help="a name of configs/model, a model file, a Hugging Face "
        "folder (with weights: they are trained on), its config.json, or a checkpoint to train on",
    )  # fmt: skip
    add(
        "--data", required=True, metavar="D", help="text, .jsonl or .parquet: a file or a folder of them; or "
        "the prefix of token files that preprocess has written",
    )  # fmt: skip
    add("--tokenizer", metavar="DIR", help="default: the model's; else one is trained")
    add("--steps", type=int, metavar="N", help="default: the data once")
    add("--out", type=place_to_write, default="up", metavar="DIR", help="folder of all files (up)")
    add("--ssh", default="ssh", metavar="CMD", help="called as CMD HOST COMMAND... (ssh)")
    add("--rendezvous", metavar="HOST[:PORT]", help="where ranks meet: the first machine")
    add("--copy", action="store_true", help="copy to the machines what they lack")
    add("--dry-run", action="store_true", help="print the commands, and run none")
    add("overrides", nargs="*", metavar="key=value", help="changes to the run")


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
    before, after = list(_files_first(arguments, aim, out)), list(_then_run(arguments, out))
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
            words=[*words, "--or-fewer", "--out", str(aim.tokenizer)],
            reads=aim.texts,
            makes=(f"{aim.tokenizer}/tokenizer.model",),
        )
    words = ["preprocess", "--input", *aim.texts, "--tokenizer", str(aim.tokenizer), "--out", aim.prefix]
    yield UpStep(
        words=words + (["--messages-key", "messages"] if aim.are_chats else []),
        reads=(*aim.texts, str(aim.tokenizer)),
        makes=(f"{aim.prefix}.bin", f"{aim.prefix}.idx"),
    )


def _then_run(arguments: argparse.Namespace, out: Path) -> Iterator[UpStep]:
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
    with hearing({signal.SIGTERM: lambda *_: process.terminate()}):
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise
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


TEXTS = (*LINE_SUFFIXES, PARQUET_SUFFIX, ".txt", ".md")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZERS = ("tokenizer.model", "tokenizer.json")
LARGEST_VOCABULARY = 50_000
"""Of a tokenizer that is trained here: larger ones come with their models."""
LEAST_DOCUMENTS = 100
"""Of a corpus of which a share is kept for validation."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What is trained, and on what."""

    model: str | None
    """As the run file names it; None: that of `start`."""
    start: str | None
    """A checkpoint to train on."""
    weights: str | None
    """A folder of Hugging Face's that is imported before, to `start`."""
    longest: int
    """Tokens of the longest sequence of the model."""
    prefix: str
    """Of the token files."""
    texts: tuple[str, ...]
    """What they are made of; empty: they are there."""
    are_chats: bool
    tokenizer: str | None
    vocabulary: int | None
    """Words of a tokenizer that is trained before; None: it is there, or none is needed."""


def find_aim(model: str, data: str, tokenizer: str | None, out: Path) -> Aim:
    """What --model, --data and --tokenizer mean. Raises ConfigError."""
    found = locate_model(model)
    config = load_model(model)
    is_published = found.is_dir() and (found / "config.json").is_file()
    weights = is_published and any(any(found.glob(pattern)) for pattern in WEIGHTS)
    is_checkpoint = found.is_dir() and not is_published
    start = str(out / "model") if weights else model if is_checkpoint else None
    texts = _texts(data)
    own = tokenizer or _tokenizer_of(found)
    vocabulary = None
    if texts and own is None:
        if config.vocab_size > LARGEST_VOCABULARY:
            raise ConfigError(
                f"--model {model}: a vocabulary of {config.vocab_size} and no tokenizer beside it; wanted "
                "--tokenizer DIR with the model's own, or --data with the prefix of token files"
            )
        own, vocabulary = str(out / "tokenizer"), config.vocab_size
    return Aim(
        model=None if start else model,
        start=start,
        weights=str(found) if weights else None,
        longest=config.max_sequence_length,
        prefix=str(out / "data") if texts else str(strip_suffix(data)),
        texts=texts,
        are_chats=bool(texts) and _are_chats(texts[0]),
        tokenizer=own,
        vocabulary=vocabulary,
    )


def _tokenizer_of(model: Path) -> str | None:
    """The folder of the tokenizer that comes with a model or a checkpoint."""
    if not model.is_dir():
        return None
    steps = [model] if (model / STATE).is_file() else sorted(model.glob("step-*"), reverse=True)
    for folder in (model, *(step / "tokenizer" for step in steps)):
        if any((folder / name).is_file() for name in TOKENIZERS):
            return str(folder)
    return None


def _texts(data: str) -> tuple[str, ...]:
    """The files of text; none if the data are token files. Raises ConfigError if nothing is there."""
    if idx_path(strip_suffix(data)).exists():
        return ()
    path = Path(data)
    if path.is_file():
        return (data,)
    if not path.is_dir():
        raise ConfigError(
            f"--data {data}: no such file or folder, and no {data}.idx; wanted text, .jsonl or .parquet, a "
            "folder of such files, or the prefix of token files"
        )
    files = sorted(one for one in path.rglob("*") if one.is_file() and one.suffix in TEXTS)
    if not files:
        raise ConfigError(f"--data {data}: no file in this folder ends in {', '.join(TEXTS)}; wanted some")
    return tuple(map(str, files))


def _are_chats(path: str) -> bool:
    """Whether the first line is a chat: messages, and no text."""
    if Path(path).suffix not in LINE_SUFFIXES:
        return False
    try:
        with open(path, encoding="utf-8") as file:
            first: Any = json.loads(file.readline())
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and "messages" in first and "text" not in first


def run_text(aim: Aim, cluster: Cluster, *, out: Path, steps: int | None, saves: str | None) -> str:
    """The run file: precision, length and batch by the cards; by default one pass over the data.

    `saves` is the directory of checkpoints; None: none are written.
    """
    types = {card.type for card in cluster.cards}
    known = [cluster.device_type(name) for name in types]
    on_cards = any(is_real_card(name, cluster.device_type(name)) for name in types)
    precision = "fp32" if not on_cards else "bf16" if all(card.bf16 for card in known) else "fp16"
    length = min(aim.longest, 2048 if on_cards else 256)
    batch = 64 if on_cards else 16
    corpus = IndexedDataset(aim.prefix)
    count = steps or max(10, corpus.num_tokens // (length * batch))
    rate = 3e-4 if aim.start is None else 2e-5
    validates = corpus.num_documents >= LEAST_DOCUMENTS
    data: dict[str, Any] = {"train": [{"prefix": aim.prefix}], "sequence_length": length}
    if validates:
        data["split"] = [0.98, 0.02]
    data |= {"tokenizer": aim.tokenizer} if aim.tokenizer else {"reset_position_ids": False}
    if aim.are_chats:
        data["loss_on_answers"] = True
    run: dict[str, Any] = {
        **({"model": aim.model} if aim.model else {"start": {"checkpoint": aim.start}}),
        "data": data,
        "train": {"steps": count, "global_batch_size": batch, "precision": precision},
        "optimizer": {
            "learning_rate": rate,
            "minimum_learning_rate": rate / 10,
            "warmup_steps": min(100, count // 10),
        },
        **({"validation": {"every": max(1, count // 10), "batches": 2}} if validates else {}),
        **({"checkpoint": {"directory": saves, "every": max(1, count // 5), "keep": 2}} if saves else {}),
        "log": {"directory": str(out / "log"), "every": 1 if count <= 100 else 10},
    }
    kinds = "processors" if types and all(name.startswith(PROCESSOR) for name in types) else "cards"
    head = (
        f"# Written by `yuan-train up` for these {kinds}: {', '.join(sorted(types))}. Changes by hand stay;\n"
        "# `yuan-train keys run` has every key.\n"
    )
    return head + dump_plain(run)
