"""Keys of files as `yuan-train keys` tells them: all have a meaning, and schemas take our files."""

from pathlib import Path

import pytest

from tests.support.commands import Ask, Refuse
from yuan_train.cli.keys import KINDS, file_keys, file_schema
from yuan_train.cli.main import main
from yuan_train.config.load import read_document

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_a_meaning(kind: str) -> None:
    assert [key.path for key in file_keys(kind) if not key.meaning] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_schemas_take_the_files_of_configs_and_no_unknown_key(kind: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(file_schema(kind))
    folder = ROOT / "configs" / {"rl": "run"}.get(kind, kind)
    documents = [read_document(path) for path in sorted(folder.glob("*.yaml"))]
    if kind in ("run", "rl"):
        documents = [d for d in documents if ("algorithm" in d.value) == (kind == "rl")]
    assert documents or kind in ("plan", "rl_plan")
    for document in documents:
        faults = [f"{fault.json_path}: {fault.message}" for fault in validator.iter_errors(document.value)]
        assert faults == [], document.name
        assert not validator.is_valid(document.value | {"nonsense": 1})


def test_a_quantity_without_a_unit_is_refused_by_the_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    network = {"bandwidth": "10 Gb/s"}
    cluster = {"name": "a", "nodes": [{"name": "b", "device": "T4", "network": network}]}
    jsonschema.validate(cluster, file_schema("cluster"))
    network["bandwidth"] = "10 GbE"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster, file_schema("cluster"))


def test_keys_that_are_words_of_python_are_told_as_they_are_written() -> None:
    assert "links[].from" in {key.path for key in file_keys("cluster")}
    assert "from" in file_schema("cluster")["$defs"]["DedicatedLink"]["required"]


def test_keys_of_plans_of_reinforcement_learning_name_those_of_plans_once(refuse: Refuse) -> None:
    keys = {key.path: key for key in file_keys("rl_plan")}
    assert keys["roles.generation.plan"].type == "keys of plans" and "roles.policy.plan.ranks" not in keys
    assert "`yuan-train keys rl_plan roles` has some" in refuse("keys", "plan", "roles")


def test_a_default_and_a_unit_are_told_as_in_files() -> None:
    (reserved,) = file_keys("cluster", "device_types.reserved")
    assert reserved.path == "device_types.NAME.reserved"
    assert (reserved.unit, reserved.default) == ("bytes", "1 GiB")
    (batch,) = file_keys("run", "train.global_batch_size")
    assert batch.default is None and batch.type == "integer above 0 to 131072"


def test_the_command_prints_keys_by_prefix_or_part(capsys: pytest.CaptureFixture[str], ask: Ask) -> None:
    assert main(["keys", "run", "optimizer.beta"]) == 0
    assert capsys.readouterr().out.count("optimizer.beta") == 2
    found = ask("keys", "learning_rate")
    assert set(found) == {"run", "rl"}
    assert found["run"][0]["path"] == "optimizer.learning_rate"
    assert main(["keys"]) == 0
    out = capsys.readouterr().out
    assert all(KINDS[kind][2] in out for kind in KINDS)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("run optimizer.lerning_rate", "did you mean 'optimizer.learning_rate'"),
        ("globel_batch_size", "did you mean 'global_batch_size'"),
        ("--schema", "wanted one kind of file"),
        ("rn a b", "wanted a kind (run, cluster"),
    ],
)
def test_a_wrong_name_ends_with_what_to_do(line: str, words: str, refuse: Refuse) -> None:
    assert words in refuse("keys", *line.split())
