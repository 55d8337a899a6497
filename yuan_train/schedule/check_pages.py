"""Checks a program with pages before it runs: each page is where it is needed, and never too many are."""

from __future__ import annotations

from collections.abc import Iterator

from yuan_train.schedule.pages import Paging, by_group
from yuan_train.schedule.step import COMPUTE, PAGING, RankProgram


def check_pages(program: RankProgram, paging: Paging) -> None:
    """Raise ValueError, listing every fault, unless a worker's program keeps its pages.

    Every group passes all parts in order, a backward from the last. A page is in one place at every step: on
    the host, on the card (from its page_in), or on its way down (from its gradient_down to its page_out); at
    the end, on the host. On the card, either way included, are never more than `slots`. A part runs with its
    page on the card; the sum of the groups before has come up when a backward adds to it, and no gradient is
    left behind.
    """
    faults = [*_order_faults(program, paging), *_place_faults(program, paging)]
    if faults:
        raise ValueError("\n".join(faults))


def _order_faults(program: RankProgram, paging: Paging) -> Iterator[str]:
    for (kind, last), group in by_group(program).items():
        parts = range(paging.num_pages + 1)
        order = parts if kind == "forward" else parts[::-1]
        expected = [(part, m) for part in order for m in group.micro_batches]
        found = [(step.part, step.micro_batch) for step in group.steps if step.kind in COMPUTE]
        if found != expected or len(group.micro_batches) > paging.group:
            yield f"the {kind} of the group of micro-batch {last} takes (part, micro-batch) {found}"


def _place_faults(program: RankProgram, paging: Paging) -> Iterator[str]:
    place = dict.fromkeys(range(paging.num_pages), "on the host")
    summed: set[int] = set()
    """Pages with a sum on the host."""
    open_sums: set[int] = set()
    """Pages on the card with a sum that is not on the host."""
    ready: set[int] = set()
    """Pages on the card that have what earlier groups have summed."""
    for step in program:
        page = step.part
        if page not in place:
            if step.kind in PAGING:
                yield f"the {step}: the stage has no such page"
            continue
        at, sums, fault = place[page], _sum_of(page, summed, ready, open_sums), False
        if step.kind == "page_in":
            fault = at != "on the host"
            place[page] = "on the card"
            if page not in summed:
                ready.add(page)
        elif step.kind == "gradient_up":
            fault = at != "on the card" or page not in summed or page in ready
            ready.add(page)
        elif step.kind == "gradient_down":
            fault = at != "on the card" or page not in open_sums
            open_sums.discard(page)
            ready.discard(page)
            summed.add(page)
            place[page] = "on its way down"
        elif step.kind == "page_out":
            fault = at == "on the host" or page in open_sums
            ready.discard(page)
            place[page] = "on the host"
        else:
            fault = at != "on the card" or (step.kind == "backward" and page not in ready)
            if step.kind == "backward":
                open_sums.add(page)
        if fault:
            yield f"the {step}: its page is {at}{sums}"
        count = sum(where != "on the host" for where in place.values())
        if count > paging.slots:
            yield f"at the {step}: {count} pages are on the card, and {paging.slots} may be"
    for page, where in place.items():
        if where != "on the host":
            yield f"page {page} is still {where} at the end"


def _sum_of(page: int, summed: set[int], ready: set[int], open_sums: set[int]) -> str:
    if page in open_sums:
        return ", with a gradient that is not on the host"
    return ", without the sum of the groups before" if page in summed and page not in ready else ""
