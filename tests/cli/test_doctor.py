"""`doctor`: what it finds on this machine, and on simulated ones."""

import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.fake_card import FakeCard
from tests.support.project import make_plan, on_devices, run_config
from yuan_train.cli import doctor
from yuan_train.cli.main import main
from yuan_train.config.plan_constraints import save_plan

RUN = Path(__file__).parents[2] / "configs" / "run" / "tiny.yaml"


def examined(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["doctor", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def test_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    facts = examined(capsys)
    keys = "summary findings driver nccl no_card surroundings tools versions packages communication cuda "
    keys += "devices host ops fp32_products bf16_products compile megatron"
    assert set(facts) == set(keys.split())
    assert facts["versions"]["torch"] and facts["versions"]["python"]
    assert [p["name"] for p in facts["packages"]] == [p.name for p in doctor.PACKAGES]
    assert all(p["installed"] or p["note"] for p in facts["packages"])
    assert facts["devices"][0]["device"] == "cpu" and facts["communication"]["gloo"]
    ops = [op for op in facts["ops"] if op["device"] == "cpu"]
    assert {op["op"] for op in ops} >= {"localized_filter", "rms_norm", "linear_cross_entropy"}
    assert all(op["implementation"] and op["reason"] for op in ops)
    assert facts["host"].keys() == {"available_bytes", "memlock_bytes", "numa_nodes"}
    assert facts["fp32_products"] in ("oneDNN", "torch")
    assert facts["bf16_products"] in ("oneDNN", "fp32 blocks")


def test_what_the_second_engine_would_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages are known by the very kernel: PyPI's apex is another project."""

    def found() -> dict[str, Any]:
        return examined(capsys)["megatron"]

    assert found()["tested_versions"] and found()["optimizer_step"] == "torch's AdamW"
    for module, expected in (
        ("apex.optimizers", "apex's FusedAdam"),
        ("transformer_engine.pytorch.optimizers", "TransformerEngine's FusedAdam"),
    ):
        install(monkeypatch, module.partition(".")[0])
        assert found()["optimizer_step"] != expected
        install(monkeypatch, module, FusedAdam=object)
        assert found()["optimizer_step"] == expected
    monkeypatch.setattr(doctor, "_version", lambda name: "0.16.1")
    assert main(["doctor", "--verbose"]) == 0
    text = capsys.readouterr().out.partition("engine: megatron\n")[2]
    assert "megatron-core 0.16.1; tested with 0.16.1" in text
    assert "optimizer step: TransformerEngine's FusedAdam" in text
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert main(["doctor", "--verbose"]) == 0
    words = "pip install -e '.[megatron]' in the checkout"
    assert words in capsys.readouterr().out.partition("engine: megatron\n")[2]


def test_as_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With a run over two nodes: its checkpoint directory, which does not exist yet."""
    save_plan(tmp_path / "plan.yaml", on_devices(make_plan(run_config(RUN), [[2, 4]]), "a/0", "b/0"))
    run = dict(yaml.safe_load(RUN.read_text()), model=str(RUN.parent / "../model/tiny.yaml"))
    run["checkpoint"]["directory"] = str(tmp_path / "new" / "ck")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    files = ["--config", str(tmp_path / "run.yaml"), "--plan", str(tmp_path / "plan.yaml")]
    assert main(["doctor", "--verbose", *files]) == 0
    printed = capsys.readouterr().out
    for word in ("versions", "optional packages", "devices", "ops", "localized_filter", "communication"):
        assert word in printed
    assert "must be one directory that all nodes mount" in printed
    assert f"{tmp_path / 'new' / 'ck'}: writable here" in printed
    assert "the plan's nodes share it: a, b" in printed
    assert not (tmp_path / "new").exists()
    # In the way of the directory is a file.
    (tmp_path / "new").write_text("")
    facts = doctor._checkpoint_facts(*files[1::2])  # pyright: ignore[reportPrivateUsage]
    (_, here, _) = doctor._shared_lines(facts)  # pyright: ignore[reportPrivateUsage]
    assert "NOT WRITABLE" in here
    assert main(["doctor", *files[2:]]) == 2


def test_the_file_system_of_a_path(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/vda / ext4 rw 0 0\nserver:/x /data nfs4 rw 0 0\ntmpfs /data/a\\040b tmpfs rw 0 0\n"
    )
    kinds = {"/data/run/ck": "nfs4", "/database": "ext4", "/data/a b/c": "tmpfs", "/data": "nfs4"}
    for path, kind in kinds.items():
        assert doctor._file_system(Path(path), mounts) == kind  # pyright: ignore[reportPrivateUsage]
    assert doctor._file_system(tmp_path, tmp_path / "none") is None  # pyright: ignore[reportPrivateUsage]


def test_an_override_of_the_implementation_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YUAN_KERNELS", "reference")
    assert {op["implementation"] for op in examined(capsys)["ops"]} == {"reference"}


def package(name: str) -> dict[str, Any]:
    return next(doctor._package_facts(p) for p in doctor.PACKAGES if p.name == name)


def install(monkeypatch: pytest.MonkeyPatch, module: str, **attributes: object) -> None:
    """Replace whatever is installed by a module and its parent packages."""
    names = module.split(".")
    for depth in range(1, len(names) + 1):
        name = ".".join(names[:depth])
        made = types.ModuleType(name)
        made.__spec__ = ModuleSpec(name, None, is_package=True)
        made.__path__ = []
        monkeypatch.setitem(sys.modules, name, made)
    for name, value in attributes.items():
        setattr(sys.modules[module], name, value)


def test_nvidias_apex_is_recognised_by_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "apex")
    found = package("apex")
    assert found["installed"] is False and "PyPI's is another project" in found["note"]
    install(monkeypatch, "apex.normalization.fused_layer_norm", fused_rms_norm_affine=object)
    assert package("apex")["installed"] is True


def test_a_package_that_breaks_on_import_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(name: str) -> types.ModuleType:
        raise OSError("libcudart.so.11: cannot open shared object file")

    install(monkeypatch, "transformer_engine")
    monkeypatch.setattr(doctor.importlib, "import_module", explode)
    assert package("TransformerEngine")["installed"] is False


def test_a_card_without_bf16_is_detected() -> None:
    card = doctor._card(FakeCard(name="Tesla V100", capability=(7, 0), memory=32 << 30))
    assert (card["bf16"], card["capability"], card["memory_bytes"]) == (False, "7.0", 32 << 30)
    assert "fp16" in card["note"]


def test_the_disk_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "not" / "there"
    found = doctor.disk_facts(str(missing))
    assert found["fault"] is None and found["free_bytes"] > 0 and found["is_direct"] in (True, False)
    assert not list(tmp_path.iterdir()) and "room can be reserved" in doctor.disk_line(found)
    assert "takes memory" in doctor.disk_line(found | {"is_direct": False})
    assert "is not set" in doctor.disk_line(doctor.disk_facts(None))

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    words = doctor.disk_line(doctor.disk_facts(str(tmp_path)))
    assert words.startswith("NOT USABLE") and "No space left" in words
