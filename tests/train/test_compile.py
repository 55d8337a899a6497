"""Training with compiled layers: the curve and the checkpoint of plain ones; what is refused at the start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.project import difference, make_plan, make_project, parse_plan, read_metrics, run_config
from tests.support.ranks import Case, run_alone, run_cases
from yuan_train.cli.main import main
from yuan_train.config.errors import ConfigError
from yuan_train.config.plan_constraints import save_plan
from yuan_train.config.profile import load_profile
from yuan_train.models import transformer
from yuan_train.train.job import Position, check_compiler, compiler_fault, prepare

# See tests/models/test_compiled.py.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

CPU = torch.device("cpu")
FEW = ("train.precision=fp64", "train.steps=3", "optimizer.decay_steps=20", "model.hidden_dropout=0.2")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"), model={"num_layers": 4})


@pytest.fixture(scope="module")
def alone(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_alone(Case(run_file, tmp_path_factory.mktemp("alone"), None, FEW))


@pytest.fixture
def aot_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces and partitions as inductor does, without its code, which takes seconds."""
    monkeypatch.setattr(transformer, "BACKEND", "aot_eager")
    torch.compiler.reset()
    counters.clear()


def test_a_plan_with_compiled_layers_gives_the_curve_of_plain_ones(
    run_file: Path, tmp_path: Path, alone: list[dict]
) -> None:
    """Virtual stages, and owners that share the optimizer state. With selective recompute, which in plain
    layers is done by hooks that see no tensor of a compiled one."""
    overrides = (*FEW, "train.compile=true")
    plan = parse_plan(
        run_config(run_file, *overrides),
        "1x4: 1@0 | 1@1 | 1@0 | 1@1 / 1x4: 4@2",
        schedule="interleaved_1f1b",
        optimizer_sharding=True,
        recompute="selective",
    )
    run_cases([Case(run_file, tmp_path, plan, overrides, without="inductor")])
    for key in ("loss", "grad_norm"):
        assert difference(read_metrics(tmp_path), alone, key) < 1e-11


def test_a_checkpoint_has_the_names_and_values_of_plain_layers(
    run_file: Path, tmp_path: Path, alone: list[dict], aot_eager: None
) -> None:
    """Two steps compiled with full recompute and a validation, the third with plain layers."""
    saving = (*FEW, f"checkpoint.directory={tmp_path / 'ck'}")
    first = (*saving, "train.compile=true", "train.steps=2", "validation.every=2")
    plan = parse_plan(run_config(run_file, *first), "2x4: 4@0 full")
    curve = run_alone(Case(run_file, tmp_path / "first", plan, first))
    # That of the trial before the start, and one for all layers.
    assert counters["stats"]["unique_graphs"] == 2
    curve += run_alone(Case(run_file, tmp_path / "then", None, saving))
    assert len(curve) == 3 and max(difference(curve, alone, key) for key in ("loss", "grad_norm")) < 1e-12


def test_a_profile_of_compiled_layers(run_file: Path, tmp_path: Path, aot_eager: None) -> None:
    """Recomputed in full, a layer keeps its input. Compiled layers are measured unsharded."""
    out = tmp_path / "profile.json"
    words = ["train.compile=true", "search.recompute=[full]"]
    assert main(["profile", "--config", str(run_file), "--seconds", "0.01", "--out", str(out), *words]) == 0
    profile = load_profile(out)
    assert profile.compile
    (entry,) = profile.entries
    assert (entry.tensor_parallel, entry.recompute) == (1, "full")
    # With the rotary tables, and without the 23 hidden states that autograd would save.
    assert entry.layers[0].output_bytes <= entry.layers[0].activation_bytes < 6 * entry.layers[0].output_bytes


def full_disk(graph: object, inputs: object) -> object:
    """A backend that cannot write what it compiles."""
    raise OSError(28, "No space left on device")


def test_a_machine_that_cannot_compile_is_refused_before_the_start(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_config(run_file, "train.compile=true")
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        prepare(run_config(run_file), None, Position())
        with pytest.raises(ConfigError, match="true, but there is no C.. compiler .no-such-compiler.: inst"):
            prepare(run, None, Position())
        assert main(["train", "--config", str(run_file), "train.compile=true"]) == 2
        assert "install g++ (or set CXX); or set train.compile: false" in capsys.readouterr().err
        patch.setenv("CC", "no-such-compiler")
        assert "triton" in (compiler_fault("cuda") or "")
    with monkeypatch.context() as patch:
        patch.setattr(transformer, "BACKEND", full_disk)
        with pytest.raises(ConfigError, match="it fails on this machine .*No space left.*: repair that; or"):
            check_compiler(CPU)
    monkeypatch.setattr(transformer, "BACKEND", "eager")
    check_compiler(CPU)


def test_only_what_is_compiled_needs_a_folder_for_it(run_file: Path, tmp_path: Path) -> None:
    """Torch makes the folder when its compiler is imported, which `launch` does for all ranks."""
    save_plan(tmp_path / "plan.yaml", make_plan(run_config(run_file), [[2, 2]]))
    given = ["--config", str(run_file), "--plan", str(tmp_path / "plan.yaml"), "train.steps=1"]
    cases = ((), 0, "step 1/1"), (("train.compile=true",), 2, "error: train.compile: true, but it fails")
    for more, code, words in cases:
        line = [sys.executable, "-m", "yuan_train", "launch", *given, *more]
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": "/proc/none"}
        ran = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert ran.returncode == code and words in ran.stderr and "Traceback" not in ran.stderr, ran.stderr
