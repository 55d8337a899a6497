"""Whether a plan of equal pipelines is the fastest of its kind: branch and bound in the compiled core.

`native/prove.c` goes through the orders of stages and cuts of layers of every shape, each stage with what
`realise.c` finds for its memory, under the schedules' own warm-ups. It counts the stages that it tries and
looks at no clock. It stands alone because a proof does not ask how plans were found.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from ctypes import c_int16
from dataclasses import dataclass

from yuan_train.config.cluster import Card
from yuan_train.planner.evaluate.tables import Tables, make_tables, plan_of
from yuan_train.planner.native.core import MAX_REPLICAS, NAMES, ProofShape, ProofSlot
from yuan_train.planner.search.bounds import shape_bound
from yuan_train.planner.search.candidate import Candidate, Space, judge
from yuan_train.planner.search.drafts import draft_space
from yuan_train.planner.search.shapes import Shape, Slot

MOST_SLOTS, MOST_CARDS = 12, 56
"""Of a shape and of all cards, up to which a proof is tried."""
BUDGET = 1_000_000
"""Stages that are tried for all shapes together; a million takes about a second."""
NEAR = 1.0 + 1e-7
"""What is known must be met once more: a plan of its step is looked for, not only a faster one."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What branch and bound found of all shapes."""

    found: tuple[Candidate, ...]
    """The fastest plan of them; none if one that was known before is faster."""
    exact: bool
    """Whether no plan of them is faster than this one, or than the known one where there is none."""
    num_priced: int


NOTHING_PROVEN = Proof(found=(), exact=False, num_priced=0)


def is_provable(shapes: Sequence[Shape], cards: Sequence[Card]) -> bool:
    """Whether so few stages and cards are there that a proof is tried."""
    slots = [slot for shape in shapes for slot in shape.slots]
    few = len(cards) <= MOST_CARDS and max((len(shape.slots) for shape in shapes), default=0) <= MOST_SLOTS
    return few and 0 < len(slots) and max(len(slot[0]) for slot in slots) <= MAX_REPLICAS


def prove_shapes(space: Space, shapes: Sequence[Shape], *, best_seconds: float) -> Proof:
    """Look for a plan of the shapes that takes no longer than the known one of `best_seconds`."""
    costs, options = space.costs, space.options
    apart = bool(costs.topology.measured)
    if apart and any(_width(slot) > 1 for shape in shapes for slot in shape.slots):
        return NOTHING_PROVEN
    tables = make_tables(costs, options.micro_batch_sizes, options.tensor, apart=apart)
    if tables is None:
        return NOTHING_PROVEN
    wanted = draft_space(options, costs.problem)
    state = tables.evaluator.proof_state(best=best_seconds * NEAR, budget=BUDGET)
    found: Shape | None = None
    bounded = sorted((shape_bound(costs, shape, options), i) for i, shape in enumerate(shapes))
    for bound, i in bounded:
        if state.spent >= state.budget or space.is_over():
            return NOTHING_PROVEN
        if bound >= state.best:
            continue
        before = state.best
        tables.evaluator.prove(wanted, _proof_shape(tables, shapes[i]), state)
        found = shapes[i] if state.best < before else found
    if state.spent >= state.budget:
        return NOTHING_PROVEN
    best = None if found is None else judge(space, plan_of(tables, state.draft), found)
    return Proof(found=() if best is None else (best,), exact=True, num_priced=state.num_priced)


def _width(slot: Slot) -> int:
    return len(slot[0][0])


def _proof_shape(tables: Tables, shape: Shape) -> ProofShape:
    slots = (ProofSlot * len(shape.slots))()
    alike: dict[object, int] = {}
    pools = [[tables.pool_of[replica[0].name] for group in slot for replica in group] for slot in shape.slots]
    blocks, kinds = _blocks(tables, shape, pools)
    for i, (row, slot, own) in enumerate(zip(slots, shape.slots, pools, strict=True)):
        row.num_replicas, row.width = len(slot[0]), _width(slot)
        row.alike = alike.setdefault((tuple(own), row.width, row.num_replicas), len(alike))
        row.block, row.block_kind = blocks[i], kinds[i]
        row.pools = (c_int16 * len(own))(*own)
    # Whether the embedding, and the head, are no work for a stage of its own.
    ends = [tables.costs.of_replica(slot[0][0], shape.micro_batch_size, "none").units for slot in shape.slots]
    first, last = (not any(units[i].seconds + units[i].state_bytes for units in ends) for i in (0, -1))
    return ProofShape(
        NAMES.index(shape.schedule),
        tables.sizes.index(shape.micro_batch_size),
        shape.num_micro_batches,
        shape.num_pipelines,
        shape.sharded,
        first,
        last,
        len(shape.slots),
        slots,
    )


def _blocks(tables: Tables, shape: Shape, pools: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """(block of each slot, kind of its block): slots that share no node with others are a block of their own,
    and blocks are of a kind whose cards and nodes nothing but names tells apart."""
    topology, rows = tables.costs.topology, tables.problem.pools
    nodes = [{rows[pool].node for pool in own} for own in pools]
    block = list(range(len(pools)))
    for i, j in itertools.combinations(range(len(pools)), 2):
        if block[i] != block[j] and nodes[i] & nodes[j]:
            block = [block[i] if other == block[j] else other for other in block]
    if topology.measured or topology.dedicated or topology.shared_rates:
        return block, block
    kinds: dict[object, int] = {}
    kind_of: dict[int, int] = {}
    for number in Counter(block):
        names: dict[int, int] = {}
        looks = tuple(
            (
                len(slot[0]),
                _width(slot),
                *((rows[pool].kind, names.setdefault(rows[pool].node, len(names))) for pool in own),
            )
            for slot, own, other in zip(shape.slots, pools, block, strict=True)
            if other == number
        )
        kind_of[number] = kinds.setdefault(looks, len(kinds))
    return block, [kind_of[number] for number in block]
