"""Runs a program of a policy in a process that can do no harm: `python -I sandbox.py`. Knows no package.

The process reads the program from its input, gives up what it does not need, and runs it. From then on the
kernel lets it compute, read files, and print; it ends the process that opens a socket or starts another, and
refuses all else: opening a file for writing, signals, renaming and removing (Linux's seccomp, its filter as
in `man 2 seccomp`). Memory and processor time are limited (`setrlimit`), the wall's clock by whoever waits.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import selectors
import struct
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass

_ALLOWED = {
    # name: number on x86-64, and on arm64; None where it has none.
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "poll": (7, 73),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "pread64": (17, 67),
    "readv": (19, 65),
    "writev": (20, 66),
    "access": (21, None),
    "select": (23, 72),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "dup": (32, 23),
    "nanosleep": (35, 101),
    "getpid": (39, 172),
    "exit": (60, 93),
    "uname": (63, 160),
    "fcntl": (72, 25),
    "getcwd": (79, 17),
    "readlink": (89, 78),
    "gettimeofday": (96, 169),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "getdents64": (217, 61),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "newfstatat": (262, 79),
    "readlinkat": (267, 78),
    "faccessat": (269, 48),
    "set_robust_list": (273, 99),
    "getrandom": (318, 278),
    "statx": (332, 291),
    "rseq": (334, 293),
    "faccessat2": (439, 439),
}
_ENDS = {"socket": (41, 198), "fork": (57, None), "vfork": (58, None), "execve": (59, 221)}
_OPENS = {"open": (2, None, 1), "openat": (257, 56, 2)}
"""With the number of the argument that says for what."""
_CLONE, _CLONE3, _IOCTL = (56, 220), (435, 435), (16, 29)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_WRITES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x10000
_ALLOW, _END, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_PERMISSION, _NO_CALL, _NO_TERMINAL = 1, 38, 25
"""errno: EPERM, ENOSYS, ENOTTY."""
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
"""Codes of the filter's instructions: load a word, jump if equal, jump if any bit is set, return."""
_NO_NEW_PRIVILEGES, _SECCOMP = 38, 22
"""Options of prctl."""
READ_BYTES = 1 << 16
SIGKILL, SIGXCPU, SIGSYS = 9, 24, 31


def filter_program(machine: str) -> bytes:
    """The kernel's filter for a machine, as `struct sock_filter`s. Raises OSError for a machine unknown."""
    if machine not in _ARCHITECTURES or sys.platform != "linux":
        raise OSError(
            f"programs are run on Linux with x86-64 or arm64 alone, not on {sys.platform} {machine}"
        )
    column, architecture = _ARCHITECTURES[machine]
    found = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _END), (_LOAD, 0, 0, 0)]

    def on(number: int | None, *then: tuple[int, int, int, int]) -> None:
        if number is not None:
            found.extend([(_EQUAL, 0, len(then), number), *then])

    for numbers in _ALLOWED.values():
        on(numbers[column], (_RETURN, 0, 0, _ALLOW))
    for numbers in _ENDS.values():
        on(numbers[column], (_RETURN, 0, 0, _END))
    for numbers in _OPENS.values():
        refuse, allow = (_RETURN, 0, 0, _REFUSE | _PERMISSION), (_RETURN, 0, 0, _ALLOW)
        on(numbers[column], _argument(numbers[2]), (_ANY_BIT, 0, 1, _WRITES), refuse, allow)
    # Threads are the process's own; another process is not.
    end, allow = (_RETURN, 0, 0, _END), (_RETURN, 0, 0, _ALLOW)
    on(_CLONE[column], _argument(0), (_ANY_BIT, 1, 0, _CLONE_THREAD), end, allow)
    # Its arguments cannot be seen; a C library without it takes clone.
    on(_CLONE3[column], (_RETURN, 0, 0, _REFUSE | _NO_CALL))
    on(_IOCTL[column], (_RETURN, 0, 0, _REFUSE | _NO_TERMINAL))
    found.append((_RETURN, 0, 0, _REFUSE | _PERMISSION))
    return b"".join(struct.pack("HBBI", *one) for one in found)


def _argument(number: int) -> tuple[int, int, int, int]:
    """Load the lower half of an argument."""
    return (_LOAD, 0, 0, 16 + 8 * number)


def confine(memory: int, seconds: int) -> None:
    """Give up all but computing, reading and printing, for ever. Raises OSError if the kernel refuses."""
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    program = filter_program(platform.machine())
    held = ctypes.create_string_buffer(program)
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or library.prctl(_SECCOMP, 2, described, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of calls (seccomp)")


@dataclass(frozen=True)
class Ran:
    """What became of a program."""

    output: str
    """What it printed, also of errors."""
    ended: str | None
    """Why it was ended; None if it ended by itself."""


def run_program(program: str, *, seconds: float, memory: int, most_output: int) -> Ran:
    """Run a program as above: at most so long, with so many bytes of memory and of output."""
    command = [sys.executable, "-I", "-B", os.path.abspath(__file__), str(memory), str(int(seconds) + 1)]
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env={"OMP_NUM_THREADS": "1"},
    )
    assert child.stdin is not None and child.stdout is not None
    ended: str | None = None
    try:
        ended, found = _watch(child, program.encode(), time.monotonic() + seconds, most_output)
    finally:
        child.kill()
        code = child.wait()
        child.stdin.close()
        child.stdout.close()
    if ended == "time" or (ended is None and code in (-SIGXCPU, -SIGKILL)):
        ended = f"it took longer than {seconds:g} s"
    elif ended == "output":
        ended = f"it printed more than {most_output} characters"
    elif code == -SIGSYS:
        ended = "it opened a socket or started a process"
    elif ended is None and code < 0:
        ended = f"signal {-code} ended it"
    return Ran(found.decode(errors="replace")[:most_output], ended)


def _watch(
    child: subprocess.Popen[bytes], program: bytes, until: float, most: int
) -> tuple[str | None, bytes]:
    """Why a child is to be ended (`time`, `output`; None: it has), and what it printed."""
    assert child.stdin is not None and child.stdout is not None
    unsent, found = memoryview(program), bytearray()
    os.set_blocking(child.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        selector.register(child.stdin, selectors.EVENT_WRITE)
        while True:
            left = until - time.monotonic()
            ready = selector.select(max(left, 0.0))
            if not ready:
                return "time", bytes(found)
            for key, _ in ready:
                if key.fileobj is child.stdin:
                    try:
                        unsent = unsent[os.write(key.fd, unsent[:READ_BYTES]) :]
                    except OSError:
                        unsent = memoryview(b"")
                    if not unsent:
                        selector.unregister(child.stdin)
                        child.stdin.close()
                    continue
                part = os.read(key.fd, READ_BYTES)
                found += part
                if len(found) > most:
                    return "output", bytes(found)
                if not part:
                    try:
                        child.wait(max(0.0, until - time.monotonic()))
                    except subprocess.TimeoutExpired:
                        return "time", bytes(found)
                    return None, bytes(found)


def main() -> None:
    """In the process: read the program, give up the rest, run it. Of an error the program's part is told."""
    program = sys.stdin.read()
    confine(int(sys.argv[1]), int(sys.argv[2]))
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except Exception as error:
        trace = error.__traceback__
        traceback.print_exception(error.with_traceback(trace.tb_next if trace is not None else None))
        sys.exit(1)


if __name__ == "__main__":
    main()
