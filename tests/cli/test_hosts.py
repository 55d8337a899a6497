"""Machines by name: hostfiles and --hosts, which node each is, files that they lack, one end for all."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.hosts import Machines
from yuan_train.cli.launch_hosts import parse_address, place
from yuan_train.cli.main import main
from yuan_train.config.errors import ConfigError
from yuan_train.config.plan import Node
from yuan_train.config.plan_constraints import load_plan, save_plan
from yuan_train.machine.hosts import RemoteHost, Task, parse_hosts, read_hostfile, run_together, ssh_words
from yuan_train.parallel.environment import network_defaults

GOOD = """\
# the rack in the corner
node1            # by its own name

me@node2 slots=4
10.0.0.7 big slots=2
[2001:db8::1]
you@2001:db8::2 small
"""


def write(folder: Path, text: str) -> Path:
    (folder / "hosts").write_text(text)
    return folder / "hosts"


def test_a_hostfile(tmp_path: Path) -> None:
    hosts = read_hostfile(write(tmp_path, GOOD), "ssh -p 2222")
    assert [(host.address, host.node, host.slots) for host in hosts] == [
        ("node1", None, None),
        ("node2", None, 4),
        ("10.0.0.7", "big", 2),
        ("2001:db8::1", None, None),
        ("2001:db8::2", "small", None),
    ]
    assert hosts[1].reach[:3] == ("ssh", "-p", "2222") and hosts[1].reach[-1] == "me@node2"
    assert "BatchMode=yes" in hosts[1].reach and "BatchMode=yes" not in ssh_words("ip netns exec")
    assert hosts[4].reach[-1] == "you@2001:db8::2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\n\nb slots=many", ["hosts:3: slots=many", "from 1 on, such as slots=4"]),
        ("a slots=0", ["hosts:1: slots=0"]),
        ("a slots=1 slots=2", ["hosts:1: 'slots=2' twice"]),
        ("a port=22", ["hosts:1: 'port=22': unknown word; wanted HOST [NODE] [slots=N]"]),
        ("a n1 n2", ["hosts:1: 'n2': unknown word"]),
        ("a\nb\nme@a", ["hosts:3: me@a: named before, at", "hosts:1"]),
        ("a n\nb n", ["hosts:2: node n is a already"]),
        ("a:4", ["hosts:1: a:4: no name and no IPv6 address", "is written: a slots=4"]),
        ("[::zz]", ["hosts:1: [::zz]: no name and no IPv6 address"]),
        ("[node1]", ["hosts:1: [node1]: no name and no IPv6 address"]),
        ("-oProxyCommand=x", ["hosts:1: -oProxyCommand=x: wanted a name or an address"]),
        ("@b", ["hosts:1: @b: wanted USER@HOST, got the user ''"]),
        ("# nothing\n\n", ["names no machine", "HOST [NODE] [slots=N]"]),
        ("a slots=x\nb y=1", ["hosts:1: slots=x", "hosts:2: 'y=1'"]),
    ],
)
def test_wrong_hostfiles(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hostfile(write(tmp_path, text), "ssh")
    assert all(word in str(caught.value) for word in words), caught.value


def test_names_and_commands_that_are_none(tmp_path: Path) -> None:
    for text, words in ((" , ", "wanted names of machines"), ("a,b,a", "named before"), ("a,b c=1", "'c=1'")):
        with pytest.raises(ConfigError, match=words):
            parse_hosts(text, "ssh")
    for ssh in ("", "ssh 'x"):
        with pytest.raises(ConfigError, match="--ssh"):
            parse_hosts("a", ssh)
    with pytest.raises(ConfigError, match="No such file"):
        read_hostfile(tmp_path / "nowhere", "ssh")


NODES = [Node("big-0", (0, 1)), Node("big-1", (2, 3)), Node("small", (4,))]


def nodes_of(text: str) -> list[str]:
    return [host.name for host, _ in place(parse_hosts(text, "ssh"), NODES)]


def test_which_node_a_machine_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert nodes_of("x,y,z") == ["x", "y", "z"]
    assert nodes_of("small,me@big-1.lan,big-0") == ["big-0", "me@big-1.lan", "small"]
    assert nodes_of("small,idle,big-1,big-0") == ["big-0", "big-1", "small"]
    assert "note: idle: the plan has no ranks there" in capsys.readouterr().err
    hosts = read_hostfile(write(tmp_path, "x small\ny big-1 slots=2\nz big-0\n"), "ssh")
    assert [host.name for host, _ in place(hosts, NODES)] == ["z", "y", "x"]
    slurm = [replace(host, has_shell=False) for host in parse_hosts("small,n2,n3", "ssh")]
    assert [host.name for host, _ in place(slurm, NODES)] == ["small", "n2", "n3"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("big-0\nbig-1", "no machine for small of the plan's nodes big-0, big-1, small among big-0, big-1"),
        ("a\nb", "no machine for big-0, big-1, small"),
        ("a\nb\nc tiny", "hosts:3: tiny: no node of the plan, which has big-0, big-1, small"),
        ("a slots=1\nb\nc", "hosts:1: a: slots=1, but the plan has 2 ranks on big-0"),
    ],
)
def test_machines_that_do_not_match(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        place(read_hostfile(write(tmp_path, text), "ssh"), NODES)
    assert words in str(caught.value)


def test_addresses_of_meeting_points() -> None:
    assert parse_address("a") == ("a", None) and parse_address("a:7") == ("a", 7)
    assert parse_address("[::1]:7") == ("::1", 7) and parse_address("[::1]") == ("::1", None)
    for text in ("::1", "a:", "a:b", "", "[a"):
        with pytest.raises(ConfigError, match="wanted HOST:PORT"):
            parse_address(text)


def test_the_interface_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where the machine's own name is of no use, and never the loopback."""
    assert network_defaults({"GLOO_SOCKET_IFNAME": "eth7"}, "127.0.0.1") == {}
    monkeypatch.setattr("yuan_train.parallel.environment._has_good_name", lambda: False)
    assert network_defaults({}, "127.0.0.1") == {} == network_defaults({}, "no.such.host.example.invalid")
    monkeypatch.setattr("yuan_train.parallel.environment._has_good_name", lambda: True)
    assert network_defaults({}, "192.0.2.1") == {}


def here(name: str, script: str) -> Task:
    """A task of a machine that is this one, under an agent."""
    agent = f"exec {sys.executable} -m yuan_train.machine.hosts run sh -c '{script}'"
    return Task(host=RemoteHost(name=name, reach=(), has_shell=False), script=agent)


def test_output_by_machine(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_together([here("a", "echo one; echo two >&2"), here("long", "printf three")]) == 0
    found = capfd.readouterr()
    assert sorted(found.out.splitlines()) == ["a    | one", "long | three"]
    assert found.err == "a    | two\n"


@pytest.mark.parametrize(
    ("scripts", "code", "words"),
    [
        (["sleep 60", "exit 3"], 3, "error: b failed (exit code 3)"),
        (["exit 1", "sleep 1; exit 2"], 2, "error: b failed (exit code 2)"),
        (["sleep 60", "kill -9 $$"], 1, "error: b was killed by SIGKILL"),
        (["sleep 60", "exit 255"], 1, "error: b was not reached, or its connection broke"),
    ],
)
def test_one_end_for_all(
    scripts: list[str], code: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The exit code is that of the machine at fault, which is named; nobody is left after ten seconds."""
    began = time.monotonic()
    assert run_together([here(name, script) for name, script in zip("ab", scripts, strict=True)]) == code
    assert time.monotonic() - began < 10
    assert words in capfd.readouterr().err


def test_the_others_go_on_without_a_spare(capfd: pytest.CaptureFixture[str]) -> None:
    spare = replace(here("b", "exit 1"), is_spare=True)
    assert run_together([here("a", "sleep 1; echo done"), spare]) == 0
    found = capfd.readouterr()
    assert "a | done" in found.out and "note: b failed (exit code 1); the others go on" in found.err


def test_a_command_that_ignores_the_end_is_killed(tmp_path: Path) -> None:
    stubborn = f'trap "" TERM INT; echo $$ >{tmp_path}/pid; while :; do sleep 0.2; done'
    assert run_together([here("a", stubborn), here("b", "sleep 1; exit 1")]) == 1
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_ctrl_c_reaches_all(tmp_path: Path) -> None:
    script = (
        f'trap "echo yes >{tmp_path}/$0; exit 130" INT; echo >{tmp_path}/up-$0; while :; do sleep 0.1; done'
    )
    tasks = [here(name, script.replace("$0", name)) for name in "ab"]

    def interrupt() -> None:
        while not all((tmp_path / f"up-{name}").exists() for name in "ab"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_together(tasks)
    assert all((tmp_path / name).read_text() == "yes\n" for name in "ab")


def test_nothing_is_left_when_the_starter_is_gone(tmp_path: Path) -> None:
    """The agent hears the end of its input, has the command end, and says how."""
    script = (
        f'trap "echo saved >{tmp_path}/saved; exit 0" TERM; echo >{tmp_path}/up; while :; do sleep 0.1; done'
    )
    agent = subprocess.Popen(
        [sys.executable, "-m", "yuan_train.machine.hosts", "run", "sh", "-c", script], stdin=subprocess.PIPE
    )
    assert agent.stdin is not None
    agent.stdin.write(b"hello\n")
    agent.stdin.flush()
    while not (tmp_path / "up").exists():
        time.sleep(0.05)
    agent.stdin.close()
    assert agent.wait(timeout=30) == 0 and (tmp_path / "saved").exists()


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    found = Machines(tmp_path)
    found.make_project("1x8: 2@0 | 2@1 | 2@2", ["a/0", "a/1", "b/0"])
    monkeypatch.chdir(found.here)
    return found


def launch(machines: Machines, *words: str) -> int:
    files = ("--config", "run.yaml", "--plan", "plan.yaml")
    return main(["launch", *files, "--ssh", machines.ssh, *words])


def test_what_machines_lack_is_said_before_anything_starts(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(machines, "--hosts", "a,b", "--rendezvous", "127.0.0.1") == 2
    said = capsys.readouterr().err
    for name in "ab":
        words = f"error: {name}: no run.yaml, corpus.bin, corpus.idx, tokenizer/tokenizer.model, plan.yaml"
        assert words in said
    assert "or give --copy" in said and not machines.folder("a").exists()
    for hosts, answer in (
        ("x,lost", "lost: ssh: connect to host lost"),
        ("a,b", "a, where the ranks would meet"),
    ):
        assert launch(machines, "--hosts", hosts) == 2
        assert answer in capsys.readouterr().err
    assert not machines.folder("a").exists()


def test_files_are_copied_and_what_is_replaced_is_said(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    """One machine has nothing, one another run file and more; nothing starts, for no port is free."""
    other = machines.folder("b")
    other.mkdir()
    (other / "run.yaml").write_text("another")
    (other / "mine").write_text("mine")
    words = ("--hosts", "a,b", "--copy", "--rendezvous", "127.0.0.1:1", "checkpoint.directory=saved")
    assert launch(machines, *words) == 2
    said = capsys.readouterr().err
    assert "a: copying: run.yaml, corpus.bin" in said
    assert "b: copying: corpus.bin" in said and "b: replacing what differs: run.yaml (" in said
    # Each has a folder of its own, so no checkpoint could be written.
    assert "error: checkpoint.directory: saved of a is not seen by b; wanted a folder on" in said
    for name in ("run.yaml", "plan.yaml", "corpus.bin", "tokenizer/tokenizer.model"):
        assert (other / name).read_bytes() == (machines.here / name).read_bytes()
    assert (other / "mine").read_text() == "mine"
    assert not [path for path in machines.hosts.rglob(".*")]
    (machines.here / "corpus.bin").unlink()
    assert launch(machines, "--hosts", "a,b", "--rendezvous", "127.0.0.1", "data.tokenizer=none") == 2
    assert "none: on none of a, b, and not here either" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hosts", "a", "--slurm"), "--hosts and --slurm: both name the machines"),
        (("--copy",), "--copy: to which machines?"),
        (("--hosts", "a,b", "--this-node", "a"), "--this-node: names one machine"),
        (("--slurm",), "no job of Slurm's"),
        (("--hosts", "a"), "no machine for a, b of the plan's nodes a, b among"),
    ],
)
def test_options_that_exclude_each_other(
    words: tuple[str, ...],
    message: str,
    machines: Machines,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    code = launch(machines, *words)
    said = capsys.readouterr().err
    assert (code, message in said or words == ("--hosts", "a")) == (2, True), said


def test_the_lines_of_all_machines(machines: Machines, capsys: pytest.CaptureFixture[str]) -> None:
    (machines.here / "hosts").write_text("x b\nme@y a\n")
    assert launch(machines, "--hostfile", "hosts", "--print", "train.seed=3") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{machines.ssh} me@y ") and "--this-node a --rendezvous y:29500" in first
    assert "train.seed=3 --this-node b --rendezvous y:29500" in second


def test_a_batch_script(machines: Machines, capsys: pytest.CaptureFixture[str]) -> None:
    """A component for each kind of node, and the same command in the job."""
    plan = load_plan("plan.yaml")
    kinds = [("big-0/0", "A100-80G"), ("big-1/0", "A100-80G"), ("small/0", "T4")]
    ranks = [replace(r, device=d, type=t) for r, (d, t) in zip(plan.ranks, kinds, strict=True)]
    save_plan("plan.yaml", replace(plan, ranks=tuple(ranks)))
    words = ("--slurm", "--print", "--sbatch=--partition=gpu", "data.train=[{prefix: a b}]", "--copy")
    assert launch(machines, *words) == 0
    job = capsys.readouterr().out
    assert (
        "\n#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --partition=gpu\n#SBATCH hetjob\n" in job
    )
    assert "# T4: small\n#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=1 --partition=gpu\n" in job
    command = "exec yuan-train launch --config run.yaml --plan plan.yaml 'data.train=[{prefix: a b}]' --slurm"
    assert job.endswith(f"{command} --copy\n")
