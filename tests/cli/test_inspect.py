"""`inspect` of every kind of file, complete and incomplete."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.config.test_cluster import CLUSTER
from tests.config.test_plan import PLAN
from tests.config.test_profile import example
from yuan_train.cli.main import main
from yuan_train.config.devices import CATALOGUE

TOKENS = Path("tests/golden/indexed/uint16")


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `inspect PATH --json`; returns exit code, the object and stderr."""

    def run(path: Path | str) -> tuple[int, dict[str, Any], str]:
        code = main(["inspect", str(path), "--json"])
        printed = capsys.readouterr()
        return code, json.loads(printed.out), printed.err

    return run


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_model(inspect: Any) -> None:
    code, facts, stderr = inspect("configs/model/yuan2-102b.yaml")
    assert (code, stderr) == (0, "")
    assert (facts["kind"], facts["whole"], facts["parameters"]) == ("model", True, 102_577_954_816)
    assert facts["parameters_per_layer"] == 1_207_996_416
    assert facts["training_flops_per_token"] == 3 * facts["forward_flops_per_token"]


def test_a_model_with_adapters_has_a_whole_forward(inspect: Any, tmp_path: Path) -> None:
    """Only the backward of what is frozen is shorter."""
    text = Path("configs/model/tiny.yaml").read_text()
    plain = inspect(write(tmp_path, "plain.yaml", text))[1]
    adapted = inspect(write(tmp_path, "adapted.yaml", text + "lora: {rank: 8}\n"))[1]
    assert adapted["forward_flops_per_token"] > plain["forward_flops_per_token"]
    assert adapted["training_flops_per_token"] < plain["training_flops_per_token"]


def test_a_model_with_experts(inspect: Any) -> None:
    _, facts, _ = inspect("configs/model/yuan2-m32.yaml")
    assert (facts["parameters"], facts["active_parameters"]) == (39_942_842_368, 3_704_055_808)


def test_a_run_of_reinforcement_learning(inspect: Any) -> None:
    code, facts, _ = inspect("configs/run/rl-tiny.yaml")
    assert code == 0 and facts["kind"] == "run"
    wanted = ("grpo", 512, ["right", "ends"])
    assert (facts["algorithm"], facts["samples_per_step"], facts["rewards"]) == wanted


def test_a_run(inspect: Any) -> None:
    code, facts, _ = inspect("configs/run/yuan2-51b.yaml")
    assert (code, facts["kind"], facts["tokens"]) == (0, "run", 63578 * 1152 * 4096)
    assert facts["data"] == [{"prefix": "data/yuan2", "weight": 1.0, "there": False}]


def test_a_cluster(inspect: Any, tmp_path: Path) -> None:
    code, facts, _ = inspect(write(tmp_path, "c.yaml", CLUSTER))
    assert (code, facts["kind"], facts["cards"], facts["dedicated_links"]) == (0, "cluster", 9, 1)
    assert facts["memory_bytes"] == 8 * CATALOGUE["A100-80G"].memory + 24 * 2**30


def test_a_plan(inspect: Any, tmp_path: Path) -> None:
    code, facts, _ = inspect(write(tmp_path, "p.yaml", PLAN))
    assert (code, facts["kind"], facts["valid"], facts["world_size"]) == (0, "plan", True, 4)
    assert [stage["layers"] for stage in facts["stages"]] == [[0, 16], [16, 24]]
    assert facts["stages"][1]["cards"] == ["T4"]


def test_a_plan_that_violates_a_constraint(inspect: Any, tmp_path: Path) -> None:
    code, facts, stderr = inspect(write(tmp_path, "p.yaml", PLAN.replace("[16, 24]", "[17, 23]")))
    assert (code, facts["kind"], facts["whole"]) == (2, "plan", False)
    assert len(facts["faults"]) == 2
    assert stderr.startswith("error: ") and "layer 16 dropped" in stderr


def test_a_profile(inspect: Any, tmp_path: Path) -> None:
    code, facts, _ = inspect(write(tmp_path, "profile.json", json.dumps(example())))
    assert (code, facts["kind"], facts["links"]) == (0, "profile", ["a100-0/0 to t4-0/0"])
    assert facts["entries"][0]["layer_forward"] == "10 ms"


@pytest.mark.parametrize("end", ["", ".idx", ".bin"])
def test_token_files(inspect: Any, end: str) -> None:
    code, facts, _ = inspect(f"{TOKENS}{end}")
    assert (code, facts["kind"], facts["whole"], facts["dtype"]) == (0, "tokens", True, "uint16")
    assert facts["documents"] > 0 and facts["tokens"] > 0


def test_torn_token_files(inspect: Any, tmp_path: Path) -> None:
    for end in (".bin", ".idx"):
        (tmp_path / f"torn{end}").write_bytes(Path(f"{TOKENS}{end}").read_bytes())
    with (tmp_path / "torn.bin").open("r+b") as file:
        file.truncate((tmp_path / "torn.bin").stat().st_size - 2)
    code, facts, stderr = inspect(tmp_path / "torn")
    assert (code, facts["whole"]) == (2, False)
    assert "truncated" in stderr


def test_half_a_pair(inspect: Any, tmp_path: Path) -> None:
    (tmp_path / "half.idx").write_bytes(Path(f"{TOKENS}.idx").read_bytes())
    code, facts, stderr = inspect(tmp_path / "half.idx")
    assert (code, facts["whole"]) == (2, False)
    assert "half.bin" in stderr


def test_a_folder_that_is_no_checkpoint(inspect: Any, tmp_path: Path) -> None:
    code, facts, stderr = inspect(tmp_path)
    assert (code, facts["kind"], facts["whole"]) == (2, "checkpoint", False)
    assert stderr.startswith(f"error: {tmp_path}")


@pytest.mark.parametrize(
    ("text", "words"),
    [("colour: red\n", "its keys match no kind of file (a model has num_layers,")]
    + [(text, "") for text in ("", "- 1\n", "text\n")],
)
def test_a_file_of_no_known_kind(inspect: Any, tmp_path: Path, text: str, words: str) -> None:
    code, _, stderr = inspect(write(tmp_path, "f.yaml", text))
    assert code == 2 and words in stderr


def test_a_model_with_a_mistake_is_still_a_model(inspect: Any, tmp_path: Path) -> None:
    code, facts, stderr = inspect(write(tmp_path, "m.yaml", "num_layers: 4\nhiden_size: 3\n"))
    assert (code, facts["kind"]) == (2, "model")
    assert "did you mean 'hidden_size'?" in stderr


def test_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "configs/model/yuan2-2b.yaml"]) == 0
    assert "parameters:               2,088,724,480\n" in capsys.readouterr().out
    assert main(["inspect", str(write(tmp_path, "p.yaml", PLAN))]) == 0
    out = capsys.readouterr().out
    assert (
        "  pipeline 0  stage 1  layers [16, 24]  embedding no  head yes  replicas [[2], [3]]  cards ['T4']"
        in out
    )
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().out == ""
