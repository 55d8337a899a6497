"""Traces the steps that `train.trace` names: each rank records its activities, and writes a trace file.

`yuan-train trace` merges the files of all ranks and puts the forecast beside them.

What a message between two nodes takes is measured while nothing else is under way (`LinkClock`): how long a
rank waits for a message says little of the link, for mostly the sender still computes. So at some steps'
ends, when no rank computes, a message of a known size goes over each link there and back, and both times are
one rank's: between two clocks nothing is compared. It takes the way of the run's own messages: the two edges
of a cut, or the gradient group where nodes share layers and no pipeline crosses the link. Of a node at most
one link is measured at once: two would share its network card. On cards the times are those of the stream,
which stands while it waits for a message.
"""

from __future__ import annotations

import json
import logging
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from yuan_train.config.errors import ConfigError
from yuan_train.config.load import write_text
from yuan_train.config.plan import node_of
from yuan_train.config.plan_constraints import plan_digest
from yuan_train.config.run import TraceConfig
from yuan_train.parallel.activity import Activity, during, observed_by
from yuan_train.parallel.device import Device, Mark
from yuan_train.parallel.grid import Edge, Grid, RankCoord
from yuan_train.parallel.groups import Groups, as_training_error, guard_world_collective, sum_over_world
from yuan_train.schedule.trace import (
    PROFILER_TID,
    TIDS_PER_RANK,
    Event,
    Span,
    TimedStep,
    TraceThread,
    nested_rows,
    step_span,
    trace_events,
    trace_path,
    trace_text,
)


class StepClock:
    """Seconds of each training step, from the end of the last synchronisation to the end of this one.

    A card works behind the host's back: the optimizer step is only enqueued when the host has done with a
    step, and weights may be on their way until the next forward waits for them. One clock that runs on, and
    is read when the device has finished its compute, loses none of this between two steps.
    """

    def __init__(
        self, synchronise: Callable[[], None], *, now: Callable[[], float] = time.perf_counter
    ) -> None:
        """`synchronise` waits until the device has finished all that was enqueued; `now` is in seconds."""
        self._synchronise, self._now = synchronise, now
        synchronise()
        self._since = now()

    def lap(self) -> float:
        """Seconds since the clock was made or since the last lap, pauses left out; waits for the device."""
        self._synchronise()
        end = self._now()
        seconds, self._since = end - self._since, end
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what belongs to no step, such as validation; waits for the device before and after."""
        self._synchronise()
        start = self._now()
        yield
        self._synchronise()
        self._since += self._now() - start


def device_clock(device: Device) -> StepClock:
    """The clock of a device; a CPU has finished when the host has."""
    # Of the compute alone: weights on their way must not hold up the next step's first layers.
    return StepClock(device.finish_compute, now=device.now)


ROUNDS = 16
"""All-gathers whose bounds are intersected; the one that was delayed least decides."""


@dataclass(frozen=True)
class SharedClock:
    """Turns this rank's `time.perf_counter` into seconds that mean the same on all ranks."""

    origin_seconds: float
    """This rank's clock when the shared clock is 0."""
    error_seconds: float
    """The shared clock is off by no more than this; 0 on rank 0, whose clock it is."""
    token: int
    """The same on all ranks that share it, and on no others."""

    def of(self, seconds: float) -> float:
        """The shared clock, when this rank's clock is at `seconds`."""
        return seconds - self.origin_seconds


def share_clock(coord: RankCoord) -> SharedClock:
    """The clock that all ranks share, which starts now; collective over all ranks."""
    token = random.getrandbits(48)
    if not dist.is_initialized():
        return SharedClock(time.perf_counter(), 0.0, token)
    times = torch.zeros(ROUNDS, 2, dtype=torch.float64)
    with guard_world_collective(coord, "the comparison of the ranks' clocks"):
        for number in range(ROUNDS):
            times[number, 0] = time.perf_counter()
            _all_gather(times[number, :1])
            times[number, 1] = time.perf_counter()
        gathered = _all_gather(torch.cat([times.flatten(), torch.tensor([token], dtype=torch.float64)]))
    first = gathered[0]
    reference_R2 = first[:-1].view(ROUNDS, 2)
    offset, error = bound_offset(times, reference_R2) if coord.rank else (0.0, 0.0)
    return SharedClock(float(reference_R2[0, 0]) + offset, error, int(first[-1]))


def bound_offset(own_R2: torch.Tensor, reference_R2: torch.Tensor) -> tuple[float, float]:
    """Own clock minus the reference's, in seconds, and how far off that may be.

    Of each of R collectives, [R, 2] are its begin and end on a clock. Data of each end has reached the other
    before the collective ended there, so no collective ends on one clock before it begins on the other:
    own begin - reference end <= offset <= own end - reference begin, for every one of them.
    """
    lowest = float((own_R2[:, 0] - reference_R2[:, 1]).max())
    highest = float((own_R2[:, 1] - reference_R2[:, 0]).min())
    return (lowest + highest) / 2, (highest - lowest) / 2


def _all_gather(values: torch.Tensor) -> list[torch.Tensor]:
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    return gathered


logger = logging.getLogger(__name__)

_CLOCK_MARK = "yuan_train clock"


@dataclass(frozen=True)
class Recorded:
    """An activity, and when it was, in seconds of this rank's `time.perf_counter`."""

    activity: Activity
    start_seconds: float
    end_seconds: float


class Recorder:
    """Observes activities and notes the times of their begins and ends.

    On CUDA these are events of the current stream: an activity begins when the card comes to it, and a wait
    for a message lasts as long as the stream stands, whatever the host does.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._marks: list[tuple[Activity, bool, Mark]] = []
        self._base = device.mark(timed=True)
        self._base.finish()
        self._base_seconds = device.now()

    def begin(self, activity: Activity) -> None:
        self._marks.append((activity, True, self._device.mark(timed=True)))

    def end(self, activity: Activity) -> None:
        self._marks.append((activity, False, self._device.mark(timed=True)))

    def recorded(self) -> list[Recorded]:
        """All activities, in the order of their begins; waits for the device."""
        self._device.finish()
        begun: list[int] = []
        found: list[Recorded] = []
        for activity, is_begin, mark in self._marks:
            seconds = self._base_seconds + mark.seconds_since(self._base)
            if is_begin:
                begun.append(len(found))
                found.append(Recorded(activity, seconds, seconds))
            else:
                at = begun.pop()
                assert found[at].activity is activity
                found[at] = Recorded(activity, found[at].start_seconds, seconds)
        assert not begun, "an activity has not ended"
        return found


class Tracer:
    """Traces the steps of one rank; writes its file after the last of them, or at the end of the run."""

    def __init__(
        self, config: TraceConfig | None, directory: str | None, *, grid: Grid, coord: RankCoord
    ) -> None:
        """Without `config` nothing is traced."""
        self._config, self._directory, self._grid, self._coord = config, directory, grid, coord
        self._recorder: Recorder | None = None
        self._clock: SharedClock | None = None
        self._profiler: _Profiler | None = None

    @contextmanager
    def step(self, number: int, device: Device, clock: StepClock) -> Iterator[None]:
        """Around training step `number`, which observers hear of; trace it if it is to be (collective).

        Comparing the ranks' clocks and writing the file are not in the step's time.
        """
        config = self._config
        if config is None or not config.first_step <= number <= config.last_step:
            with during(Activity("training_step", number=number)):
                yield
            return
        if self._recorder is None:
            with clock.paused():
                self._start(device, with_kernels=config.kernels)
        assert self._recorder is not None
        with observed_by(self._recorder), during(Activity("training_step", number=number)):
            yield
        if number == config.last_step:
            with clock.paused():
                self.finish()

    def finish(self) -> None:
        """Write what has been traced, if that is not done; a file that cannot be written is a warning."""
        if self._recorder is None:
            return
        assert self._directory is not None and self._clock is not None
        recorded = self._recorder.recorded()
        threads = trace_threads(recorded, self._clock, self._grid, self._coord)
        events = trace_events(threads)
        if self._profiler is not None:
            events += self._profiler.stop(self._clock, pid=self._coord.rank)
        self._recorder = self._profiler = None
        path = trace_path(self._directory, self._coord.rank)
        about = {
            "rank": self._coord.rank,
            "world_size": self._grid.plan.world_size,
            "plan": plan_digest(self._grid.plan),
            "token": self._clock.token,
            "clock_error_seconds": self._clock.error_seconds,
        }
        text = trace_text(events, about=about)
        try:
            write_text(path, text)
        except ConfigError as error:
            logger.warning("train.trace: %s", error)

    def _start(self, device: Device, *, with_kernels: bool) -> None:
        if with_kernels:
            self._profiler = _Profiler(device)
        self._clock = share_clock(self._coord)
        self._recorder = Recorder(device)


_THREADS = {
    "training_step": "measured",
    "load": "measured",
    "compute": "measured",
    "optimizer": "measured",
    "post": "messages",
    "send": "messages",
    "wait": "messages",
    "wait_copy": "messages",
    "drain": "messages",
    "start_grad_reduce": "reductions",
    "finish_grad_reduce": "reductions",
    "weight_sync": "reductions",
    "collective": "reductions",
    "idle": "reductions",
}


def trace_threads(
    recorded: Sequence[Recorded], clock: SharedClock, grid: Grid, coord: RankCoord
) -> list[TraceThread]:
    """The threads of a rank: `measured` (compute and optimizer), `messages`, `reductions` (gradients, weights
    and what all ranks exchange); more of a name where spans overlap."""
    spans: dict[str, list[Span]] = {name: [] for name in _THREADS.values()}
    in_flight = list(_in_flight(recorded, clock))
    training_step = 0
    for one in recorded:
        if one.activity.kind == "training_step":
            training_step = one.activity.number
        spans[_THREADS[one.activity.kind]].append(_span(one, clock, grid, coord, training_step))
    spans["reductions"] += in_flight
    threads: list[TraceThread] = []
    for name, own in spans.items():
        for number, row in enumerate(nested_rows(own) or [[]]):
            threads.append(
                TraceThread(
                    pid=coord.rank,
                    tid=coord.rank * TIDS_PER_RANK + len(threads),
                    process=grid.label(coord),
                    name=name if number == 0 else f"{name} {number + 1}",
                    spans=row,
                )
            )
    return threads


def _span(one: Recorded, clock: SharedClock, grid: Grid, coord: RankCoord, training_step: int) -> Span:
    activity, step = one.activity, one.activity.step
    start, end = clock.of(one.start_seconds), clock.of(one.end_seconds)
    if activity.kind not in ("compute", "send"):
        arguments: dict[str, Any] = {}
        if step is not None:
            arguments = {"pipeline": coord.pipeline, "stage": step.stage, "micro_batch": step.micro_batch}
        if step is not None and activity.kind == "wait":
            arguments["sender"] = grid.peer(coord, step.stage + SENDER[step.kind], step.micro_batch)
        if activity.ranks:
            arguments["ranks"] = list(activity.ranks)
        if activity.kind == "training_step":
            arguments["step"] = activity.number
        return Span(
            name=_name(activity),
            category=activity.kind,
            start_seconds=start,
            end_seconds=end,
            arguments=arguments,
            is_instant=activity.kind == "post",
        )
    assert step is not None
    return step_span(
        TimedStep(step, start, end),
        pipeline=coord.pipeline,
        # Within a tensor-parallel group the first rank sends and receives for all.
        arrows=f"{training_step}." if coord.tensor_rank == 0 else None,
    )


SENDER = {"receive_activation": -1, "receive_gradient": 1}
"""The sender's stage, from the receiver's."""


def _name(activity: Activity) -> str:
    step, number = activity.step, activity.number
    what = step.kind.removeprefix("receive_") if step is not None else ""
    micro_batch = step.micro_batch if step is not None else 0
    return {
        "training_step": f"step {number}",
        "load": f"data {micro_batch}",
        "post": f"{what} {micro_batch} posted",
        "wait": f"wait for {what} {micro_batch}",
        "wait_copy": f"wait for {what} {micro_batch}",
        "drain": "wait for the last sends",
        "start_grad_reduce": f"start bucket {number}",
        "finish_grad_reduce": f"wait for bucket {number}",
        "optimizer": "optimizer",
        "weight_sync": "weight sync",
        "collective": activity.what,
        "idle": f"wait for {activity.what}",
    }[activity.kind]


def _in_flight(recorded: Iterable[Recorded], clock: SharedClock) -> Iterator[Span]:
    """Of each gradient reduction, the time from its start to the end of the wait for it."""
    started: dict[int, Recorded] = {}
    for one in recorded:
        number = one.activity.number
        if one.activity.kind == "start_grad_reduce":
            started[number] = one
        elif one.activity.kind == "finish_grad_reduce" and number in started:
            yield Span(
                name=f"gradient reduction of bucket {number}",
                category="grad_reduce",
                start_seconds=clock.of(started.pop(number).start_seconds),
                end_seconds=clock.of(one.end_seconds),
                arguments={"bucket": number, "waited_seconds": one.end_seconds - one.start_seconds},
            )


class _Profiler:
    """torch.profiler, from its making to `stop`."""

    def __init__(self, device: Device) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.is_card:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()
        self._marked_seconds = time.perf_counter()
        with torch.profiler.record_function(_CLOCK_MARK):
            pass

    def stop(self, clock: SharedClock, *, pid: int) -> list[Event]:
        """Stop, and return the spans recorded since, as events of process `pid` on the shared clock."""
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            self._profile.export_chrome_trace(str(path))
            events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return profiler_events(events, mark_at=clock.of(self._marked_seconds), pid=pid)


def profiler_events(events: Iterable[Mapping[str, Any]], *, mark_at: float, pid: int) -> list[Event]:
    """The spans of torch.profiler, from the shared clock's 0 on, as threads of process `pid`.

    The mark, which torch.profiler saw too, ties its clock to the shared one: it was at `mark_at` seconds.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    mark = next(event for event in spans if event["name"] == _CLOCK_MARK)
    shift = mark_at * 1e6 - mark["ts"]
    threads: dict[tuple[object, object], int] = {}
    found: list[Event] = []
    for event in spans:
        start = round(event["ts"] + shift, 3)
        # Before that, the ranks compare their clocks; and some spans cover the whole profile.
        if start < 0:
            continue
        key = (event["pid"], event["tid"])
        if key not in threads:
            threads[key] = pid * TIDS_PER_RANK + PROFILER_TID + len(threads)
            on_card = event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
            name = f"kernels, stream {event['tid']}" if on_card else f"operators, thread {event['tid']}"
            where = {"pid": pid, "tid": threads[key]}
            found.append({"ph": "M", "name": "thread_name", **where, "args": {"name": name}})
        kept = {name: event[name] for name in ("ph", "name", "cat", "dur", "args") if name in event}
        found.append(kept | {"pid": pid, "tid": threads[key], "ts": start})
    return found


ELEMENTS = 128 * 1024
"""Of fp32, of a message that is timed: half a MiB outlasts the latency of a fast network, and is through a
slow one, of 100 Mb/s, in 42 ms."""


@dataclass(frozen=True)
class NodeLink:
    """How two nodes exchange messages; or several, that sum gradients in a ring."""

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    """Those that measure it; the first one has the clock."""
    edges: tuple[Edge, Edge] | None
    """From the first rank to the second, and back; None: a gradient group of the ranks."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of what is measured: each direction, or the whole group."""
        if self.edges is None:
            return (" - ".join(self.nodes),)
        first, second = self.nodes
        return f"{first} -> {second}", f"{second} -> {first}"


def find_links(grid: Grid) -> tuple[tuple[NodeLink, ...], ...]:
    """The links of a plan, one for each pair of nodes that exchange messages; those of a round share no node.

    Arithmetic only, the same on every rank.
    """
    node = {entry.rank: node_of(entry) for entry in grid.plan.ranks}
    found: dict[frozenset[str], NodeLink] = {}
    known = frozenset(grid.edges)
    for there in grid.edges:
        back = Edge(there.pipeline, there.stage + 1, False, there.receiver, there.sender)
        ranks = there.sender, there.receiver
        nodes = tuple(node[rank] for rank in ranks)
        if there.is_activation and back in known and nodes[0] != nodes[1]:
            found.setdefault(frozenset(nodes), NodeLink(nodes, ranks, (there, back)))
    for bucket in grid.buckets:
        for index in range(bucket.num_slices if len(bucket.owners) > 1 else 0):
            ranks = bucket.slice_group(index)
            nodes = tuple(dict.fromkeys(node[rank] for rank in ranks))
            if len(nodes) > 1:
                found.setdefault(frozenset(nodes), NodeLink(nodes, ranks, None))
    rounds: list[list[NodeLink]] = []
    for key, link in found.items():
        free = (own for own in rounds if all(key.isdisjoint(other.nodes) for other in own))
        own = next(free, None)
        if own is None:
            rounds.append(own := [])
        own.append(link)
    return tuple(map(tuple, rounds))


class LinkClock:
    """Measures the links of a plan, at the moments at which it is asked to."""

    def __init__(self, grid: Grid, coord: RankCoord, groups: Groups, device: Device) -> None:
        # Another engine's ranks have no groups of ours, all of them alike.
        self._rounds = find_links(grid) if groups.edges or groups.owners else ()
        self._coord, self._groups, self._device = coord, groups, device
        self._names = [name for own in self._rounds for link in own for name in link.names]
        self._payload: torch.Tensor | None = None

    @property
    def has_links(self) -> bool:
        """Whether there is anything to measure."""
        return bool(self._rounds)

    def measure(self) -> dict[str, float]:
        """By link, seconds that a message of half a MiB takes: `a -> b`, or of a gradient group `a - b`.

        Collective over all ranks, of which none may have anything else under way. Raises LostRank.
        """
        found: list[float] = []
        for own in self._rounds:
            self._sum(torch.zeros(1), "the wait before links are measured")
            for link in own:
                is_mine = self._coord.rank in link.ranks
                with as_training_error(self._coord):
                    times = self._time(link) if is_mine else [0.0] * len(link.names)
                found += times if self._coord.rank == link.ranks[0] else [0.0] * len(times)
        seconds = torch.tensor(found, dtype=torch.float64)
        self._sum(seconds, "the sum of what links take")
        return dict(zip(self._names, seconds.tolist(), strict=True))

    def _sum(self, totals: torch.Tensor, what: str) -> None:
        sum_over_world(self._groups, self._coord, totals, what)

    def _time(self, link: NodeLink) -> list[float]:
        """Seconds of each of its names, on its first rank; that rank's alone mean something."""
        if self._payload is None:
            self._payload = torch.zeros(ELEMENTS, device=self._device.torch)
        # The first exchange, of next to nothing, waits for those who come late.
        if link.edges is None:
            return [self._sum_gradients(link, size) for size in (1, ELEMENTS)][1:]
        turns = ((1, 1), (ELEMENTS, 1), (1, ELEMENTS))
        return [self._exchange(link.edges, sizes) for sizes in turns][1:]

    def _exchange(self, edges: tuple[Edge, Edge], sizes: Sequence[int]) -> float:
        """Seconds in which a message of so many elements went, and the answer came."""
        assert self._payload is not None
        there, back = (self._groups.edges[edge] for edge in edges)
        out, answer = (self._payload[:size] for size in sizes)
        first, second = edges[0].sender, edges[0].receiver
        begun = self._device.mark(timed=True)
        if self._coord.rank == first:
            there.send(out, second).wait()
            back.post(tuple(answer.shape), answer.dtype, second).take()
        else:
            there.post(tuple(out.shape), out.dtype, first).take()
            back.send(answer, first).wait()
        return self._since(begun)

    def _sum_gradients(self, link: NodeLink, size: int) -> float:
        """Seconds of a sum of so many elements over the group."""
        assert self._payload is not None
        begun = self._device.mark(timed=True)
        transport = self._groups.owners[link.ranks]
        transport.all_reduce(self._payload[:size], "the sum that measures a link").wait()
        return self._since(begun)

    def _since(self, begun: Mark) -> float:
        ended = self._device.mark(timed=True)
        ended.finish()
        return ended.seconds_since(begun)
