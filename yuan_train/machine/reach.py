"""Questions to machines over ssh or srun, and files to and from them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from yuan_train.config.errors import ConfigError
from yuan_train.machine.hosts import RemoteHost

T = TypeVar("T")
Facts = dict[str, Any]

LOOK_SECONDS = 120.0
"""In which a machine answers; prints of large files take a while."""


def ask_json(command: Sequence[str], seconds: float) -> Facts | str:
    """The object that a command prints as its last line that is one, or why there is none."""
    try:
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=seconds, check=False,
        )  # fmt: skip
    except OSError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:g} s"
    # A login may print its greeting before.
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode == 0 and lines:
        try:
            return json.loads(lines[-1])
        except ValueError:
            return f"its answer is not JSON: {lines[-1][:200]}"
    said = [line.strip() for line in (ran.stderr or ran.stdout).splitlines() if line.strip()]
    return f"{said[-1] if said else 'it said nothing'} (exit code {ran.returncode})"


def look_at(hosts: Sequence[RemoteHost], question: Mapping[str, Any]) -> dict[str, Facts]:
    """What `machine/look.py` finds on each host, by its address. Raises ConfigError unless all answer."""
    words = shlex.join([sys.executable, "-m", "yuan_train.machine.look", json.dumps(question)])
    found = on_each(hosts, lambda host: ask_json(host.command(words), LOOK_SECONDS))
    lost = [f"{name}: {why}" for name, why in found.items() if isinstance(why, str)]
    if lost:
        raise ConfigError(
            f"no answer of {len(lost)} of {len(hosts)} machines, and nothing was started:\n"
            + "\n".join(lost)
            + f"\neach needs a login without a password and yuan-train at the path of here ({sys.executable})"
        )
    return {name: facts for name, facts in found.items() if not isinstance(facts, str)}


def on_each(hosts: Sequence[RemoteHost], call: Callable[[RemoteHost], T]) -> dict[str, T]:
    """What a call gives for each host, all at once, by address."""
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return dict(zip([host.address for host in hosts], pool.map(call, hosts), strict=True))


def send(host: RemoteHost, folder: Path, names: Sequence[str]) -> None:
    """Copy files to a host, under the names that they have here. Raises ConfigError unless all arrive."""
    script = shlex.join([sys.executable, "-m", "yuan_train.machine.receive", str(folder)])
    with subprocess.Popen(
        host.command(script), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        with suppress(BrokenPipeError), tarfile.open(fileobj=process.stdin, mode="w|") as archive:
            for name in names:
                with open(name, "rb") as file:
                    member = archive.gettarinfo(arcname=name, fileobj=file)
                    # tarfile takes the slash from absolute names; the other end wants them as they are.
                    member.name = name
                    archive.addfile(member, file)
        output, said = process.communicate()
    if process.returncode or output.split()[-1:] != [str(len(names)).encode()]:
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        why = lines[-1] if lines else f"exit code {process.returncode}"
        raise ConfigError(f"{host.address}: {len(names)} files were to be copied there: {why}")


def fetch(host: RemoteHost, path: Path) -> bytes:
    """The bytes of a file on a host. Raises ConfigError."""
    ran = subprocess.run(
        host.command(f"cat {shlex.quote(str(path))}"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if ran.returncode:
        said = ran.stderr.decode(errors="replace").strip() or f"exit code {ran.returncode}"
        raise ConfigError(f"{host.address}: {path} could not be fetched: {said}")
    return ran.stdout
