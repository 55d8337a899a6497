"""The commands `tokenizer` and `preprocess`, and the corpus tool."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from yuan_train.cli.main import command_parser
from yuan_train.config.errors import DataError

SOURCE = Path(json.__file__).parent / "decoder.py"
TOOL = Path(__file__).parents[2] / "tools" / "make_corpus.py"


def run(*words: object) -> int:
    arguments = command_parser(str(words[0]))[0].parse_args(list(map(str, words)))
    return arguments.run(arguments)


def test_text_to_token_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = tmp_path / "foreign.txt"
    foreign.write_bytes(b"\xff")
    assert run("tokenizer", "--input", SOURCE, foreign, "--vocab-size", 400, "--out", tmp_path, "--json") == 0
    trained = json.loads(capsys.readouterr().out)
    assert (trained["vocab_size"], trained["documents"], trained["undecodable"]) == (400, 1, 1)
    words = ("--input", SOURCE, foreign, "--tokenizer", tmp_path, "--out", tmp_path / "corpus")
    assert run("preprocess", *words, "--json") == 0
    output = capsys.readouterr()
    done = json.loads(output.out)
    assert (done["documents"], done["undecodable"]) == (1, [str(foreign)])
    assert "foreign.txt: not UTF-8" in output.err
    assert (tmp_path / "corpus.idx").is_file()


def test_output_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("tokenizer", "--input", SOURCE, "--vocab-size", 400, "--out", tmp_path)
    assert "400 pieces from 1 documents" in capsys.readouterr().out
    run("preprocess", "--input", SOURCE, "--tokenizer", tmp_path, "--out", tmp_path / "corpus")
    assert "1 documents" in capsys.readouterr().out


def test_wrong_input_is_an_error_with_exit_code_two(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer") as caught:
        run("preprocess", "--input", SOURCE, "--tokenizer", tmp_path, "--out", tmp_path / "corpus")
    assert caught.value.exit_code == 2


def make_sources(folder: Path) -> Path:
    for name, content in {
        "b.py": b"second = 2\n",
        "a/z.py": "first = 'é'\n".encode(),
        "copy.py": b"second = 2\n",
        "foreign.py": b"# \xe9\n",
        "blank.py": b"\n",
        "notes.txt": b"not a source\n",
        "test/t.py": b"excluded = 1\n",
        "site-packages/p.py": b"excluded = 2\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def make_corpus(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, TOOL, *map(str, words)], capture_output=True, text=True, check=False
    )


def test_the_corpus_tool_takes_distinct_sources_in_order(tmp_path: Path) -> None:
    out = tmp_path / "data" / "corpus.jsonl"
    source = make_sources(tmp_path / "source")
    result = make_corpus("--out", out, "--source", source)
    assert result.returncode == 0, result.stderr
    assert [json.loads(line)["text"] for line in out.read_bytes().splitlines()] == [
        "first = 'é'\n",
        "second = 2\n",
    ]
    words = "2 documents, 24 bytes of text; skipped 1 repeated, 1 blank, 1 not UTF-8, 0 over the limit"
    assert words in result.stderr
    assert [path.name for path in out.parent.iterdir()] == ["corpus.jsonl"]


def test_the_corpus_tool_keeps_to_a_limit(tmp_path: Path) -> None:
    out = tmp_path / "corpus.jsonl"
    source = make_sources(tmp_path / "source")
    assert make_corpus("--out", out, "--source", source, "--max-bytes", 20).returncode == 0
    assert len(out.read_text(encoding="utf-8").splitlines()) == 1
    kept = out.read_bytes()
    result = make_corpus("--out", out, "--source", source, "--max-bytes", 3)
    assert result.returncode == 2 and "no Python sources within the limits" in result.stderr
    assert out.read_bytes() == kept


def test_the_corpus_tool_tells_stories(tmp_path: Path) -> None:
    """The same ones each time, among the sources."""
    out = tmp_path / "corpus.jsonl"
    source = make_sources(tmp_path / "source")
    told: list[bytes] = []
    for _ in range(2):
        result = make_corpus("--out", out, "--source", source, "--stories", 3)
        assert result.returncode == 0 and "2 documents, 24 bytes of text and 3 stories" in result.stderr
        told.append(out.read_bytes())
    texts = [json.loads(line)["text"] for line in told[0].splitlines()]
    stories = [text for text in texts if text.startswith("One day ")]
    assert told[0] == told[1] and len(texts) == 5
    assert [text.count("everyone went home happy.\n") for text in stories] == [20, 20, 20]


def test_the_standard_library_has_text(tmp_path: Path) -> None:
    out = tmp_path / "corpus.jsonl"
    result = make_corpus("--out", out, "--max-bytes", 300_000)
    assert result.returncode == 0, result.stderr
    text_bytes = sum(len(json.loads(line)["text"].encode()) for line in out.read_bytes().splitlines())
    assert 290_000 < text_bytes <= 300_000
