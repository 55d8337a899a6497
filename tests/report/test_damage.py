"""Log directories whose files are damaged in any way: what can be shown is shown, the rest is named."""

import copy
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import Refuse
from tests.support.logs import write_run
from yuan_train.cli.main import main
from yuan_train.report.lines import GrowingFile, Journal, read_entries
from yuan_train.report.run_log import RunReader, read_run
from yuan_train.train.metrics import open_after

OF_RL = "rl.jsonl"
"""Lines of another kind of run, shown in place of metrics.jsonl."""
FILES = (
    *("metrics.jsonl", "supervise.jsonl", "samples.jsonl"),
    *("plans/plan-2.yaml", "plan.yaml", "cluster.yaml", "config.yaml"),
)
TRIALS = 24
"""Of each file."""
WRONG: list[Any] = [
    *(None, True, "many", "", [], {}, [1, "x"], {"a": {}}, [[1]], -1, 0, 1e308, -1e308, 10**400, 1e-320),
    *(math.nan, math.inf, -math.inf, 2**63, "<b>", "\x00", [math.nan] * 2, {"a -> b": "slow"}, [1], [1] * 9),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("whole"))


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def with_bytes(data: bytes, chance: random.Random) -> bytes:
    """Some bytes are others, some of them in a row."""
    found = bytearray(data)
    for _ in range(chance.randrange(1, 6)):
        start = chance.randrange(len(found))
        found[start : start + chance.choice((1, 30))] = chance.randbytes(chance.choice((1, 30)))
    return bytes(found)


def with_other_values(data: bytes, chance: random.Random) -> bytes:
    """Of some lines of JSON, or places of a YAML file, a value is of another type or size, or missing."""
    lines = data.splitlines()
    try:
        values = [json.loads(line) for line in lines]
    except ValueError:
        value = yaml.safe_load(data)
        _spoil(value, chance)
        return yaml.safe_dump(value).encode()
    for value in values:
        if chance.random() < 0.5:
            _spoil(value, chance)
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def _spoil(value: Any, chance: random.Random) -> None:
    while isinstance(value, dict | list) and value:
        key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if not isinstance(value[key], dict | list) or not value[key] or chance.random() < 0.3:
            if chance.random() < 0.2:
                del value[key]
            else:
                value[key] = copy.deepcopy(chance.choice(WRONG))
            return
        value = value[key]


def nothing_of_it(data: bytes, chance: random.Random) -> bytes:
    deep = b"[" * 100_000
    return chance.choice(
        (b"", b"\n", b"\x00" * 500, chance.randbytes(500), deep, b'{"a":' * 100_000, b"1\n" * 9)
    )


DAMAGE: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut": cut,
    "bytes": with_bytes,
    "values": with_other_values,
    "all": nothing_of_it,
}


def copy_of(whole: Path, folder: Path) -> Path:
    for name in FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((whole / name).read_bytes())
    return folder


@pytest.mark.parametrize("name", [*FILES, OF_RL])
def test_any_damage_ends_in_a_page_or_in_a_message(
    name: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, shown = tmp_path / "page.html", 0
    for seed in range(TRIALS):
        chance = random.Random(f"{name} {seed}")
        kind = list(DAMAGE)[seed % len(DAMAGE)]
        log = copy_of(whole, tmp_path / f"log-{seed}")
        (log / ("metrics.jsonl" if name == OF_RL else name)).write_bytes(
            DAMAGE[kind]((whole / name).read_bytes(), chance)
        )
        page.unlink(missing_ok=True)
        code = main(["show", str(log), "--out", str(page)])
        said = capsys.readouterr()
        assert code in (0, 2), (kind, seed, said.err)
        assert "Traceback" not in said.err, (kind, seed)
        assert (code == 0) == page.exists() and (code == 0) == (not said.err.startswith("error: "))
        if code == 0:
            shown += 1
            drawn = page.read_text()
            wrong = re.search(r'[" ,](nan|-?inf)[" ,]', drawn.partition("<h2>plan.yaml")[0])
            assert wrong is None, (kind, seed, wrong)
        assert code == 0 or name in ("metrics.jsonl", OF_RL), "the steps alone are enough for a page"
    assert shown > TRIALS / 2


def test_what_is_left_out_is_named(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = copy_of(whole, tmp_path / "log")
    assert main(["show", str(log)]) == 0
    assert "left out" not in capsys.readouterr().out
    metrics = (log / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    metrics[10] = b"\xff\xfe" + metrics[10]
    metrics[11] = metrics[11].replace(b'"loss": ', b'"loss": "')
    (log / "metrics.jsonl").write_bytes(b"".join(metrics))
    (log / "supervise.jsonl").write_bytes((log / "supervise.jsonl").read_bytes() + b'{"time": NaN}\n')
    (log / "plans" / "plan-2.yaml").write_text("version: 1\n")
    (log / "cluster.yaml").write_bytes(b"\xff")
    (log / "config.yaml").write_text("a: [")
    assert main(["show", str(log)]) == 0
    said = capsys.readouterr().out
    left = [line for line in said.splitlines() if line.startswith("left out ")]
    for words in (
        "metrics.jsonl: 2 lines damaged or of no step",
        "supervise.jsonl: 1 line damaged",
        "plan-2.yaml",
        "cluster.yaml: cannot be read: it is no text",
        "not YAML",
    ):
        assert sum(words in line for line in left) == 1, (words, said)


def test_another_cluster_than_the_runs_is_refused(whole: Path, tmp_path: Path, refuse: Refuse) -> None:
    for text, words in (("nodes: 3\n", "other.yaml"), (None, "has cards that are not in it")):
        other = tmp_path / "other.yaml"
        found = yaml.safe_load((whole / "cluster.yaml").read_text())
        found["nodes"][0]["name"] = "another"
        other.write_text(text or yaml.safe_dump(found))
        assert words in refuse("show", whole, "--cluster", other)


def test_a_run_goes_on_over_a_damaged_log(whole: Path, tmp_path: Path) -> None:
    """What is whole is kept, and new lines are lines of their own."""
    metrics = tmp_path / "metrics.jsonl"
    lines = (whole / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    wrong = [b"\xff\xfe\x00\n", b'{"step": "many"}\n', b"[" * 100_000 + b"\n", b"7\n"]
    metrics.write_bytes(b"".join([*lines[:5], *wrong, *lines[5:], lines[0][:20]]))
    with open_after(metrics, 41) as file:
        file.write(lines[40].decode())
    assert metrics.read_bytes() == b"".join(lines[:41])
    for damage in (b"", b"\xff\x00", b'{"time": 1', b"[" * 100_000 + b"\n"):
        (tmp_path / "supervise.jsonl").write_bytes(damage)
        Journal(tmp_path).write("started", "a is here", nodes=("a",))
        Journal(tmp_path).write("stays", "b waits", nodes=("a",), waiting=("b",))
        assert [entry.event for entry in read_entries(tmp_path)[0]] == ["started", "stays"]


def test_a_file_that_grows_is_read_once(whole: Path, tmp_path: Path) -> None:
    """Only what is new is read; a file that was written anew is read from its start."""
    path, lines = tmp_path / "x.jsonl", (whole / "metrics.jsonl").read_bytes().splitlines()
    path.write_bytes(b"\n".join(lines[:10]) + b"\n" + lines[10][:30])
    file = GrowingFile(path)
    assert file.read() == (lines[:10], False) and file.read() == ([], False)
    path.write_bytes(b"\n".join(lines[:20]))
    assert file.read() == (lines[10:20], False), "the last one has no end, and is whole"
    path.write_bytes(b"\n".join(lines[:30]) + b"\n")
    assert file.read() == (lines[20:30], False)
    other = [line.replace(b'"loss": ', b'"loss": 1') for line in lines]
    for found in (other[:30], lines[:5]):
        path.write_bytes(b"\n".join(found) + b"\n")
        assert file.read() == (found, True), "a run that was resumed has written it anew"


def test_a_page_of_a_growing_run_is_that_of_one_reading(whole: Path, tmp_path: Path) -> None:
    log, lines = copy_of(whole, tmp_path / "log"), (whole / "metrics.jsonl").read_bytes().splitlines(True)
    (log / "metrics.jsonl").write_bytes(b"".join(lines[:7]))
    reader = RunReader(log)
    for end in (7, 8, 40, 60):
        (log / "metrics.jsonl").write_bytes(b"".join(lines[:end]))
        grown, once = reader.read(), read_run(log)
        for name in ("loss", "step_seconds", "validation_loss"):
            one, other = grown.curve(name), once.curve(name)
            assert (one.points, one.means, one.last) == (other.points, other.means, other.last)
        assert grown.ranks == once.ranks and grown.steps.seconds == pytest.approx(0.5 * end)


@pytest.mark.parametrize("name", ["profile.json", "cluster.yaml"])
def test_planning_with_a_damaged_file(
    name: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan, or a message: 2 of the file, 3 where nothing fits what it says."""
    files = {"cluster.yaml": whole / "cluster.yaml", "profile.json": tmp_path / "profile.json"}
    assert main(["profile", "--of-run", str(whole), "--out", str(files["profile.json"])]) == 0
    data, planned = files[name].read_bytes(), 0
    files[name] = tmp_path / f"damaged-{name}"
    words = ["plan", "--config", str(whole.parent / "run.yaml"), "--out", str(tmp_path / "plan.yaml")]
    words += ["--cluster", str(files["cluster.yaml"]), "--profile", str(files["profile.json"])]
    for seed in range(TRIALS):
        chance = random.Random(f"{name} {seed}")
        kind = list(DAMAGE)[seed % len(DAMAGE)]
        files[name].write_bytes(DAMAGE[kind](data, chance))
        capsys.readouterr()
        code = main(words)
        said = capsys.readouterr().err
        assert code in (0, 2, 3) and "Traceback" not in said, (kind, seed, said)
        planned += code == 0
    files[name].write_bytes(data)
    assert main(words) == 0 and planned < TRIALS / 2
