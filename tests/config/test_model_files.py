"""A model by whatever names it, in run files and in `--model`: the same model each time."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from yuan_train.config.errors import ConfigError
from yuan_train.config.load import as_plain, dump, dump_plain
from yuan_train.config.model import ModelConfig, load_model
from yuan_train.config.rl import load_rl
from yuan_train.config.run import RunConfig, load_run
from yuan_train.models.decoder import Publishing, format_of

MODELS = Path("configs/model")
QWEN = replace(load_model(MODELS / "qwen2.5-0.5b.yaml"), num_layers=2, name="small")
RUN = {
    "data": {"train": [{"prefix": "none"}], "sequence_length": 64, "reset_position_ids": False},
    "train": {"steps": 1, "global_batch_size": 2},
    "optimizer": {"learning_rate": 1e-3},
}
RL = {
    "data": {"prompts": [{"file": "p.jsonl"}], "max_prompt_tokens": 8},
    "generation": {"max_new_tokens": 8, "stop_ids": [1]},
    "reward": {"functions": [{"name": "exact"}]},
    "algorithm": {"name": "grpo", "group": 2},
    "train": {"steps": 1, "prompts_per_step": 2},
    "optimizer": {"learning_rate": 1e-3},
}


def write_published(folder: Path, model: ModelConfig) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = format_of(model.architecture).published_config(model, Publishing(dtype="bfloat16"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_checkpoint(folder: Path, model: ModelConfig, step: int = 0) -> Path:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps({"step": step, "run": {"model": as_plain(model)}}))
    return folder


def run_of(tmp_path: Path, *overrides: str, **changes: Any) -> RunConfig:
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(dump_plain({**changes, **RUN}))
    return load_run(folder / "run.yaml", overrides)


def test_each_form_gives_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to the run file, or to the working directory; a name in any case of letters."""
    write_published(tmp_path / "small", QWEN)
    write_checkpoint(tmp_path / "run" / "checkpoints", QWEN)
    (tmp_path / "run" / "small.yaml").write_text(dump(QWEN))
    monkeypatch.chdir(tmp_path)
    names = ["small", "small/config.json", "../small", "small.yaml", "checkpoints"]
    for name in [*names, "checkpoints/step-00000000", "checkpoints/step-00000000/state.json"]:
        assert run_of(tmp_path, model=name).model == QWEN, name
        if name.startswith("small") and name != "small.yaml":
            assert load_model(name) == run_of(tmp_path, f"model={name}").model == QWEN
    by_name = run_of(tmp_path, "model.num_layers=2", model="Qwen2.5-0.5B").model
    assert replace(by_name, name="small") == QWEN


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_published_config_says_all_of_a_model(path: Path, tmp_path: Path) -> None:
    model = load_model(path)
    assert load_model(write_published(tmp_path / model.name, model)) == model


def test_the_model_of_the_checkpoint_to_start_from(tmp_path: Path) -> None:
    """The newest whole one; under another override another one; changes of its keys come after all."""
    other = replace(QWEN, num_layers=3)
    one, two = write_checkpoint(tmp_path / "one", QWEN, 9), write_checkpoint(tmp_path / "two", other)
    torn = one / "step-00000010"
    torn.mkdir()
    (torn / "state.json").write_text("{")
    start = {"checkpoint": str(one)}
    assert run_of(tmp_path, start=start).model == QWEN
    assert run_of(tmp_path, f"start.checkpoint={two}", start=start).model == other
    assert run_of(tmp_path, f"start.checkpoint={two}").model == other
    changed = run_of(tmp_path, "model.hidden_dropout=0.1", f"start.checkpoint={two}", start=start)
    assert changed.model == replace(other, hidden_dropout=0.1)
    # What is said counts, as before; what is not there is not asked for then.
    assert run_of(tmp_path, start={"checkpoint": "nowhere"}, model=as_plain(other)).model == other
    (tmp_path / "rl.yaml").write_text(dump_plain({**RL, "start": start}))
    assert load_rl(tmp_path / "rl.yaml").model == QWEN


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "run.yaml:1: model: .*run/nowhere: no such file or folder; wanted a model file, a name"),
        ("qwen2.5-0.5", r"no such file or folder; did you mean qwen2\.5-0\.5b\?"),
        ("nowhere.yaml", r"run.yaml:1: model: .*run/nowhere\.yaml: no such file$"),
        (
            "Qwen/Qwen2.5-1.5B",
            r"no such folder; a model of the Hub is fetched by: yuan-train import-hf Qwen/Qwen2\.5-1\.5B "
            r"--out runs/Qwen2\.5-1\.5B; then give runs/Qwen2\.5-1\.5B",
        ),
        ("empty", r"empty: a folder with neither a config\.json \(Hugging Face\) nor a checkpoint"),
        ("adapter.json", "adapter.json: a config of adapters; wanted the model that they belong to"),
        ("gemma", "gemma/config.json: model_type 'gemma'; wanted one of llama"),
        ("slip", "slip/config.json: no hidden_size; wanted the sizes of a decoder"),
        ("list/config.json", "config.json: wanted keys and values, got list|model: wanted keys and values"),
    ],
)
def test_what_is_no_model(name: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for inner in ("empty", "gemma", "list"):
        (folder / inner).mkdir(parents=True)
    (folder / "adapter.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "x"}')
    (folder / "gemma" / "config.json").write_text('{"model_type": "gemma", "num_hidden_layers": 2}')
    (folder / "list" / "config.json").write_text("[1]")
    slip = write_published(folder / "slip", QWEN) / "config.json"
    slip.write_text(slip.read_text().replace('"hidden_size"', '"hidden_sise"'))
    with pytest.raises(ConfigError, match=message):
        run_of(tmp_path, model=name)


def test_a_start_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"run.yaml:\d+: start.checkpoint: nowhere: no such directory, so its"
    ):
        run_of(tmp_path, start={"checkpoint": "nowhere"})
    with pytest.raises(ConfigError, match=r"start.checkpoint: .*: there is no checkpoint here, so its model"):
        run_of(tmp_path, start={"checkpoint": str(tmp_path)})
    with pytest.raises(ConfigError, match="model: missing"):
        run_of(tmp_path)


def test_a_run_that_goes_on_needs_its_start_no_more(tmp_path: Path) -> None:
    start, own = {"checkpoint": "nowhere"}, {"directory": str(tmp_path / "own")}
    with pytest.raises(ConfigError, match="start.checkpoint: nowhere: no such directory"):
        run_of(tmp_path, start=start, checkpoint=own)
    write_checkpoint(tmp_path / "own", QWEN, 5)
    assert run_of(tmp_path, start=start, checkpoint=own).model == QWEN
