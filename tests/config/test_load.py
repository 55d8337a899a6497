"""Every message of the loader: where, what came, what was wanted, what to do."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yuan_train.config import load
from yuan_train.config.cluster import load_cluster
from yuan_train.config.errors import ConfigError
from yuan_train.config.load import dump, format_keys, parse_document, parse_scalar, read_document, write_text
from yuan_train.config.model import load_model

MODEL = """\
name: toy
num_layers: 4
hidden_size: 64
num_attention_heads: 4
ffn_hidden_size: 256
vocab_size: 1000
"""


def write(folder: Path, text: str, name: str = "model.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *overrides: str) -> str:
    """The message of the refused file, without its folder."""
    with pytest.raises(ConfigError) as error:
        load_model(write(folder, text), overrides)
    return str(error.value).replace(f"{folder}/", "")


def test_a_good_file_gives_a_frozen_value(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, MODEL))
    assert (model.num_layers, model.head_dim, model.attention) == (4, 16, "localized_filter")
    with pytest.raises(AttributeError):
        model.num_layers = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("num_layer: 5", "7: num_layer: unknown key 'num_layer'; did you mean 'num_layers'? (has: name,"),
        ("zzz: 5", "7: zzz: unknown key 'zzz'; (has: name, num_layers"),
        ("num_layers_: 5", "7: num_layers_: unknown key 'num_layers_'; did you mean 'num_layers'?"),
        ("init_std: many", '7: init_std: wanted a number, got "many"'),
        ("init_std: '0.02'", '7: init_std: wanted a number, got "0.02"'),
        ("init_std: true", "7: init_std: wanted a number, got true"),
        ("init_std: [1, 2]", "7: init_std: wanted a number, got [1, 2]"),
        ("init_std: -1", "7: init_std: wanted greater than 0, got -1"),
        ("init_std: .nan", '7: init_std: wanted a number, got ".nan"'),
        ("init_std: 1e999", '7: init_std: wanted a number, got "1e999"'),
        ("max_sequence_length: 4.5", "7: max_sequence_length: wanted an integer, got 4.5"),
        ("max_sequence_length: true", "7: max_sequence_length: wanted an integer, got true"),
        ("max_sequence_length: '4'", '7: max_sequence_length: wanted an integer, got "4"'),
        ("max_sequence_length:", "7: max_sequence_length: wanted an integer, got null"),
        ("max_sequence_length: 0", "7: max_sequence_length: wanted greater than 0, got 0"),
        ("attention: linear", "7: attention: wanted 'localized_filter' or 'plain', got \"linear\""),
        ("tie_embeddings: no", '7: tie_embeddings: wanted a boolean, got "no"'),
        ("tie_embeddings: on", '7: tie_embeddings: wanted a boolean, got "on"'),
        ("tie_embeddings: 1", "7: tie_embeddings: wanted a boolean, got 1"),
        ("max_sequence_length: 1_000", '7: max_sequence_length: wanted an integer, got "1_000"'),
        ("max_sequence_length: 017", '7: max_sequence_length: wanted an integer, got "017"'),
        ("max_sequence_length: 12:30", '7: max_sequence_length: wanted an integer, got "12:30"'),
        ("max_sequence_length: 0x10", '7: max_sequence_length: wanted an integer, got "0x10"'),
        ("name: other", "7: name: given twice (first at model.yaml:1); keep one"),
        ("init_std: !!python/name:os.system", "7: init_std: tags such as "),
        ("init_std: !mine 3", "7: init_std: tags such as '!mine' are not allowed"),
        ("init_std: &a [*a]", "7: init_std[0]: an alias that contains itself"),
        ("[1, 2]: 5", "7: a key must be a word"),
        ("init_std: [1", "8: not YAML: "),
        ("  init_std: 1", "7: not YAML: "),
        ("init_std: *nowhere", "7: not YAML: found undefined alias"),
        ("---\nname: second", "7: not YAML: but found another document"),
    ],
)
def test_messages(tmp_path: Path, line: str, message: str) -> None:
    reported = refusal(tmp_path, MODEL + line + "\n")
    assert f"model.yaml:{message}" in reported
    assert "Traceback" not in reported


def test_missing_keys_name_themselves(tmp_path: Path) -> None:
    reported = refusal(tmp_path, "name: toy\nnum_layers: 4\n")
    for key in ("hidden_size", "num_attention_heads", "ffn_hidden_size", "vocab_size"):
        assert f"{key}: missing" in reported


def test_an_empty_file_misses_everything(tmp_path: Path) -> None:
    assert "name: missing" in refusal(tmp_path, "")


def test_a_list_is_no_model(tmp_path: Path) -> None:
    assert refusal(tmp_path, "- 1\n- 2\n") == "model.yaml:1: wanted keys and values, got [1, 2]"


def test_all_errors_in_one_pass(tmp_path: Path) -> None:
    text = (
        MODEL.replace("num_layers: 4", "num_layers: four").replace("name: toy", "nam: toy")
        + "rope_base: -1\n"
    )
    reported = refusal(tmp_path, text)
    assert 'model.yaml:2: num_layers: wanted an integer, got "four"' in reported
    assert "model.yaml:1: nam: unknown key 'nam'; did you mean 'name'?" in reported
    assert "name: missing" in reported
    assert "model.yaml:7: rope_base: wanted greater than 0, got -1" in reported
    assert len(reported.splitlines()) == 4


def test_unknown_keys_do_not_hide_violations(tmp_path: Path) -> None:
    reported = refusal(
        tmp_path, MODEL.replace("num_attention_heads: 4", "num_attention_heads: 5") + "colour: red\n"
    )
    assert "model.yaml:7: colour: unknown key" in reported
    words = "model.yaml:4: num_attention_heads: 5 heads do not divide hidden_size 64; give head_dim, or heads"
    assert words in reported


def test_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"^/nowhere/model.yaml: no such file$"):
        load_model("/nowhere/model.yaml")


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(ConfigError, match="cannot be read: it is no text"):
        load_model(path)


def test_binary_is_not_yaml(tmp_path: Path) -> None:
    assert "not YAML" in refusal(tmp_path, "name: \x00\x01\n")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "a: " + "{b: " * 50_000,
        "- " * 50_000 + "1",
        "\n".join(" " * i + "k:" for i in range(2_000)),
    ],
    ids=["lists", "mappings", "list in a line", "indented"],
)
def test_nesting_that_would_end_the_process(text: str) -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        parse_document(text, name="deep.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (f"name: '{'[' * 500}'", {"name": "[" * 500}),  # brackets in a text are not nesting
        ("a: '4'\nb: \"null\"\n", {"a": "4", "b": "null"}),  # quotes keep text
        ("a: &x [1, 2]\nb: *x\n", {"a": [1, 2], "b": [1, 2]}),
    ],
    ids=["brackets", "quotes", "anchors"],
)
def test_values(text: str, value: object) -> None:
    assert parse_document(text, name="f").value == value


@pytest.mark.parametrize(
    "text",
    [
        *(path.read_text() for path in sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))),
        "a: &x [1, 1.0, true, '1', \"1\", ~, 1e999, x y]\nb: *x\nc: {d: *x, e: , 'f': g}\nh: |\n i\n",
        "a: ! 1\nb: !!str 1\nc: ! '1'\n? d\n: e",
        "",
        "- 1\n- {a: 1}",
    ],
)
def test_values_are_read_alike_with_places_and_without(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = parse_document(text, name="x")

    def refuse(*_: object) -> None:
        raise load._Refused

    monkeypatch.setattr(load, "_values", refuse)
    located = parse_document(text, name="x")
    assert repr(quick.value) == repr(located.value) and dict(quick.sources) == dict(located.sources)


# --- overrides -------------------------------------------------------------------------------------------


def test_override_wins_over_the_file(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, MODEL), ("num_layers=7", "init_std=3e-4", "num_layers=8"))
    assert (model.num_layers, model.init_std) == (8, 3e-4)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "num_layer=7",
            "command line 'num_layer=7': num_layer: unknown key 'num_layer'; did you mean 'num_layers'?",
        ),
        ("num_layers=x", "command line 'num_layers=x': num_layers: wanted an integer, got \"x\""),
        ("num_layers=", "command line 'num_layers=': num_layers: wanted an integer, got null"),
        ("num_layers", "command line 'num_layers': wanted key.path=value"),
        ("=3", "command line '=3': wanted key.path=value"),
        ("a..b=3", "command line 'a..b=3': wanted key.path=value"),
        ("num_layers.deep=3", "command line 'num_layers.deep=3': 'num_layers.deep' cannot be set in "),
        ("num_layers.0=3", "command line 'num_layers.0=3': 'num_layers.0' cannot be set in "),
        ("num_layers=[1", "command line 'num_layers=[1': not YAML: "),
        ("num_layers={a: 1, a: 2}", "a: given twice"),
    ],
)
def test_refused_overrides(tmp_path: Path, assignment: str, message: str) -> None:
    assert message in refusal(tmp_path, MODEL, assignment)


def test_overrides_reach_into_lists(tmp_path: Path) -> None:
    text = "name: c\nnodes: [{name: a, device: A100-80G}, {name: b, device: T4}]\n"
    text = text.replace("80G}", "80G, network: {bandwidth: 1 GB/s}}").replace(
        "T4}", "T4, network: {bandwidth: 1 GB/s}}"
    )
    path = write(tmp_path, text, "cluster.yaml")
    assert load_cluster(path, ("nodes.1.device=V100-16G",)).nodes[1].device == "V100-16G"
    with pytest.raises(ConfigError, match=r"'nodes\.2\.device' cannot be set in"):
        load_cluster(path, ("nodes.2.device=T4",))
    with pytest.raises(
        ConfigError, match=r"command line 'nodes\.1\.device=T44': nodes\[1\]\.device: unknown card"
    ):
        load_cluster(path, ("nodes.1.device=T44",))


# --- scalars ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e3", 1000.0),
        ("1.0e3", 1000.0),
        ("+4", 4),
        (".5", 0.5),
        ("-0.5E+2", -50.0),
        ("null", None),
        ("~", None),
        ("true", True),
        *((text, text) for text in "no on 1_000 017 12:30 0x1F .inf 1e999 2024-01-01".split()),
    ],
)
def test_scalars(text: str, value: object) -> None:
    got = parse_scalar(text)
    assert got == value and type(got) is type(value)


def test_json_is_read_too(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, True, "text"], "b": {"c": 1e-7}}
    assert read_document(write(tmp_path, json.dumps(value), "f.json")).value == value


def test_keys_as_a_person_writes_them() -> None:
    assert format_keys(("nodes", 0, "link", "bandwidth")) == "nodes[0].link.bandwidth"


# --- writing ---------------------------------------------------------------------------------------------

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abc_-. 1:#", min_size=1), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text("abc_", min_size=1), plain, max_size=5))
def test_dump_and_parse_give_plain_values_back(value: dict[str, object]) -> None:
    assert parse_document(dump(value), name="f").value == value


def test_write_text_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.yaml"
    write_text(path, "one\n")
    (tmp_path / "link.yaml").symlink_to(path)
    write_text(tmp_path / "link.yaml", "two\n")
    assert path.read_text() == "two\n"
    assert [file.name for file in path.parent.iterdir()] == ["plan.yaml"]
    for wrong in (path / "below_a_file.yaml", path.parent, Path("/")):
        with pytest.raises(ConfigError, match="cannot be written"):
            write_text(wrong, "three\n")
