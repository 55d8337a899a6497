"""python -m tools.testbed.up: `yuan-train up` on unequal nodes through a stand-in for ssh; how long it takes.

Makes the nodes of a testbed file (tools/testbed/nodes.yaml; needs root), and from their addresses alone comes
to a run. Prints the seconds to the first logged step, and those of the profile among them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tools.testbed.nodes import MOUNTS, ended_well, find_quotas, load_nodes, make_nodes, write_ssh
from yuan_train.config.errors import TrainingError

HERE = Path(__file__).parent
STEP = re.compile(r"\| step +1/")
STARTED = re.compile(r"^\[\d+/\d+, \d+ s\] \$ yuan-train (\w[\w-]*)")


@ended_well
def main() -> int:
    """Run it and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default=HERE / "nodes.yaml", metavar="FILE", help="the unequal nodes")
    parser.add_argument("--model", default="tiny", help="as of `up` (tiny)")
    parser.add_argument("--data", default="README.md", help="as of `up` (README.md)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("words", nargs="*", help="further words of `up`: overrides")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as scratch,
        make_nodes(load_nodes(options.nodes)) as nodes,
        ExitStack() as cleanup,
    ):
        # The machine to start from competes with other programs as little as the nodes do.
        group = find_quotas(MOUNTS).add(f"yt{os.getpid()}-starter", 1.0, cleanup)
        ssh = Path(scratch) / "ssh-to-testbed"
        write_ssh(nodes, ssh)
        hosts = ",".join(node.address for node in nodes)
        words = ["--hosts", hosts, "--ssh", str(ssh), "--out", str(Path(scratch) / "up"), "--steps", "3"]
        words += ["--model", options.model, "--data", options.data, *options.words]
        found = measure(words, group / "cgroup.procs")
    if options.json:
        print(json.dumps(found))
    rest = found["first_step"] - found["profile"]
    print(f"first step after {found['first_step']:.0f} s, {rest:.0f} s without the profile", file=sys.stderr)
    return 0


def measure(words: list[str], group: Path) -> dict[str, float]:
    """Seconds of each step of `up` but the last, and `first_step`, all together until one is logged.

    `group` takes the process that starts all. Raises TrainingError if `up` fails.
    """
    began = time.monotonic()
    join = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group)]
    process = subprocess.Popen(
        [*join, sys.executable, "-m", "yuan_train", "up", *words], stderr=subprocess.PIPE, text=True
    )
    found: dict[str, float] = {}
    name, since = "", began
    assert process.stderr is not None
    with process:
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            now = time.monotonic()
            if started := STARTED.match(line):
                found |= {name: now - since} if name else {}
                name, since = started[1], now
            if STEP.search(line):
                found.setdefault("first_step", now - began)
    if process.returncode or "first_step" not in found:
        raise TrainingError(f"`up` ended with exit code {process.returncode}")
    return found


if __name__ == "__main__":
    sys.exit(main())
