"""The mixed testbed: bad input, quotas, and where the machine can have one, nodes made and removed."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import pytest

from tools.bench import testbed
from tools.bench.harness import CASES, combinations, measure_here
from tools.testbed.nodes import (
    MOUNTS,
    PERIOD_US,
    NodeSpec,
    NoTestbed,
    Quotas,
    Task,
    find_cores,
    find_quotas,
    load_nodes,
    make_nodes,
    place_on_cores,
    run_together,
)
from yuan_train.cli.plan import problem_of
from yuan_train.config.errors import ConfigError, TrainingError
from yuan_train.config.plan import ScheduleName
from yuan_train.config.run import load_run
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan

ROOT = Path(__file__).parents[1]
CORES = len(find_cores()) if sys.platform == "linux" else 0
linux = pytest.mark.skipif(sys.platform != "linux", reason="a testbed needs Linux")
SPECS = (NodeSpec(name="one", cpu=0.2, network=40e6 / 8), NodeSpec(name="two", cpu=0.2, network=1e9 / 8))
MEGABYTES = 2

RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
link = server.accept()[0]
first, count = link.recv(1 << 16), 0
began = time.perf_counter()
while data := link.recv(1 << 16):
    count += len(data)
print(count / (time.perf_counter() - began))
"""
SEND = """
import socket, sys, time
for _ in range(600):
    try:
        link = socket.create_connection((sys.argv[1], 5000))
        break
    except OSError:
        time.sleep(0.1)
link.sendall(bytes(int(sys.argv[2])))
"""
BURN = """
import time
began = time.perf_counter()
while time.process_time() < 0.3:
    pass
print(time.process_time() / (time.perf_counter() - began))
"""


def write_nodes(folder: Path, *lines: str) -> Path:
    path = folder / "nodes.yaml"
    path.write_text("nodes:\n" + "".join(f"  - {{{line}}}\n" for line in lines))
    return path


@pytest.mark.skipif(CORES < 2, reason="the shipped nodes take two cores")
def test_the_shipped_nodes_load() -> None:
    names = [node.name for node in load_nodes(ROOT / "tools" / "testbed" / "nodes.yaml")]
    assert names == ["full", "half", "quarter"]


def test_cuts_over_shared_network_cards() -> None:
    """Each is a lawful plan whose two sums cross the nodes' NICs; without a profile, so none is measured."""
    cluster, config = testbed.make_cluster(12.5e6, (4.0, 6.0)), load_run(testbed.CONFIG, testbed.CHANGES)
    costs = make_costs(problem_of(config, cluster, None))
    for cut in testbed.CUTS:
        plan = testbed.plan_of(costs, config, cut)
        assert plan.schedule == cut.schedule and plan.pipelines[-1].stages[-1].layers[1] == 8
        exposed = cost_plan(costs, plan).grad_reduce_seconds
        assert (exposed > 1.0) == (len(cut.pipelines) > 1)
    assert {cut.schedule for cut in testbed.CUTS} == set(get_args(ScheduleName))


@linux
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["name: a, cpu: 1, network: 1 Gb/s"] * 2, "there is a node 'a' already"),
        (["name: a, cpus: 0.5, network: 1 Gb/s"], "unknown key 'cpus'; did you mean 'cpu'"),
        (["name: a, cpu: 1.5, network: 1 Gb/s"], "nodes.0..cpu"),
        (["name: a, cpu: 0, network: 1 Gb/s"], "nodes.0..cpu"),
        (["name: a, cpu: 0.5, network: 0 Gb/s"], "nodes.0..network"),
        (["name: a/b, cpu: 0.5, network: 1 Gb/s"], "letters, digits and '-'"),
        ([f"name: n{i}, cpu: 1, network: 1 Gb/s" for i in range(CORES + 1)], f"do not fit on {CORES} cores"),
        ([], "nodes"),
    ],
)
def test_bad_nodes_are_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_nodes(write_nodes(tmp_path, *lines))


def test_each_share_gets_room_on_one_core() -> None:
    assert place_on_cores([0.25, 1.0, 0.5], [4, 5]) == [5, 4, 5]
    assert place_on_cores([0.1] * 10, [0]) == [0] * 10
    assert place_on_cores([0.7, 0.7, 0.6], [0, 1]) is None


def test_quotas_of_both_versions(tmp_path: Path) -> None:
    old, new = tmp_path / "cpu", tmp_path / "unified"
    for folder in (old, new):
        folder.mkdir()
    (new / "cgroup.controllers").write_text("cpuset cpu io")
    (new / "cgroup.subtree_control").write_text("memory")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"cgroup {old} cgroup rw,cpu,cpuacct 0 0\n")
    assert find_quotas(mounts) == Quotas(old, 1)
    mounts.write_text(f"cgroup {old} cgroup rw,memory 0 0\ncgroup2 {new} cgroup2 rw 0 0\n")
    quotas = find_quotas(mounts)
    assert quotas == Quotas(new, 2)
    with ExitStack() as made:
        quotas.open(made)
        assert (new / "cgroup.subtree_control").read_text() == "+cpu"
    assert (new / "cgroup.subtree_control").read_text() == "-cpu"
    for each, name in ((Quotas(old, 1), "cpu.cfs_quota_us"), (Quotas(new, 2), "cpu.max")):
        with ExitStack() as made:
            group = each.add("node", 0.25, made)
            made.pop_all()  # here are files, where a kernel would have none to remove
        assert int((group / name).read_text().split()[0]) == PERIOD_US // 4
    mounts.write_text("")
    with pytest.raises(NoTestbed, match="cgroup"):
        find_quotas(mounts)


@pytest.mark.parametrize("name", ["testbed/planned", "testbed/cuts", "testbed/up"])
def test_without_root_it_says_so_and_stops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(testbed, "load_nodes", lambda path: SPECS)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert CASES[name].measure.__doc__
    with pytest.raises(NoTestbed, match="needs what is missing here"):
        measure_here(name, *combinations(name, []))


# --- on a machine that can have one ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def possible() -> None:
    try:
        with make_nodes(SPECS[:1]):
            pass
    except NoTestbed as error:
        pytest.skip(str(error))


def left_behind(prefix: str) -> list[str]:
    namespaces = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout.split()
    groups = [path.name for path in find_quotas(MOUNTS).root.iterdir()]
    return [name for name in (*namespaces, *groups) if name.startswith(f"{prefix}-")]


@pytest.mark.usefixtures("possible")
def test_rates_and_shares_hold_and_nothing_is_left(tmp_path: Path) -> None:
    prefix = f"yt{os.getpid()}"
    with make_nodes(SPECS) as nodes:
        assert len(left_behind(prefix)) == 5
        one, two = nodes
        size = str(MEGABYTES * 2**20)
        tasks = [
            Task(one, [sys.executable, "-c", RECEIVE, one.address], {}),
            Task(two, [sys.executable, "-c", SEND, one.address, size], {}),
        ]
        run_together(tasks, tmp_path, timeout_seconds=60)
        # Bounds on one side: another program's load makes both smaller, and only a missing limit larger.
        assert 8 * float((tmp_path / "one.log").read_text()) < 1.25 * 40e6
        run_together([Task(two, [sys.executable, "-c", BURN], {})], tmp_path, timeout_seconds=60)
        # A share is kept by periods, of which a short burn has few; without it this would be five times it.
        assert float((tmp_path / "two.log").read_text()) < 2 * SPECS[1].cpu
        with (tmp_path / "sleep.log").open("wb") as output:
            sleeper = one.start(["sleep", "600"], environment={}, output=output)
    assert sleeper.wait(timeout=10) == -signal.SIGKILL
    assert left_behind(prefix) == []


@pytest.mark.usefixtures("possible")
def test_a_failure_ends_the_others_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="node two failed .exit code 3"), make_nodes(SPECS) as nodes:
        tasks = [Task(nodes[0], ["sleep", "600"], {}), Task(nodes[1], ["sh", "-c", "exit 3"], {})]
        run_together(tasks, tmp_path, timeout_seconds=60)
    assert left_behind(f"yt{os.getpid()}") == []


@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "import signal, sys, time\n"
        "from tools.testbed.nodes import NodeSpec, make_nodes\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        # Where the tests run in the background of a shell, it is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "specs = [NodeSpec(name=name, cpu=0.2, network=1e8) for name in ('one', 'two')]\n"
        "with make_nodes(specs) as nodes, open(sys.argv[1], 'wb') as output:\n"
        "    print(nodes[0].start(['sleep', '600'], environment={}, output=output).pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "log"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    sleeper = int(process.stdout.readline())
    assert left_behind(f"yt{process.pid}")
    process.send_signal(number)
    process.wait(timeout=60)
    process.stdout.close()
    assert left_behind(f"yt{process.pid}") == []
    with pytest.raises(ProcessLookupError):
        os.kill(sleeper, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("possible")
@pytest.mark.skipif(CORES < 2, reason="two nodes that train in useful time need two cores")
def test_profile_plan_and_train_on_unlike_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = write_nodes(
        tmp_path, "name: fast, cpu: 1, network: 1 Gb/s", "name: slow, cpu: 0.6, network: 200 Mb/s"
    )
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: {name: small, num_layers: 4, hidden_size: 32, num_attention_heads: 2, ffn_hidden_size: 64,\n"
        "  vocab_size: 128, max_sequence_length: 32}\n"
        "data: {train: [{prefix: none}], sequence_length: 32, reset_position_ids: false}\n"
        "train: {steps: 1, global_batch_size: 4, precision: fp32, device: cpu}\n"
        "optimizer: {learning_rate: 1e-3}\n"
        "search: {recompute: [none], micro_batch_size: [1]}\n"
    )
    words = [f"nodes={nodes}", f"config={config}", "steps=3", "rounds=1", f"keep={tmp_path / 'kept'}"]
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    planned, even = measure_here("testbed/planned", *combinations("testbed/planned", words))
    assert planned["cut"] == "planned" and even["nodes and layers"] == "fast 2, slow 2"
    assert planned["forecast s"] > 0 and planned["measured s"] > 0
    assert (tmp_path / "kept/profile-0.json").exists()
    assert left_behind(f"yt{os.getpid()}") == []
