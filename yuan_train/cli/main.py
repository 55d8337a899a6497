"""`yuan-train COMMAND ...`: finds the command, runs it, and turns errors into messages and exit codes.

A command is a module `yuan_train/cli/<name, - as _>.py`, whose docstring its help begins with, with two
functions: `register(parser)`, which adds its arguments, and `run(arguments) -> int`. Only the module of the
requested command is imported, so that `yuan-train --help` and `yuan-train plan --help` are fast.

What a command is doing is shown on a terminal: a line that is drawn over itself, and gone at the end
(`working`). Where the output is no terminal (a file, a pipe, a test) nothing is written.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from yuan_train import __version__
from yuan_train.config.errors import INTERRUPTED, YuanError, say
from yuan_train.parallel.environment import is_rank_of_several

COMMANDS = {
    "plan": "partition a model unevenly over the cards of a cluster; forecast time and memory",
    "simulate": "run a plan's schedule in virtual time; write a timeline",
    "estimate": "what reinforcement learning of a model takes on a card; whether it fits",
    "profile": "measure this machine's cards, and the links between them",
    "init": "write a commented file to begin with: a run of some kind, or a cluster",
    "tokenizer": "train a tokenizer on text",
    "preprocess": "turn text into token files",
    "train": "train; one process alone, or each rank under torchrun",
    "rl": "reinforcement learning; one process alone, or each rank under torchrun",
    "launch": "start the ranks of a plan, on this machine or on several",
    "supervise": "plan and launch; when cards go or come, plan anew and go on",
    "show": "what a run has reached; the forecast beside what was measured; a page",
    "watch": "the page of a run in a browser, also while it goes on",
    "trace": "merge the ranks' traces of a run, beside the forecast, for Perfetto",
    "generate": "write text with a trained model",
    "serve": "answer over HTTP as OpenAI's API does, under any plan",
    "evaluate": "loss and perplexity of a trained model on token files",
    "import-hf": "turn a Hugging Face model into a checkpoint",
    "export-hf": "turn a checkpoint into a Hugging Face model",
    "import-megatron": "turn a checkpoint of the original Yuan 2.0 code into one of ours",
    "export-megatron": "turn a checkpoint into one of the original Yuan 2.0 code, for any partition",
    "inspect": "show what a file or checkpoint holds, and check that it is complete",
    "keys": "every key of run, cluster and model files: type, default, meaning; JSON schemas",
    "discover": "find cards, links and networks of machines; write a cluster file",
    "up": "from names of machines to a run: discover, profile, plan and launch in one go",
    "doctor": "say what this machine, or several, are ready for, and what is missing",
}

USER_ERROR = 2


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, with `key=value` overrides before, between and after options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)
        self._intermixed = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        # By itself, argparse fills a positional `*` at the first gap between options, even an empty one.
        overrides = any(not action.option_strings and action.nargs == "*" for action in self._actions)
        if self._intermixed or not overrides:
            return super().parse_known_args(args, namespace)
        self._intermixed = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._intermixed = False

    def error(self, message: str) -> NoReturn:
        """Print usage and message in the form of other user errors; exit with 2."""
        self.print_usage(sys.stderr)
        self.exit(USER_ERROR, f"error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return its exit code.

    0: done, 2: wrong input, 3: no plan fits, 130: interrupted, 1: anything else.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    logging.getLogger("yuan_train").setLevel(logging.INFO)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except YuanError as error:
        say(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return 1
        say(error)
        return 1


def program(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command line, and end the process.

    A rank of several that has failed leaves without the interpreter's teardown, which joins the threads of
    gloo and NCCL: they may wait for a rank that is gone. All is said by then.
    """
    code = main(argv)
    if code and is_rank_of_several():
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else None
    if name is None:
        _overview().print_help(sys.stderr)
        return USER_ERROR
    if name.startswith("-"):
        _overview().parse_args(arguments)
        raise YuanError(f"{name}: wanted a command first; `yuan-train --help` lists them")
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise YuanError(f"there is no command {name!r}; {hint}(has: {', '.join(COMMANDS)})")
    # The kernels say the same, in the middle of a run and without an exit code.
    if (kernels := os.environ.get("YUAN_KERNELS", "")) not in ("", "reference"):
        raise YuanError(f"YUAN_KERNELS={kernels!r}: wanted 'reference', or no such variable")
    parser, own = command_parser(name)
    # Before what is missing is complained of: a slip in a needed option is both.
    options = {option for action in own._actions for option in action.option_strings}
    given = arguments[1 : arguments.index("--")] if "--" in arguments else arguments[1:]
    slips = [word for word in given if word.startswith("--") and word.partition("=")[0] not in options]
    if slips:
        _refuse(slips, own)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(unknown, own)
    _keep_files(parsed)
    run: Callable[[argparse.Namespace], int] = parsed.run
    return run(parsed)


def _keep_files(parsed: argparse.Namespace) -> None:
    """Raise YuanError if a file that is written is one that is read, or is written twice."""
    files: dict[str, str] = {}
    for name in ("cluster", "config", "model", "plan", "profile", "out", "report", "trace"):
        given = str(getattr(parsed, name, None) or "")
        for path in filter(None, given.split(",") if name == "profile" else [given]):
            other = files.setdefault(os.path.realpath(path), name)
            if other != name and name in ("out", "report", "trace"):
                raise YuanError(f"--{name}: {path} is that of --{other} too; wanted another file")


def place_to_write(path: str) -> str:
    """The value of an option that names what a command makes. Raises ArgumentTypeError if it cannot be made:
    before the work is done, not behind it."""
    if path in ("", "-"):
        raise argparse.ArgumentTypeError(f"{path!r}: wanted a name, such as ./{path or 'out'}")
    whole = Path(os.path.realpath(path))
    there = next(folder for folder in (*whole.parents, whole) if folder.exists())  # "/" has no parents.
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "may not be written to" if there.is_dir() else "is a file"
        raise argparse.ArgumentTypeError(f"{path}: {there} {why}; wanted another place")
    return path


def file_to_write(path: str) -> str:
    """`place_to_write` of a file. What is there is replaced, so a device such as /dev/null is refused."""
    if os.path.exists(path) and not os.path.isfile(path):
        what = "a folder" if os.path.isdir(path) else "no file"
        raise argparse.ArgumentTypeError(f"{path}: is {what}; wanted a file to write")
    return place_to_write(path)


def command_parser(name: str) -> tuple[Parser, argparse.ArgumentParser]:
    """The parser of a command line that begins with this command, and the command's own."""
    module = importlib.import_module(f"yuan_train.cli.{name.replace('-', '_')}")
    parser, text = Parser(prog="yuan-train"), module.__doc__ or ""
    own = parser.add_subparsers(parser_class=Parser, required=True).add_parser(name, description=text)
    if "\n\n" in text:
        # Paragraphs, which argparse would join.
        own.formatter_class = argparse.RawDescriptionHelpFormatter
    own.set_defaults(run=module.run)
    module.register(own)
    return parser, own


def _refuse(unknown: list[str], parser: argparse.ArgumentParser) -> NoReturn:
    """Stop with the first argument that the command does not know."""
    options = [option for action in parser._actions for option in action.option_strings]
    close = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    parser.error(f"unknown argument {unknown[0]!r}{hint}")


def _overview() -> Parser:
    """The parser of `yuan-train --help`: one line per command, without importing their modules."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    parser = Parser(
        prog="yuan-train",
        usage="yuan-train COMMAND ...",
        description="Training of large language models on clusters of heterogeneous GPUs.\n\ncommands:\n"
        + "\n".join(lines),
        epilog="`yuan-train COMMAND --help` describes a command.\n"
        "Exit codes: 0 done, 2 the input is wrong, 3 no plan fits, 1 anything else.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"yuan-train {__version__}")
    return parser


def _reader_is_gone() -> bool:
    """Whether the reader of stdout closed the pipe (`| head`); if so, Python's final flush is silenced."""
    try:
        output = sys.stdout.fileno()
        poll = select.poll()
        poll.register(output, 0)
        gone = any(event & select.POLLERR for _, event in poll.poll(0))
    except OSError:
        return False
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return gone


WIDTH = 24
"""Characters of a bar."""
PERIOD = 0.25
"""Seconds between two drawings."""


class Bar:
    """How much of a number of pieces of work is done; `step` says that one more is."""

    def __init__(self, what: str, total: int | None, stream: TextIO) -> None:
        """Without a total, only the seconds are counted."""
        self._what, self._total, self._stream = what, total, stream
        self._begun = time.monotonic()
        self._done = 0

    def step(self, what: str | None = None) -> None:
        """One piece more; `what` is being done now."""
        self._done += 1
        self._what = what or self._what

    def line(self) -> str:
        """As it is drawn."""
        seconds = f"{time.monotonic() - self._begun:.0f} s"
        if self._total is None:
            return f"{self._what} ... {seconds}"
        full = WIDTH * min(self._done, self._total) // max(self._total, 1)
        bar = "#" * full + "-" * (WIDTH - full)
        return f"[{bar}] {min(self._done, self._total)}/{self._total}  {self._what}  {seconds}"

    def draw(self) -> None:
        """Over what was drawn before."""
        self._stream.write(f"\r\x1b[K{self.line()[:100]}")
        self._stream.flush()

    def clear(self) -> None:
        """Leave an empty line."""
        self._stream.write("\r\x1b[K")
        self._stream.flush()


@contextmanager
def working(what: str, total: int | None = None, stream: TextIO | None = None) -> Generator[Bar]:
    """Draw a bar (None: seconds alone) on `stream`, or stderr, while the block runs."""
    out: TextIO = sys.stderr if stream is None else stream
    bar = Bar(what, total, out)
    if not out.isatty():
        yield bar
        return
    ended = threading.Event()

    def draw() -> None:
        while not ended.wait(PERIOD):
            bar.draw()

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        yield bar
    finally:
        ended.set()
        thread.join()
        bar.clear()
