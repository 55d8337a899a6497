"""Links measured by classes of pairs: how many, which, and what the others get."""

import itertools
from collections.abc import Callable

import pytest
import torch.distributed as dist

from yuan_train.config.cluster import Cluster, DedicatedLink, Link, NodeGroup
from yuan_train.config.devices import Backend
from yuan_train.parallel.device import CPU
from yuan_train.profile import links
from yuan_train.profile.links import (
    LinkEnd,
    LinkFigures,
    MeasuredLinks,
    Pair,
    link_ends,
    measure_classes,
    measure_links,
)

FAST, SLOW = Link(bandwidth=25e9), Link(bandwidth=1e9)


def ends_of(cluster: Cluster, *, with_file: bool = True) -> list[LinkEnd]:
    names = [card.name for card in cluster.cards]
    backends: list[Backend] = ["nccl"] * len(names)
    return link_ends(names, [card.type for card in cluster.cards], backends, cluster if with_file else None)


def measured(
    ends: list[LinkEnd], seconds: Callable[[int, int], float], *, all_pairs: bool = False
) -> tuple[MeasuredLinks, list[Pair]]:
    """What is found of links of these seconds, and the pairs that were measured."""
    asked: list[Pair] = []

    def measure(pair: Pair) -> LinkFigures:
        asked.append(pair)
        return LinkFigures(there=(seconds(*pair),), back=(seconds(*pair[::-1]),))

    pairs = itertools.combinations(range(len(ends)), 2)
    return measure_classes(ends, pairs, measure, all_pairs=all_pairs), asked


def big_cluster(*, links: tuple[DedicatedLink, ...] = ()) -> Cluster:
    """64 cards: four nodes of A100 and four of V100, on a fast network and a slow one."""
    a100 = NodeGroup(name="a", count=4, device="A100-80G", devices=8, link=FAST, network=FAST)
    v100 = NodeGroup(name="v", count=4, device="V100-32G", devices=8, link=FAST, network=SLOW)
    return Cluster(name="big", nodes=(a100, v100), links=links)


@pytest.mark.parametrize("with_file", [True, False])
def test_ten_measurements_stand_for_those_of_64_cards(with_file: bool) -> None:
    """Within nodes of either kind, between those of a kind, and from one kind to the other: two of each."""
    ends = ends_of(big_cluster(), with_file=with_file)

    def seconds(source: int, target: int) -> float:
        nodes, slow = (source // 8, target // 8), (source >= 32, target >= 32)
        # From the slow kind to the fast one it takes longer than the other way.
        return 1.0 if nodes[0] == nodes[1] else 10.0 + 2 * slow[0] + slow[1]

    found, asked = measured(ends, seconds)
    assert len(found.figures) == 2016 and len(asked) == len(set(asked)) == 10
    for (source, target), figures in found.figures.items():
        assert (figures.there, figures.back) == ((seconds(source, target),), (seconds(target, source),))
    assert len(found.stand_ins) == 2016 - 10
    # (40, 55) lie on two nodes of V100: its likes are the first such pair, and the farthest.
    assert found.stand_ins[40, 55] == ((32, 40), (32, 63))
    # The control: all of them, where that is asked for.
    found, asked = measured(ends, seconds, all_pairs=True)
    assert len(asked) == 2016 and not found.stand_ins


def test_a_class_whose_pairs_differ_is_divided() -> None:
    """Within a node, cards 0 to 3 and 4 to 7 hang on two processors: their numbers tell, on every node."""
    ends = ends_of(big_cluster())

    def seconds(source: int, target: int) -> float:
        if source // 8 != target // 8:
            return 10.0
        return 1.0 if (source % 8 < 4) == (target % 8 < 4) else 3.0

    found, asked = measured(ends, seconds)
    assert all(f.there == (seconds(*pair),) for pair, f in found.figures.items())
    # Two kinds of nodes have 28 pairs of numbers each; what was measured first stands for its own.
    assert len(asked) == 2 * 28 + 6


def test_a_node_with_a_dedicated_link_is_like_no_other() -> None:
    link = DedicatedLink(from_="a-0", to="v-0", bandwidth=1e9, both_ways=True)
    ends = ends_of(big_cluster(links=(link,)))

    def seconds(source: int, target: int) -> float:
        return 100.0 if {ends[source].node, ends[target].node} == {"a-0", "v-0"} else 10.0

    found, asked = measured(ends, seconds)
    assert all(f.there == (seconds(*pair),) for pair, f in found.figures.items())
    assert len(asked) < 40


def test_unlike_cards_in_a_node_are_not_alike() -> None:
    names = [f"box/{i}" for i in range(4)]
    backends: list[Backend] = ["nccl"] * 4
    ends = link_ends(names, ["RTX-4090", "RTX-3090", "RTX-4090", "RTX-3090"], backends, None)
    found, asked = measured(ends, lambda source, target: 1.0 + source % 2 + 2 * (target % 2))
    # One pair of each type, and two of the four between the types.
    assert len(asked) == 4
    assert [found.figures[1, 2].there, found.figures[1, 2].back] == [(2.0,), (3.0,)]


def test_a_profile_names_the_links_that_stand_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = ends_of(big_cluster())[:8]
    monkeypatch.setattr(links, "make_pair", lambda *_, **__: None)
    monkeypatch.setattr(links, "_measure", lambda *_: (1.0,))
    monkeypatch.setattr(links, "compute_seconds_per_byte", lambda *_, **__: 0.0)
    monkeypatch.setattr(dist, "get_rank", lambda: -1)
    found = {
        all_pairs: measure_links(ends, device=CPU, sizes=(1,), all_pairs=all_pairs)
        for all_pairs in (False, True)
    }
    assert [sum(link.like is not None for link in every) for every in found.values()] == [52, 0]
    assert {link.like for link in found[False]} - {None} == {("a-0/0 - a-0/1", "a-0/0 - a-0/7")}
