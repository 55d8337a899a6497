"""What a rank's environment gets from `launch`, or under torchrun, and what of the user's stays."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import Refuse
from tests.support.project import make_plan, on_devices, run_config
from yuan_train.cli.main import main
from yuan_train.config.plan import Node
from yuan_train.config.plan_constraints import save_plan
from yuan_train.parallel.environment import DEFAULTS, rank_defaults
from yuan_train.supervise import launched

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
RUN = Path(__file__).parents[2] / "configs" / "run" / "tiny.yaml"


@pytest.mark.parametrize(
    ("given", "local_ranks", "threads"),
    [
        ({}, 4, "4"),
        ({}, 32, "1"),
        # torch's own default, which knows the cores that this process may use
        ({}, 1, None),
        ({"OMP_NUM_THREADS": "3"}, 4, None),
        ({"OMP_NUM_THREADS": "1"}, 4, None),
        # torchrun sets 1 for several ranks, if the user has set nothing
        (TORCHRUN, 4, "4"),
        (TORCHRUN, 1, None),
        (TORCHRUN | {"OMP_NUM_THREADS": "2"}, 4, None),
        (TORCHRUN | {"YUAN_THREADS": "1"}, 4, "1"),
    ],
)
def test_threads(given: dict[str, str], local_ranks: int, threads: str | None) -> None:
    assert rank_defaults(given, local_ranks=local_ranks, num_cores=16).get("OMP_NUM_THREADS") == threads


def test_cuda_defaults_leave_what_the_user_has_set() -> None:
    found = rank_defaults({}, local_ranks=1, num_cores=1)
    assert found == {
        "CUDA_MODULE_LOADING": "EAGER",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "RES_OPTIONS": "timeout:1 attempts:2",
    }
    for names, _ in DEFAULTS:
        for name in names:
            assert rank_defaults({name: "own"}, local_ranks=1, num_cores=1).keys() == found.keys() - {
                names[0]
            }


LOOK = """
import os, sys
from yuan_train.parallel import environment
from yuan_train.cli.main import main
environment.count_cores = lambda: 8
code = main(["train", "--config", "nowhere.yaml"])
print(code, "torch" in sys.modules, *(os.environ[k] for k in ("OMP_NUM_THREADS", "CUDA_MODULE_LOADING")))
"""


def test_a_rank_under_torchrun_sets_them_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    ran = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["2", "False", "4", "EAGER"], ran.stderr


def test_launch_gives_them_to_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    monkeypatch.setattr(launched, "count_cores", lambda: 9)
    node = Node("all", (0, 1))
    given = launched._environment(node, 1, 1, 2, "127.0.0.1", 1)  # pyright: ignore[reportPrivateUsage]
    assert given["OMP_NUM_THREADS"] == "4" and given["CUDA_MODULE_LOADING"] == "LAZY"
    assert given["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True" and given["RANK"] == "1"


def test_a_meeting_point_that_is_no_host_name_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, refuse: Refuse
) -> None:
    made = make_plan(run_config(RUN), [[2, 4]])
    save_plan(tmp_path / "plan.yaml", on_devices(made, "nowhere0.invalid/0", "nowhere1.invalid/0"))
    words = ["launch", "--config", str(RUN), "--plan", str(tmp_path / "plan.yaml"), "train.device=cpu"]
    for more in (
        ["--this-node", "nowhere1.invalid"],
        ["--this-node", "all", "--rendezvous", "nowhere0.invalid"],
    ):
        errors = refuse(*words, *more)
        assert "'nowhere0.invalid' is no host name here" in errors and "--rendezvous HOST" in errors
    assert main([*words, "--print"]) == 0
    assert "note: 'nowhere0.invalid' is no host name on this machine" in caplog.text
    caplog.clear()
    assert main([*words, "--print", "--rendezvous", "127.0.0.1"]) == 0
    assert not caplog.text and len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize("option", ["--rendezvous", "--meet-at"])
def test_the_printed_lines_name_the_rendezvous(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    save_plan(tmp_path / "plan.yaml", make_plan(run_config(RUN), [[2, 4]]))
    words = ["launch", "--print", "--config", str(RUN), "--plan", str(tmp_path / "plan.yaml")]
    assert main([*words, option, "alpha:777"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert lines and all(line[0] == "torchrun" for line in lines)
    assert all({"--master-addr=alpha", "--master-port=777"} <= set(line) for line in lines)
    warned = "--meet-at is now called --rendezvous" in caplog.text
    assert warned == (option == "--meet-at")
