"""Proof, before anything runs, that a table can run: messages pair up, and nothing waits for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from yuan_train.schedule.step import Kind, Lane, Step, Table

_SENT: dict[Kind, Kind] = {"send_activation": "forward", "send_gradient": "backward"}
_PAIRS = {"send_activation": ("receive_activation", 1), "send_gradient": ("receive_gradient", -1)}


def check_table(table: Table) -> None:
    """Raise ValueError, with every fault, unless the table is whole and free of deadlock.

    Whole: each stage takes each step of every micro-batch once, forwards before backwards, sends after what
    they send; each send has its receive at the neighbour, in the same order at both ends. Free of deadlock
    even on a transport that buffers nothing, where a send holds its stage until the receive is posted.
    """
    faults = [*_step_faults(table), *_message_faults(table)]
    if not faults:
        faults = list(_deadlocks(table))
    if faults:
        raise ValueError("\n".join(faults))


def peak_in_flight(lane: Lane) -> int:
    """Most micro-batches whose forward has begun and whose backward has not ended."""
    alive = peak = 0
    for step in lane:
        if step.kind == "forward":
            alive += 1
            peak = max(peak, alive)
        elif step.kind == "backward":
            alive -= 1
    return peak


def _step_faults(table: Table) -> Iterator[str]:
    trains = any(step.kind == "backward" for lane in table for step in lane)
    micro_batches = {step.micro_batch for lane in table for step in lane if step.kind == "forward"}
    for stage, lane in enumerate(table):
        done: set[Step] = set()
        for step in lane:
            if step.stage != stage:
                yield f"lane {stage} holds a {step}"
            if step in done:
                yield f"the {step} stands twice"
            if step.kind == "backward" and Step("forward", stage, step.micro_batch) not in done:
                yield f"the {step} stands before its forward"
            made_by = _SENT.get(step.kind)
            if made_by and Step(made_by, stage, step.micro_batch) not in done:
                yield f"the {step} stands before the {made_by} whose result it sends"
            done.add(step)
        forwards = {step.micro_batch for step in lane if step.kind == "forward"}
        backwards = {step.micro_batch for step in lane if step.kind == "backward"}
        if trains and forwards != backwards:
            yield f"stage {stage}: micro-batches {sorted(forwards ^ backwards)} go only one way"
        if missing := micro_batches - forwards:
            yield f"stage {stage}: no forward of micro-batches {sorted(missing)}, which other stages have"


def _message_faults(table: Table) -> Iterator[str]:
    known = Counter(step for lane in table for step in lane)
    for stage, lane in enumerate(table):
        for send, (receive, offset) in _PAIRS.items():
            peer = stage + offset
            sent = [step.micro_batch for step in lane if step.kind == send]
            lane_there = table[peer] if 0 <= peer < len(table) else ()
            received = [step.micro_batch for step in lane_there if step.kind == receive]
            if Counter(sent) != Counter(received):
                yield f"stage {stage} {send} {sent}, but stage {peer} {receive} {received}"
            elif sent != received:
                yield f"{send} of stage {stage}: sent in the order {sent}, received in the order {received}"
        before: set[Step] = set()
        for step in lane:
            before.add(step)
            beyond = (stage == 0 and step.kind == "receive_activation") or (
                stage == len(table) - 1 and step.kind == "receive_gradient"
            )
            if beyond:
                yield f"the {step} has nobody to receive from"
            message = {"forward": "receive_activation", "backward": "receive_gradient"}.get(step.kind)
            first_or_last = stage == (0 if step.kind == "forward" else len(table) - 1)
            if message is None or first_or_last:
                continue
            posted = Step(message, stage, step.micro_batch)  # type: ignore[arg-type]
            if known[posted] and posted not in before:
                yield f"the {posted} is posted after the {step} that needs it"
            if not known[posted]:
                yield f"the {step} has no message to work on"


def _deadlocks(table: Table) -> Iterator[str]:
    position = [0] * len(table)
    posted: set[Step] = set()
    sent: set[Step] = set()

    def waits_for(step: Step) -> Step | None:
        if step.kind in _PAIRS:
            kind, offset = _PAIRS[step.kind]
            receive = Step(kind, step.stage + offset, step.micro_batch)  # type: ignore[arg-type]
            return None if receive in posted else receive
        if step.kind == "forward" and step.stage > 0:
            send = Step("send_activation", step.stage - 1, step.micro_batch)
            return None if send in sent else send
        if step.kind == "backward" and step.stage < len(table) - 1:
            send = Step("send_gradient", step.stage + 1, step.micro_batch)
            return None if send in sent else send
        return None

    moved = True
    while moved:
        moved = False
        for stage, lane in enumerate(table):
            while position[stage] < len(lane) and waits_for(lane[position[stage]]) is None:
                step = lane[position[stage]]
                (posted if step.kind.startswith("receive") else sent).add(step)
                position[stage] += 1
                moved = True
    for stage, lane in enumerate(table):
        if position[stage] < len(lane):
            step = lane[position[stage]]
            yield f"deadlock: the {step} waits for ever for the {waits_for(step)}"
