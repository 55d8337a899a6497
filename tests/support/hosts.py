"""Machines that are folders of this one, reached by stand-ins for ssh and Slurm."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.project import make_project, on_devices, parse_plan, run_config
from yuan_train.config.plan_constraints import save_plan

SSH = """#!{python}
import os, sys
host, *words = sys.argv[1:]
host = host.rpartition("@")[2]
if host.startswith("lost"):
    print("ssh: connect to host " + host + " port 22: No route to host", file=sys.stderr)
    sys.exit(255)
script = " ".join(words).replace({here!r}, {hosts!r} + "/" + host)
with open({hosts!r} + "/calls", "a") as log:
    print(host, script, file=log)
print("Welcome to " + host, file=sys.stderr, flush=True)
os.execvp("sh", ["sh", "-c", script])
"""
ANSWERING_SSH = """#!{python}
import os, sys
host, *words = sys.argv[1:]
if host.startswith("lost"):
    sys.exit("ssh: connect to host " + host + " port 22: No route to host")
print("Welcome to " + host, flush=True)
answer = {folder!r} + "/" + host + ".json"
os.execvp("sh", ["sh", "-c", "cat " + answer if os.path.exists(answer) else " ".join(words)])
"""
SRUN = """#!{python}
import os, sys
words = sys.argv[1:]
place = words.index("-w")
host, words = words[place + 1], words[place + 2:]
with open({hosts!r} + "/steps", "a") as log:
    print(*sys.argv[1 : place + 3], file=log)
words = [word.replace({here!r}, {hosts!r} + "/" + host) for word in words]
os.execvp(words[0], words)
"""
SCONTROL = '#!/bin/sh\necho "$3" | tr , "\\n"\n'


def answering_ssh(folder: Path) -> str:
    """A stand-in for ssh: a host prints HOST.json of `folder`, or runs the command; `lost...` refuse."""
    program = folder / "ssh"
    program.write_text(ANSWERING_SSH.format(python=sys.executable, folder=str(folder)))
    program.chmod(0o755)
    return str(program)


class Machines:
    """A folder to start from, `here`, and one for each machine beside it; `ssh`, `srun`, `scontrol`."""

    def __init__(self, root: Path) -> None:
        self.root, self.here, self.hosts = root, root / "here", root / "hosts"
        self.bin = root / "bin"
        for folder in (self.here, self.hosts, self.bin):
            folder.mkdir()
        names = {"python": sys.executable, "here": str(self.here), "hosts": str(self.hosts)}
        for name, text in (("stand-in", SSH), ("srun", SRUN), ("scontrol", SCONTROL)):
            (self.bin / name).write_text(text.format(**names) if "{" in text else text)
            (self.bin / name).chmod(0o755)
        self.ssh = str(self.bin / "stand-in")

    def folder(self, host: str) -> Path:
        """The machine's own copy of the folder to start from."""
        return self.hosts / host

    def make_project(self, text: str, devices: Sequence[str]) -> None:
        """A run with paths relative to its folder, and plan.yaml, whose ranks lie on `devices`."""
        run_file = make_project(self.here)
        plan = parse_plan(run_config(run_file), text)
        save_plan(self.here / "plan.yaml", on_devices(plan, *devices))
        run_file.write_text(run_file.read_text().replace(f"{self.here}/", ""))

    @property
    def environment(self) -> dict[str, str]:
        """Of a command that finds srun and scontrol."""
        return {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
