"""Constraints on clusters, and the names of their cards."""

import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from tests.support.cases import table
from yuan_train.config.cluster import (
    CardCount,
    Cluster,
    DedicatedLink,
    Disk,
    Host,
    Library,
    Link,
    NodeGroup,
    load_cluster,
    validate_cluster,
)
from yuan_train.config.devices import CATALOGUE, DeviceType
from yuan_train.config.errors import ConfigError
from yuan_train.config.load import build, dump, parse_document

PAGE = Path("docs/cluster.md").read_text()
# The documented form.
CLUSTER = """\
name: mixed
nodes:
  - name: a100
    count: 2
    device: A100-80G
    devices: 4
    link: {bandwidth: 300 GB/s, latency: 3 us}
    network: {bandwidth: 25 GB/s, latency: 10 us}
  - {name: t4, device: MyCard, network: {bandwidth: 25 GB/s, latency: 10 us}}
links:
  - {from: a100-0, to: t4, bandwidth: 10 Gb/s, latency: 50 us}
device_types:
  MyCard: {memory: 24 GiB, reserved: 1 GiB, bf16: 71 TFLOP/s, fp16: 71 TFLOP/s, fp32: 36 TFLOP/s,
           memory_bandwidth: 936 GB/s, host_link: 16 GB/s}
"""


def load(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return load_cluster(path)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(folder, text)
    return str(error.value).replace(f"{folder}/", "")


def test_the_example(tmp_path: Path) -> None:
    cluster = load(tmp_path, CLUSTER)
    names = [card.name for card in cluster.cards]
    assert names == [*(f"a100-0/{i}" for i in range(4)), *(f"a100-1/{i}" for i in range(4)), "t4/0"]
    assert cluster.links[0].bandwidth == 1.25e9
    assert cluster.links[0].from_ == "a100-0"
    assert cluster.device_type("MyCard").memory == 24 * 2**30
    assert cluster.device_type("A100-80G") is CATALOGUE["A100-80G"]
    assert list(cluster.groups) == ["a100-0", "a100-1", "t4"]
    with pytest.raises(FrozenInstanceError):
        cluster.name = "other"  # type: ignore[misc]


def test_written_and_read_again(tmp_path: Path) -> None:
    cluster = load(tmp_path, CLUSTER)
    text = dump(cluster)
    assert "from: a100-0" in text and "300 GB/s" in text
    assert build(parse_document(text, name="f"), Cluster, validate=validate_cluster) == cluster


def test_own_card_wins_over_the_catalogue(tmp_path: Path) -> None:
    text = "name: c\nnodes: [{name: a, device: T4}]\ndevice_types:\n  T4: {memory: 1 GiB, reserved: 0 B, "
    cluster = load(tmp_path, text + "fp32: 1 TFLOP/s, memory_bandwidth: 1 GB/s}\n")
    assert cluster.device_type("T4").memory == 2**30


@table(r"""
before => after | message
device: A100-80G => device: A100-80 |
    cluster.yaml:5: nodes[0].device: unknown card 'A100-80'; did you mean A100-80G? known are MyCard
device: A100-80G => device: '?' | cluster.yaml:5: nodes[0].device: unknown card '?'; known are MyCard, P100
device: A100-80G => device: TPU-v4 | or describe it under device_types: {TPU-v4: {memory: 24 GiB, bf16:
name: t4, device => name: a100-1, device |
    cluster.yaml:9: nodes[1].name: there is already a node called 'a100-1'
to: t4, => to: t5, | cluster.yaml:11: links[0].to: there is no node 't5' (has: a100-0, a100-1, t4)
{from: a100-0 => {from: a100 | cluster.yaml:11: links[0].from: there is no node 'a100'
to: t4, => to: a100-0, | cluster.yaml:11: links[0]: a link needs two nodes
{from: a100-0 => {from_: a100-0 | cluster.yaml:11: links[0].from_: unknown key 'from_'; did you mean 'from'?
{from: a100-0, to => {to | links[0].from: missing
from: a100-0 => from: 3 | cluster.yaml:11: links[0].from: wanted a string, got 3
reserved: 1 GiB => reserved: 24 GiB | device_types.MyCard.reserved: the whole memory is reserved
count: 2 => count: 0 | cluster.yaml:4: nodes[0].count: wanted greater than 0, got 0
count: 2 => count: 999999999 | cluster.yaml:3: nodes[0]: 999999999 nodes of 4 cards; at most 1000000
memory: 24 GiB => memory: 0 GiB | device_types.MyCard.memory: wanted greater than 0
name: t4, => name: t4, price: 1e308, | nodes[1].price: wanted less than or equal to 1000000000
latency: 3 us => latency: -3 us | nodes[0].link.latency: wanted greater than or equal to 0
""")
def test_messages(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in CLUSTER
    assert message in refusal(tmp_path, CLUSTER.replace(before, after, 1))


LISTED = "name: c\nnodes:\n  - {name: a, devices: [{type: rtx 4090, count: 2}, {type: RTX-3090}], " + (
    "link: {bandwidth: 10 GB/s}}\n"
)


def test_a_node_lists_cards_of_several_types(tmp_path: Path) -> None:
    cluster = load(tmp_path, LISTED)
    wanted = [("a/0", "RTX-4090"), ("a/1", "RTX-4090"), ("a/2", "RTX-3090")]
    assert [(card.name, card.type) for card in cluster.cards] == wanted
    assert build(parse_document(dump(cluster), name="f"), Cluster, validate=validate_cluster) == cluster
    # A list of one type is that type's number of cards.
    same = load(tmp_path, LISTED.replace("RTX-3090", "RTX 4090")).nodes[0]
    assert (same.device, same.devices) == ("RTX-4090", 3)


@table(r"""
before => after | message
devices: [ => device: T4, devices: [ | cluster.yaml:3: nodes[0].device: 'T4', but devices lists
devices: [{type: rtx 4090, count: 2}, {type: RTX-3090}], link => link | nodes[0]: no type of cards; wanted
RTX-3090 => RTX-9090 | cluster.yaml:3: nodes[0].devices[1].type: unknown card 'RTX-9090'
count: 2 => count: 0 | nodes[0].devices[0].count: wanted greater than 0, got 0
count: 2 => number: 2 | devices[0].number: unknown key 'number'; (has: type, count)
type: RTX-3090 => count: 1 | nodes[0].devices[1].type: missing
[{type: rtx 4090, count: 2}, {type: RTX-3090}] => [] | nodes[0].devices: wanted at least one
[{type: rtx 4090, count: 2}, {type: RTX-3090}] => two | nodes[0].devices: wanted an integer
count: 2 => count: 2000000 | nodes[0]: 1 nodes of 2000001 cards; at most 1000000 cards
""")
def test_what_is_wrong_with_a_list_of_cards(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in LISTED
    reported = refusal(tmp_path, LISTED.replace(before, after, 1))
    assert message in reported and len(reported.splitlines()) == 1


def test_several_nodes_need_a_network(tmp_path: Path) -> None:
    text = "name: c\nnodes:\n  - {name: a, device: T4}\n  - {name: b, device: T4}\n"
    reported = refusal(tmp_path, text)
    assert "cluster.yaml:3: nodes[0]: several nodes need 'network' on each" in reported
    assert "cluster.yaml:4: nodes[1]: several nodes need 'network' on each" in reported


def test_no_nodes(tmp_path: Path) -> None:
    assert "nodes: wanted at least one, got none" in refusal(tmp_path, "name: c\nnodes: []\n")


@pytest.mark.parametrize("second", ["{from: a100-0, to: t4, ", "{from: t4, to: a100-0, both_ways: true, "])
def test_a_link_is_described_once(tmp_path: Path, second: str) -> None:
    text = CLUSTER.replace("device_types:", f"  - {second}bandwidth: 1 GB/s}}\ndevice_types:")
    assert "cluster.yaml:12: links[1]: there is already a link from 'a100-0' to 't4'" in refusal(
        tmp_path, text
    )


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_the_catalogue_is_plausible(name: str) -> None:
    card = CATALOGUE[name]
    assert 0 < card.reserved < card.memory
    assert card.fp32 <= (card.fp16 or 0)
    assert card.peak("bf16") == card.bf16
    assert card.memory_bandwidth > card.host_link


def test_a_slow_card_peaks_lower(tmp_path: Path) -> None:
    text = "name: c\nnodes: [{name: a, device: Slow}]\ndevice_types:\n  Slow: {memory: 4 GiB, slowdown: 2, "
    card = load(tmp_path, text + "fp32: 1 TFLOP/s, memory_bandwidth: 1 GB/s}\n").device_type("Slow")
    assert card.peak("fp32") == 0.5e12
    assert card.peak("bf16") is None


# --- the page that describes these files -----------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [Cluster, NodeGroup, CardCount, Link, Host, Disk, DedicatedLink, Library, DeviceType]
)
def test_the_page_names_every_key(kind: type) -> None:
    text = "\n".join(re.findall(r"`[^`\n]+`", PAGE))
    missing = [name for f in fields(kind) if not re.search(rf"\b{(name := f.name.rstrip('_'))}\b", text)]
    assert not missing


def test_the_page_names_every_card() -> None:
    known = PAGE.partition("## Cards that are known")[2].partition("| | |")[2]
    assert sorted(re.findall(r"`([^`]+)`", known)) == sorted(CATALOGUE)


def test_the_example_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(PAGE.partition("```yaml\n")[2].partition("```")[0])
    types = [card.type for card in load_cluster(tmp_path / "c.yaml").cards]
    assert types == ["RTX-4090"] * 4 + ["RTX-3090"] * 2 + ["MyCard"]
