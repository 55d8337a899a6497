"""Plans as a user makes them: no card beyond 95 % of what torch reports, no host beyond what it has."""

from pathlib import Path

import pytest

from yuan_train.cli.main import main
from yuan_train.config.cluster import load_cluster
from yuan_train.config.devices import GIB
from yuan_train.config.plan import snapshot_bytes
from yuan_train.config.plan_constraints import load_plan

CONFIGS = Path(__file__).parents[3] / "configs"
WORKSTATIONS = """\
name: workstations
nodes:
  - {name: a, device: NVIDIA GeForce RTX 4090, devices: 4, link: {bandwidth: 12 GB/s},
     network: {bandwidth: 10 Gb/s}}
  - {name: b, device: RTX-3090, devices: 4, link: {bandwidth: 12 GB/s}, network: {bandwidth: 10 Gb/s}}
"""
# Few shapes: the searches of both take seconds, and need their hosts.
KEYS = (
    "search.pipelines=[1]",
    "search.replicas=[1]",
    "search.schedule=[1f1b]",
    "search.micro_batch_size=[1]",
)


@pytest.mark.parametrize(
    ("cluster", "model", "keys", "words"),
    [
        (
            str(CONFIGS / "cluster" / "a800-a100.yaml"),
            "yuan2-51b",
            ("search.tensor=[4]", "train.global_batch_size=64"),
            "(of 127.0 GiB)",
        ),
        (
            WORKSTATIONS,
            "llama3.1-8b",
            ("search.tensor=[1]", "data.sequence_length=8192", "train.global_batch_size=32"),
            "(of 21.5 GiB, assumed: as much as the cards have together; state nodes[0].host.memory)",
        ),
    ],
    ids=["51B on stated hosts", "8B on assumed hosts"],
)
def test_cards_and_hosts_are_not_overfilled(
    cluster: str,
    model: str,
    keys: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = Path(cluster)
    if cluster == WORKSTATIONS:
        path = tmp_path / "cluster.yaml"
        path.write_text(cluster, encoding="utf-8")
    out = tmp_path / "plan.yaml"
    files = ["--cluster", str(path), "--model", str(CONFIGS / "model" / f"{model}.yaml"), "--out", str(out)]
    assert main(["plan", *files, *KEYS, *keys, "search.time_limit=300 s", "--verbose"]) == 0
    printed, plan, cards = capsys.readouterr().out, load_plan(out), load_cluster(path)
    assert "memory: at most 95% of what torch reports of a card (search.memory_fraction: 0.95)" in printed
    assert words in printed
    assert plan.forecast is not None
    on_host: dict[str, float] = {}
    for entry in plan.forecast.stages:
        stage = plan.pipelines[entry.pipeline].stages[entry.stage]
        for rank in (rank for replica in stage.replicas for rank in replica):
            card = plan.ranks[rank]
            assert entry.peak_memory_bytes <= 0.95 * cards.device_type(card.type).memory
            node = card.device.rpartition("/")[0]
            on_host[node] = on_host.get(node, 0.0) + entry.host_memory_bytes
    assert any(on_host.values())
    for node, num_bytes in on_host.items():
        group = cards.groups[node]
        memory = group.host.memory if group.host else sum(cards.device_type(t).memory for t in group.types)
        assert num_bytes + 8 * GIB <= memory


def test_hosts_have_room_for_saves_in_the_background_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fastest plan and the copies are more than the host has: another plan keeps less there."""
    cluster, out = tmp_path / "cluster.yaml", tmp_path / "plan.yaml"
    cluster.write_text(
        "name: workstation\nnodes:\n  - {name: a, device: RTX-3060, devices: 2, link: {bandwidth: 12 GB/s},\n"
        "     host: {memory: 68 GiB}}\n",
        encoding="utf-8",
    )
    files = ["--cluster", str(cluster), "--model", "yuan2-2b", "--out", str(out)]
    keys = (*KEYS, "search.tensor=[1]", "data.sequence_length=2048", "train.global_batch_size=16")
    kept, copied = list[float](), 0.0
    for more in ((), ("checkpoint.asynchronous=true", f"checkpoint.directory={tmp_path}")):
        assert main(["plan", *files, *keys, "search.effort=quick", *more]) == 0
        said = capsys.readouterr().out
        assert ("saves (checkpoint.asynchronous) copy" in said) == bool(more)
        assert "more than it has" not in said
        plan = load_plan(out)
        assert plan.forecast is not None
        kept.append(sum(stage.host_memory_bytes for stage in plan.forecast.stages))
        copied = snapshot_bytes(plan, {0, 1}, bytes_per_parameter=12)
    assert copied == 12 * plan.model.parameters
    assert main(["plan", *files, *keys, "checkpoint.in_memory=10", f"checkpoint.directory={tmp_path}"]) == 0
    assert "saves (checkpoint.in_memory) copy" in capsys.readouterr().out
    assert kept[0] + copied > 60 * GIB >= kept[1] + copied
