"""The command line as a whole: help, unknown arguments, exit codes, overrides between options."""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.commands import Refuse
from yuan_train.cli import main as command_line
from yuan_train.cli.main import COMMANDS, command_parser, main
from yuan_train.config.errors import CheckpointError, ConfigError, NoPlanFits, TrainingError

CLI = Path(command_line.__file__).parent


# --- the list of commands --------------------------------------------------------------------------------


def test_every_command_is_listed() -> None:
    # What `plan` and `simulate` do with roles, and others with hosts and nodes, has files of its own.
    others = {"main", "--init--", "plan-rl", "simulate-rl", "preflight"}
    others |= {"launch-hosts", "launch-slurm", "host-options", "plan-nodes", "up-run"}
    written = {path.stem.replace("_", "-") for path in CLI.glob("*.py")} - others
    assert written == set(COMMANDS)


def test_help_lists_every_command_without_torch() -> None:
    result = subprocess.run([sys.executable, "-m", "yuan_train", "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stderr == ""
    for name, line in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line)}", result.stdout, re.MULTILINE), name
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"yuan-train {name}" in capsys.readouterr().out


def test_no_option_is_the_beginning_of_one_of_torchruns() -> None:
    # torchrun takes `--run` for its `--run-path`, wherever it is in the command line.
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin
    text = (Path(spec.origin).parent / "distributed" / "run.py").read_text(encoding="utf-8")
    theirs = {option.replace("_", "-") for option in re.findall(r'"(--[a-z][a-z_-]*)"', text)}
    assert {"--run-path", "--nproc-per-node", "--max-restarts"} <= theirs
    for command in COMMANDS:
        ours = [option for action in command_parser(command)[1]._actions for option in action.option_strings]
        assert "--help" in ours
        for option in ours:
            wrong = [name for name in theirs if name.startswith(option) and option not in ("-h", "--help")]
            assert not wrong, (command, option)


# --- wrong arguments -------------------------------------------------------------------------------------


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plann"], "error: there is no command 'plann'; did you mean 'plan'? (has: plan, simulate"),
        (["xyzzy"], "error: there is no command 'xyzzy'; (has: plan, simulate"),
        (["--plan"], "error: unrecognized arguments: --plan"),
        (["inspect"], "error: the following arguments are required: PATH"),
        (["inspect", "f", "--jsn"], "error: unknown argument '--jsn'; did you mean --json?"),
        (["inspect", "f", "--js"], "error: unknown argument '--js'"),
        (["inspect", "f", "g"], "error: unknown argument 'g'"),
        (["inspect", "/nowhere/f"], "error: /nowhere/f: no such file"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, refuse: Refuse) -> None:
    assert message in refuse(*arguments)


def test_a_wrong_variable_is_refused(monkeypatch: pytest.MonkeyPatch, refuse: Refuse) -> None:
    monkeypatch.setenv("YUAN_KERNELS", "refrence")
    assert "YUAN_KERNELS='refrence': wanted 'reference', or no such variable" in refuse("doctor")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"yuan-train \d+\.\d+\.\d+\n", capsys.readouterr().out)


# --- a command of the test's own -------------------------------------------------------------------------

Run = Callable[[argparse.Namespace], int]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Run], None]]:
    """Registers a command `probe` that runs a given function."""

    def install(run: Run) -> None:
        def register(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--config", required=True)
            parser.add_argument("--plan")
            parser.add_argument("--print", action="store_true")
            parser.add_argument("overrides", nargs="*")

        module = types.ModuleType("yuan_train.cli.probe")
        module.register, module.run = register, run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "yuan_train.cli.probe", module)
        monkeypatch.setitem(COMMANDS, "probe", "a test")

    yield install


@pytest.mark.parametrize(
    "line",
    [
        "--config F a.b=1 --plan G c=2",
        "a.b=1 --config F c=2 --plan G",
        "--config F --plan G a.b=1 c=2",
        "a.b=1 c=2 --plan=G --config=F",
        "--plan G a.b=1 --config F -- c=2",
    ],
)
def test_overrides_may_be_anywhere(line: str, command: Callable[[Run], None]) -> None:
    seen: list[argparse.Namespace] = []
    command(lambda arguments: seen.append(arguments) or 0)
    assert main(["probe", *line.split()]) == 0
    assert (seen[0].config, seen[0].plan, seen[0].overrides) == ("F", "G", ["a.b=1", "c=2"])


def test_an_option_may_take_what_looks_like_an_override(command: Callable[[Run], None]) -> None:
    seen: list[argparse.Namespace] = []
    command(lambda arguments: seen.append(arguments) or 0)
    assert main(["probe", "--config", "x=1", "--print", "y=2"]) == 0
    assert (seen[0].config, seen[0].print, seen[0].overrides) == ("x=1", True, ["y=2"])


@pytest.mark.parametrize("line", ["a=1", "--conf F", "--config F --pla G", "--config F a=1 --bogus"])
def test_overrides_do_not_hide_mistakes(line: str, command: Callable[[Run], None]) -> None:
    command(lambda arguments: 0)
    assert main(["probe", *line.split()]) == 2


ALL = "(?s:.*)"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("one\ntwo"), 2, "error: one\nerror: two\n"),
        (CheckpointError("one\ntwo"), 2, "error: one\nerror: two\n"),
        (NoPlanFits("one\ntwo"), 3, "error: one\nerror: two\n"),
        (TrainingError("one\ntwo"), 1, "error: one\nerror: two\n"),
        (ValueError("a bug"), 1, f"{ALL}Traceback{ALL}ValueError: a bug{ALL}"),
        (BrokenPipeError("a worker died"), 1, f"{ALL}a worker died{ALL}"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_a_command(
    error: BaseException,
    code: int,
    said: str,
    command: Callable[[Run], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise error

    command(run)
    assert main(["probe", "--config", "F"]) == code
    assert re.fullmatch(said, capsys.readouterr().err)


def test_codes_of_commands_pass_through(command: Callable[[Run], None]) -> None:
    command(lambda arguments: 7)
    assert main(["probe", "--config", "F"]) == 7


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_stdout_is_no_error(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        result = subprocess.run(
            [sys.executable, "-m", "yuan_train", "inspect", "configs/run/tiny.yaml"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            cwd=CLI.parents[1],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert result.returncode == 1
    assert result.stderr == ""
