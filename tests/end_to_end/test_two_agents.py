"""Two agents with unlike numbers of ranks, as on two machines with unlike numbers of cards."""

import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end.test_endings import on_a_full_card
from tests.rl.test_apart import roles_of
from tests.support.networks import Host, entered, three_hosts
from tests.support.project import make_project, on_devices, parse_plan, read_metrics, run_config
from tests.support.ranks import Case, run_alone
from tests.support.rl import write_rl
from tests.support.spawn import Around, Command, free_port, patience, process_of, start_command, wait_for_step
from tests.support.supervised import words
from yuan_train.config.errors import INTERRUPTED
from yuan_train.config.plan_constraints import save_plan
from yuan_train.config.rl_plan import save_rl_plan
from yuan_train.parallel import board

STEPS = 3
SECONDS = 10.0
HERE = Host((), {"MASTER_ADDR": "127.0.0.1"})
CUTS = {(2, 1): "1x8: 2@0 | 2@1 | 2@2", (1, 2): "1x4: 3@0 | 3@1 / 2x2: 6@2"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its losses in one process, and a plan for each pair of agents, whose nodes are a and b."""
    folder = tmp_path_factory.mktemp("project")
    run_file = make_project(folder)
    for (first, second), text in CUTS.items():
        plan = parse_plan(run_config(run_file), text)
        devices = [f"a/{i}" for i in range(first)] + [f"b/{i}" for i in range(second)]
        save_plan(folder / f"plan-{first}-{second}.yaml", on_devices(plan, *devices))
    run_alone(Case(run_file, folder / "alone", overrides=words(STEPS)))
    return folder


@contextmanager
def running(agents: list[Command]) -> Iterator[list[Command]]:
    """Inside, agents run; each is ended at the end, and ends its ranks."""
    try:
        yield agents
    finally:
        for agent in agents:
            agent.process.terminate()
        for agent in agents:
            agent.wait(within_seconds=60)


@contextmanager
def started(
    lines: Sequence[Sequence[str]], logs: Path, arounds: Sequence[Around | None] = (None, None)
) -> Iterator[list[Command]]:
    """A `yuan-train` for each line, whose output goes to `logs`, and what is around it on its host."""
    environment = {"OMP_NUM_THREADS": "1", **HERE.environment}
    agents: list[Command] = []
    with running(agents):
        for number, (line, around) in enumerate(zip(lines, arounds, strict=True)):
            log = logs / f"agent-{number}"
            agents.append(start_command(line, log, stdout=log, environment=environment, around=around))
        yield agents


@contextmanager
def started_anew(lines: Sequence[Sequence[str]], logs: Path) -> Iterator[list[Command]]:
    """A new interpreter for the module of each line: it takes seconds until it has imported torch."""
    agents: list[Command] = []
    with running(agents):
        for number, line in enumerate(lines):
            words = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", *line]
            log = logs / f"agent-{number}"
            agents.append(Command(process_of(f"exec {shlex.join(words)} >{shlex.quote(str(log))} 2>&1"), log))
        yield agents


def wait_for_steps(log: Path, agents: Sequence[Command], steps: int = 2) -> None:
    wait_for_step(log, steps, lambda: all(agent.process.is_alive() for agent in agents))


def ends(agents: Sequence[Command], *, within_seconds: float) -> tuple[list[int], list[str]]:
    """Exit codes, and what each has said."""
    began = time.monotonic()
    codes, said = zip(*(agent.wait(within_seconds=within_seconds) for agent in agents), strict=True)
    # The whole of them, and not each after the other.
    assert time.monotonic() - began < patience(within_seconds)
    return list(codes), list(said)


def check_losses(project: Path, log: Path) -> None:
    alone, together = read_metrics(project / "alone"), read_metrics(log)
    for found, wanted in zip(together[:STEPS], alone, strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)


def children(agent: Command) -> list[int]:
    pid = agent.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@contextmanager
def on_loopback() -> Iterator[list[Host]]:
    yield [HERE, HERE]


def launch_lines(project: Path, log: Path, meeting: str) -> list[list[str]]:
    """Two ranks and one, without an end."""
    files = ("--config", str(project / "run.yaml"), "--plan", str(project / "plan-2-1.yaml"))
    line = ["launch", *files, "--rendezvous", meeting, f"log.directory={log}", *words(100000)]
    return [[*line, "--this-node", node] for node in "ab"]


@pytest.mark.parametrize("network", [on_loopback, pytest.param(three_hosts, marks=pytest.mark.slow)])
def test_launch_on_two_nodes_trains_as_one_process_and_ends_as_one(
    project: Path, tmp_path: Path, network
) -> None:
    """Two ranks and one. Then the one is killed: both agents end in time, and both say whose end it was."""
    with network() as hosts:
        meeting = f"{hosts[0].environment['MASTER_ADDR']}:{free_port()}"
        arounds = [partial(entered, host) if host.prefix else None for host in hosts[:2]]
        with started(launch_lines(project, tmp_path, meeting), tmp_path, arounds) as agents:
            wait_for_steps(tmp_path, agents, STEPS)
            check_losses(project, tmp_path)
            os.kill(children(agents[1])[0], signal.SIGKILL)
            codes, (first, second) = ends(agents, within_seconds=SECONDS)
    assert codes == [1, 1]
    assert "error: the run ends: rank 2 (b/0 on" in first and "does not answer: killed" in first
    assert "error: rank 2 was killed by SIGKILL" in second
    assert "c10::" not in first + second and "Traceback" not in first + second


def torchrun_lines(project: Path, log: Path) -> list[list[str]]:
    """One rank and two, without an end, in two unlike pipelines of which one lies on both nodes."""
    files = ("--config", str(project / "run.yaml"), "--plan", str(project / "plan-1-2.yaml"))
    train = ["-m", "yuan_train", "train", *files, f"log.directory={log}", *words(100000)]
    port = free_port()
    return [
        ["torch.distributed.run", "--nnodes=2", f"--node-rank={n}", f"--nproc-per-node={ranks}"]
        + ["--master-addr=127.0.0.1", f"--master-port={port}", *train]
        for n, ranks in enumerate((1, 2))
    ]


def test_torchrun_on_two_nodes_trains_as_one_process_and_names_the_agent_that_ends(
    project: Path, tmp_path: Path
) -> None:
    """With it ends the ranks' board, before that tells of its only rank: as torchrun does when that ends."""
    with started_anew(torchrun_lines(project, tmp_path), tmp_path) as agents:
        wait_for_steps(tmp_path, agents, STEPS)
        check_losses(project, tmp_path)
        (rank,) = children(agents[0])
        agents[0].process.kill()
        os.kill(rank, signal.SIGKILL)
        codes, (_, said) = ends(agents, within_seconds=SECONDS)
    assert codes == [-signal.SIGKILL, 1]
    assert said.count("error: the run ends: torchrun's agent on 127.0.0.1 with rank 0 (a/0 on ") == 2, said
    assert "c10::" not in said


def test_ctrl_c_of_one_launcher_ends_both_and_is_told(project: Path, tmp_path: Path) -> None:
    """No terminal interrupts its ranks here, which could tell the others: it does."""
    lines = launch_lines(project, tmp_path, f"127.0.0.1:{free_port()}")
    with started(lines, tmp_path) as agents:
        wait_for_steps(tmp_path, agents)
        assert agents[0].process.pid is not None
        os.kill(agents[0].process.pid, signal.SIGINT)
        # A rank whose interpreter ends by itself joins threads of gloo, which wait for those that are gone.
        codes, (first, second) = ends(agents, within_seconds=SECONDS)
    assert codes == [INTERRUPTED, INTERRUPTED]
    assert re.search(r"error: the run ends: rank [01] \(a/[01] on .*\): interrupted", second), second
    assert "interrupted" in first and "Traceback" not in first + second


def test_a_stopped_rank_is_ended_by_its_launcher(project: Path, tmp_path: Path) -> None:
    """The only one of its node, which hears of nothing; within 10 s of the time-out. Who waits for it says so
    before that."""
    lines = launch_lines(project, tmp_path, f"127.0.0.1:{free_port()}")
    with started([[*line, "train.timeout=4 s"] for line in lines], tmp_path) as agents:
        wait_for_steps(tmp_path, agents)
        stopped = children(agents[1])[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            codes, (first, second) = ends(agents, within_seconds=4 + SECONDS)
        finally:
            if agents[1].process.is_alive():
                os.kill(stopped, signal.SIGKILL)
    assert codes == [1, 1]
    assert "error: the run ends: rank 2 (b/0 on" in first, first
    assert "error: rank 2 was stopped by a signal" in second, second
    assert re.search(r"step \d+: rank 0 \(pipeline 0, stage 0\) has waited \d s in the \w+", first), first
    assert "Traceback" not in first + second


def test_memory_that_runs_out_on_one_node_ends_both_launchers(project: Path, tmp_path: Path) -> None:
    """On a fake card, which the second node's rank gets from its launcher."""
    lines = launch_lines(project, tmp_path, f"127.0.0.1:{free_port()}")
    with started(lines, tmp_path, [None, on_a_full_card]) as agents:
        agents[1].wait(within_seconds=120)
        codes, (first, second) = ends(agents, within_seconds=SECONDS)
    assert codes == [1, 1], first + second
    assert re.search(r"error: the run ends: rank 2 \(b/0 on .*\): step 3: .*out of memory in", first), first
    where = r"out of memory in the [\w ]+ of micro-batch \d"
    assert re.search(rf"error: step 3: rank 2 \(pipeline 0, stage 2\).*{where}", second), second
    # Who has lost a rank that ended for the same reason does not blame that one.
    assert "is gone" not in first + second and "largest free block" in first and "largest free" in second


def test_roles_of_a_run_on_two_nodes_end_together(tmp_path: Path) -> None:
    """The policy's two ranks on one node, an engine on the other, which is killed."""
    path, log = write_rl(tmp_path), tmp_path / "log"
    roles = roles_of(path, staleness=1, policy="2x4: 2@0 | 2@1", engines="8x1: 4@0")
    save_rl_plan(tmp_path / "plan.yaml", roles)
    line = ["launch", "--config", str(path), "--plan", str(tmp_path / "plan.yaml")]
    line += ["--rendezvous", f"127.0.0.1:{free_port()}", "train.steps=100000", f"log.directory={log}"]
    lines = [[*line, "--this-node", node] for node in "pg"]
    with started(lines, tmp_path) as agents:
        wait_for_steps(log, agents)
        os.kill(children(agents[1])[0], signal.SIGKILL)
        codes, (first, second) = ends(agents, within_seconds=SECONDS)
    assert codes == [1, 1]
    assert "error: the run ends: rank 2 (generation rank 0 on " in first, first
    assert "error: rank 2 was killed by SIGKILL" in second


def test_a_missing_tokenizer_is_named_though_the_other_node_never_comes(
    project: Path, tmp_path: Path
) -> None:
    """Rank 2, the only one of the second node, at a meeting point where nobody is."""
    environment = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    files = ("--config", project / "run.yaml", "--plan", project / "plan-2-1.yaml")
    log = tmp_path / "stderr"
    # What the server of processes imports first is no part of it.
    assert start_command(["--version"], log, environment={}).wait(within_seconds=60) == (0, "")
    began = time.monotonic()
    rank = start_command(["train", *files, "data.tokenizer=nowhere"], log, environment=environment)
    try:
        while "nowhere: no tokenizer" not in (log.read_text() if log.exists() else ""):
            assert time.monotonic() - began < patience(5)
            time.sleep(0.02)
        code, said = rank.wait(within_seconds=10)
    finally:
        rank.kill()
    assert code == 2 and said.count("no tokenizer") == 1 and len(said.splitlines()) == 1, said


def start(project: Path, meeting: str, node: str, *more: str, plan: Path | None = None) -> list[str]:
    files = ("--config", str(project / "run.yaml"), "--plan", str(plan or project / "plan-2-1.yaml"))
    return ["launch", *files, "--rendezvous", meeting, "--this-node", node, *words(9), *more]


@pytest.mark.parametrize("wrong", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_typo_on_one_node_ends_the_other(project: Path, tmp_path: Path, wrong: int) -> None:
    """Its launcher starts no rank, and tells those of the other, who would wait for train.startup_timeout."""
    meeting = f"127.0.0.1:{free_port()}"
    lines = [
        start(project, meeting, node, *["trian.steps=3"][: number == wrong])
        for number, node in enumerate("ab")
    ]
    with started(lines, tmp_path) as agents:
        agents[wrong].wait(within_seconds=120)
        codes, said = ends(agents, within_seconds=SECONDS)
    assert codes == [2, 2], said
    assert re.match("error: .*unknown key 'trian'", said[wrong]) and said[wrong].count("trian:") == 1
    pattern = rf"error: the run ends: launch of {'ab'[wrong]} on .*: unknown key 'trian'"
    # Whoever has only heard it tells it to nobody: the other's launcher ends with its ranks, at once.
    assert re.search(pattern, said[1 - wrong]) and said[1 - wrong].count("the run ends") == 1, said


CLUSTER = """
name: two
nodes:
  - {name: a, device: core, devices: 2, link: {bandwidth: 2 GB/s, latency: 50 us},
    network: {bandwidth: 1 GB/s, latency: 100 us}}
  - {name: b, device: core, network: {bandwidth: 1 GB/s, latency: 100 us}}
device_types:
  core: {memory: 4 GiB, fp32: 50 GFLOP/s, bf16: 50 GFLOP/s, fp16: 50 GFLOP/s, memory_bandwidth: 10 GB/s,
    host_link: 5 GB/s, slowdown: 1}
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["profile", "serve"])
def test_a_wrong_option_on_one_node_ends_the_other(project: Path, tmp_path: Path, name: str) -> None:
    """As a typo does under `launch`: the other commands that start a node's ranks."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    if name == "profile":
        own = ["--config", str(project / "run.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]
        own, wrong, said_of_it = [*own, "--out", str(tmp_path / "p.json")], ["--seconds", "0"], "--seconds 0"
    else:
        saved = ("checkpoint.every=1", f"checkpoint.directory={tmp_path / 'saved'}")
        run_alone(Case(project / "run.yaml", tmp_path / "alone", overrides=(*words(1), *saved)))
        own = ["--checkpoint", str(tmp_path / "saved"), "--plan", str(project / "plan-2-1.yaml")]
        own, wrong, said_of_it = [*own, "--port", "0", "--device", "cpu"], ["--slots", "0"], "--slots: 0"
    meeting = f"127.0.0.1:{free_port()}"
    lines = [
        [name, *own, "--rendezvous", meeting, "--this-node", node, *(wrong if node == "b" else [])]
        for node in "ab"
    ]
    with started(lines, tmp_path) as agents:
        codes, said = ends(agents, within_seconds=120)
    assert codes == [2, 2], said
    assert said[1].startswith(f"error: {said_of_it}"), said
    assert re.search(rf"error: the run ends: launch of b on .*: {said_of_it}", said[0]), said


def test_a_missing_plan_on_the_first_node_ends_the_other(project: Path, tmp_path: Path) -> None:
    """Its launcher does not know that it is the first one."""
    meeting = f"127.0.0.1:{free_port()}"
    lines = [start(project, meeting, "a", plan=tmp_path / "nowhere.yaml"), start(project, meeting, "b")]
    with started(lines, tmp_path) as agents:
        codes, said = ends(agents, within_seconds=120)
    assert codes == [2, 2], said
    assert re.search(r"error: the run ends: launch of .*nowhere.yaml: no such file", said[1]), said


@contextmanager
def impatient() -> Iterator[None]:
    """What is at a port has a second to answer."""
    board.ANSWER_SECONDS = 1.0
    yield


def test_a_port_in_use_on_the_first_node_ends_both(project: Path, tmp_path: Path) -> None:
    """At once where it is seen; on the other node it is greeted, and says nothing."""
    port = free_port()
    lines = [start(project, f"127.0.0.1:{port}", node) for node in "ab"]
    arounds = [impatient, impatient]
    with socket.create_server(("127.0.0.1", port)), started(lines, tmp_path, arounds) as agents:
        codes, said = ends(agents, within_seconds=120)
    assert codes == [2, 2], said
    assert f"error: port {port} of this machine cannot be had" in said[0]
    assert f"error: what answers at 127.0.0.1:{port} is not rank 0" in said[1]


def test_sigterm_of_one_rank_stops_both_nodes_and_is_told(project: Path, tmp_path: Path) -> None:
    lines = launch_lines(project, tmp_path, f"127.0.0.1:{free_port()}")
    with started(lines, tmp_path) as agents:
        wait_for_steps(tmp_path, agents)
        os.kill(children(agents[1])[0], signal.SIGTERM)
        codes, told = ends(agents, within_seconds=60)
    assert codes == [0, 0]
    for said in told:
        assert re.search(r"note: the run has stopped: rank 2 \(b/0 on .*\): got SIGTERM", said), said


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_rank_that_ends_before_it_has_met_the_others_is_told_by_its_launcher(
    project: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """While it reads its files: nobody knows of it yet."""
    meeting = f"127.0.0.1:{free_port()}"
    lines = [start(project, meeting, node) for node in "ab"]
    with started(lines, tmp_path) as agents:
        # Not before it is a program of its own: what came of a signal earlier would be the launcher's matter.
        while not any(b"yuan_train\0train" in command_line(pid) for pid in children(agents[1])):
            time.sleep(0.01)
        os.kill(children(agents[1])[0], number)
        codes, said = ends(agents, within_seconds=120)
    assert codes == [1, 1], said
    assert re.search(rf"error: the run ends: rank 2 \(b on .*\): was killed by {number.name}", said[0]), said
    assert "Traceback" not in said[0] + said[1]
