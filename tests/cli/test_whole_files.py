"""The whole files of docs/launch.md: run with stand-ins for other programs, or read as those read them."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from yuan_train.cli.main import command_parser

PAGE = (Path(__file__).parents[2] / "docs" / "launch.md").read_text().partition("## Whole files")[2]


def block(kind: str) -> str:
    found = re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found.group(1)


def parse(words: list[str]) -> Any:
    """What the command line takes; the program's name first. Ends the test if it does not."""
    assert Path(words[0]).name == "yuan-train"
    program, _ = command_parser(words[1])
    return program.parse_args(words[1:])


@pytest.mark.parametrize("ends", ["by itself", "in time", "with a fault"])
def test_a_job_of_slurm_is_queued_again_when_its_time_is_over(tmp_path: Path, ends: str) -> None:
    """And only then: neither behind the last step, nor behind a fault, whose exit code is the job's."""
    (tmp_path / "job").write_text(block("bash"))
    waits = {"by itself": "exit 0", "in time": "sleep 60 & wait", "with a fault": "exit 2"}[ends]
    trap = "trap 'echo \"saved\" >>calls; exit 0' TERM\n"
    for name, body in {
        "yuan-train": f'echo "$*" >>calls\n{trap}{waits}',
        "scontrol": 'echo "$*" >>calls',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", "job"], cwd=tmp_path, env=variables, start_new_session=True) as job:
        try:
            until = time.monotonic() + 30
            while not (tmp_path / "calls").exists() and time.monotonic() < until:
                time.sleep(0.02)
            if ends == "in time":
                time.sleep(0.3)
                job.send_signal(signal.SIGTERM)
            assert job.wait(timeout=30) == (2 if ends == "with a fault" else 0)
        finally:
            os.killpg(job.pid, signal.SIGKILL) if job.poll() is None else None
    calls = (tmp_path / "calls").read_text().splitlines()
    given = parse(["yuan-train", *shlex.split(calls[0])])
    assert given.slurm and given.plan == "plan.yaml"
    assert calls[1:] == (["saved", "requeue 7"] if ends == "in time" else [])


def test_the_pods_of_kubernetes_are_agents_of_the_nodes() -> None:
    service, *jobs = yaml.safe_load_all(block("yaml"))
    assert service["kind"] == "Service" and service["spec"]["clusterIP"] == "None"
    nodes: list[str] = []
    for job in jobs:
        spec = job["spec"]
        assert (job["kind"], spec["completionMode"]) == ("Job", "Indexed")
        assert spec["completions"] == spec["parallelism"]
        names = [f"{job['metadata']['name']}-{n}" for n in range(spec["completions"])]
        nodes += names
        pod = spec["template"]["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert pod["subdomain"] == service["metadata"]["name"] and pod["terminationGracePeriodSeconds"] >= 60
        (agent,) = pod["containers"]
        (line,) = agent["args"]
        given = parse(shlex.split(line.replace("$(hostname)", names[0]))[1:])
        assert given.this_node == names[0]
        host, _, port = given.meet.partition(":")
        assert host == f"big-0.{service['metadata']['name']}" and port.isdigit()
        mounted = {one["name"]: one["mountPath"] for one in agent["volumeMounts"]}
        assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
        assert mounted["memory"] == "/dev/shm" and mounted["run"] == agent["workingDir"]
    assert f"`{nodes[0]}`, `{nodes[1]}` and `{nodes[2]}`" in PAGE and len(nodes) == 3


def test_the_service_of_one_machine_starts_a_command_that_is_there() -> None:
    lines = dict(line.split("=", 1) for line in block("ini").splitlines() if "=" in line)
    given = parse(shlex.split(lines["ExecStart"].replace("%h", "/home/you")))
    assert (given.cluster, given.config) == ("cluster.yaml", "run.yaml")
    assert int(lines["TimeoutStopSec"]) >= 60
    # Wrong input is not tried again.
    assert lines["RestartPreventExitStatus"] == "2"
