"""The environment variables of a rank, set before torch is imported; what the user has set stays.

`launch` gives them to the ranks that it starts; under torchrun, `train` and `profile` set them themselves.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from yuan_train.config.errors import ConfigError
from yuan_train.config.errors import end_with_parent as end_with_parent
from yuan_train.config.units import show_seconds

THREADS = "OMP_NUM_THREADS"
OWN_THREADS = "YUAN_THREADS"
"""For users of torchrun who want one thread per rank: an OMP_NUM_THREADS of 1 is taken for torchrun's own."""
TOLD = "YUAN_TOLD_DIRECTORY"
"""Where a rank tells its launcher how far it has come."""

NEXT_PLAN = "YUAN_NEXT_PLAN"
"""Where the ranks of a supervised run find the plan that they are to go on with when they get SIGUSR1."""

Told = Literal["linked", "tells"]
"""`linked`: the links of a rank of generation stand, and from then on others notice its loss. `tells`: what
ends this rank is told to the others, by itself or by those that have met it; before, by the launcher."""

SIOCGIFADDR = 0x8915
"""Linux's request for the address of a network interface."""

NAME_LOOKUPS = "RES_OPTIONS", "timeout:1 attempts:2"
"""Torch's store looks up the name of each that comes, and answers nobody meanwhile: of a name server that is
silent that takes 10 s or more each, after which other ranks take the store for another program."""

DEFAULTS: tuple[tuple[tuple[str, ...], str], ...] = (
    # Loading a kernel at its first use waits for all that the card does, reductions of gradients among it.
    # Those are not part of the check that a schedule runs even if every step blocks: unlike pipelines, whose
    # ranks reduce with several others, could wait in a circle. It takes memory, which `profile` measures.
    (("CUDA_MODULE_LOADING",), "EAGER"),
    # Stages hold tensors of many sizes and lifetimes, which leave holes between fixed segments.
    (("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"), "expandable_segments:True"),
    # torch's flight recorder: the last collectives of every rank, written when one of them times out.
    (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    # Torch prints the C++ frames of every connection that fails, above the line that says which rank is gone.
    (("TORCH_CPP_LOG_LEVEL",), "ERROR"),
    ((NAME_LOOKUPS[0],), NAME_LOOKUPS[1]),
)
"""Variables, each with other names that the user may have set instead, and values."""


def rank_defaults(given: Mapping[str, str], *, local_ranks: int, num_cores: int) -> dict[str, str]:
    """The variables to set for one of `local_ranks` ranks on `num_cores` cores, in the environment `given`.

    Threads serve the optimizer on the host, and all else that runs there: the ranks divide the cores.
    """
    found = {names[0]: value for names, value in DEFAULTS if not any(name in given for name in names)}
    if OWN_THREADS in given:
        return found | {THREADS: given[OWN_THREADS]}
    # torchrun sets 1 for several ranks, if the user has set none.
    if local_ranks > 1 and (THREADS not in given or under_torchrun(given) and given[THREADS] == "1"):
        return found | {THREADS: str(max(1, num_cores // local_ranks))}
    return found


def under_torchrun(given: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in given


def under_launch() -> bool:
    """Whether `launch` has started this process."""
    return TOLD in os.environ


def set_rank_defaults() -> None:
    """Set what this process, a rank or a run alone, needs. To be called before torch is imported."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    local_ranks = int(ranks) if ranks.isdigit() else 1
    os.environ.update(rank_defaults(os.environ, local_ranks=local_ranks, num_cores=count_cores()))


def is_rank_of_several() -> bool:
    """Whether this process is one of several ranks, whatever has started them."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def is_job_here() -> bool:
    """Whether all ranks of the job run on this machine, as the launcher says; a single process does."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", ranks) == ranks


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_host_name(name: str) -> bool:
    """Whether this machine knows an address for a name."""
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return False


def running_seconds(process: Path = Path("/proc/self/stat"), system: Path = Path("/proc/uptime")) -> float:
    """How long this process has been running; 0 where the system does not say (Linux does)."""
    try:
        # The name, in brackets, may hold anything.
        began = int(process.read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(system.read_text().split()[0]) - began
    except OSError:
        return 0.0


def unknown_host(name: str) -> str:
    """A message for the name of a meeting point that has no address here."""
    return (
        f"{name!r} is no host name here, so the ranks cannot meet there; give the address of the plan's "
        "first node on every node: --rendezvous HOST[:PORT] (of torchrun: --master-addr)"
    )


INTERFACE = "GLOO_SOCKET_IFNAME"


def network_defaults(given: Mapping[str, str], meeting_point: str) -> dict[str, str]:
    """The variable that names gloo's network interface, where gloo would take one that others do not reach.

    By itself it takes the address of the machine's own name, which may be the loopback (Debian's 127.0.1.1),
    unknown, or another machine's. Then it is the interface through which the meeting point is reached.
    """
    if INTERFACE in given or _has_good_name():
        return {}
    try:
        kind, _, _, _, address = socket.getaddrinfo(meeting_point, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # which sends nothing
            own = probe.getsockname()[0]
    except (OSError, UnicodeError):
        return {}
    name = _interface_of(own)
    return {INTERFACE: name} if name is not None and name != "lo" else {}


def _has_good_name() -> bool:
    """Whether the machine's own name is an address of this machine that others may reach."""
    address = _own_address(socket.gethostname())
    return address is not None and not ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_this_machine(name: str) -> bool:
    """Whether a name's address is one of this machine's."""
    return _own_address(name) is not None


def _own_address(name: str) -> str | None:
    """The address that a name has, if it is one of this machine's."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except (OSError, UnicodeError):
        return None
    return str(address[0])


def _interface_of(address: str) -> str | None:
    """The name of the network interface that has an address (Linux); None if it is not found."""
    if ":" in address:
        return _interface_of_six(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                # It has no address.
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _interface_of_six(address: str) -> str | None:
    table = Path("/proc/net/if_inet6")
    wanted = ipaddress.ip_address(address.partition("%")[0]).packed.hex()
    for line in table.read_text(encoding="ascii").splitlines() if table.exists() else ():
        words = line.split()
        if words[0] == wanted:
            return words[-1]
    return None


def tell_launcher(rank: int, what: Told) -> None:
    """Tell a launcher how far this rank of the job has come."""
    if under_launch():
        (Path(os.environ[TOLD]) / f"{rank}-{what}").touch()


def has_told(directory: str, rank: int, what: Told) -> bool:
    """Whether a rank has told that to the launcher, whose directory it is."""
    return (Path(directory) / f"{rank}-{what}").exists()


PORTS = range(10_000, 12_000)
"""Below those that systems give to connections: one of these could take a port before it is used."""


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port of an address of this machine, free at the moment; of `PORTS` if it can be. Raises OSError
    if the machine has no such address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in random.sample(PORTS, 20):
        with suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, port))
            return port
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


ENDING_SECONDS, LEASE_SECONDS = 10.0, 120.0
"""How long a run waits for another one in its directory, whose processes may be about to end; and longer for
one on another host, of whose loss a network file system learns late (NFS: after 90 s)."""
POLL_SECONDS = 0.5
SUPERVISED = "YUAN_SUPERVISED"
"""Where the agents of a supervised run meet, as its ranks tell other runs."""


@contextmanager
def holding(directory: str | Path, name: str, what: str, within: float = LEASE_SECONDS) -> Generator[None]:
    """Inside, this process has a directory for itself, among those that hold it under a name.

    Raises ConfigError if another one, which `what` is called in the message, has it for longer than it may
    take to end, or than `within` seconds. Whatever ends a process, the system frees what it has locked. Where
    a file cannot be written, or a file system has no locks, nobody is kept out.
    """
    path, file, waits_since = Path(directory).absolute() / name, None, time.monotonic()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        while (file := _lock(path)) is None:
            holder = _read_holder(path)
            is_here, supervised = f" of {socket.gethostname()}," in holder, SUPERVISED in os.environ
            if supervised and not is_here and holder.endswith(_supervised_words()):
                # The agents of this same run have seen its node go, and go on without it.
                path.unlink(missing_ok=True)
                continue
            waited, most = time.monotonic() - waits_since, within
            if is_here and not supervised:
                most = min(within, ENDING_SECONDS)
            if waited > most:
                raise ConfigError(
                    f"{path.parent} is in use by {what}: {holder or 'not known by whom'}. Wait for its end, "
                    f"stop it, or give another directory; if it is gone with its host, remove {path}"
                )
            if waited < POLL_SECONDS:
                seconds = show_seconds(most)
                print(f"{path.parent}: waiting up to {seconds} for {what}: {holder}", file=sys.stderr)
            time.sleep(POLL_SECONDS)
    try:
        yield
    finally:
        if file is not None:
            # Who waits has the file that is gone, and opens the next one.
            with suppress(OSError):
                if _is_at(path, file):
                    path.unlink()
            os.close(file)


def _is_at(path: Path, file: int) -> bool:
    """Whether an open file is still that of a path, which others may remove or take over. Raises OSError."""
    return os.fstat(file).st_ino == path.stat().st_ino


def _read_holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def _lock(path: Path) -> int | None:
    """Lock a file, write there who has it, and return it open; None if another process has it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        # Not `flock`, which processes that are forked from the holder would keep.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(path, file):
            raise BlockingIOError
    except (BlockingIOError, PermissionError, FileNotFoundError):
        os.close(file)
        return None
    except OSError:
        return file
    words = [f"process {os.getpid()} of {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"]
    words += [_supervised_words()] if SUPERVISED in os.environ else []
    with suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, f"{' '.join(words)}\n".encode(), 0)
    return file


def _supervised_words() -> str:
    return f"(supervised, --meet {os.environ[SUPERVISED]})"
