"""A training run of one rank, from the first step to the last checkpoint: the one loop of every engine.

Reads top to bottom: connect and build, open the log, step, measure, save; and move to another plan.

A supervisor writes the plan and sends SIGUSR1, which is heard as SIGTERM is: at the end of a step all ranks
learn of it together. They agree on the plan, or that it takes a restart, for which they save and end. A move
is a save and a load, without the files: what a checkpoint holds goes from the old parts to the new ones
(`saver.RanksMemory`).

A device never holds two sets of anything: gradients and weights in 16 bits are freed before the new ones are
made, and a card's state waits in host memory meanwhile. On a processor, whose memory that is, the old masters
and moments stay beside the new ones until these are filled.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from yuan_train.checkpoint.load import LocalShard, holds_optimizer_state
from yuan_train.config.errors import NOT_IN_PLACE, TrainingError, YuanError
from yuan_train.config.express import check_engine
from yuan_train.config.load import as_plain, dump, write_text
from yuan_train.config.plan import Plan, node_of, unlike_owners
from yuan_train.config.plan_constraints import (
    check_plan_of_run,
    check_precision,
    keep_plan,
    load_plan,
    plan_digest,
    restart_reason,
)
from yuan_train.config.run import OptimizerConfig
from yuan_train.config.units import show_bytes, show_seconds
from yuan_train.data.loader import Blend
from yuan_train.parallel.apply import take_apart
from yuan_train.parallel.board import meet
from yuan_train.parallel.device import (
    Device,
    available_bytes,
    can_track_memory,
    keep_freed_memory,
    release_free_memory,
    reset_peak_memory,
)
from yuan_train.parallel.groups import (
    as_training_error,
    enter_world,
    gather_objects,
    guard_world_collective,
    share_object,
    sum_over_world,
)
from yuan_train.train.agreement import agree_on_job, holding_directories
from yuan_train.train.build import build, build_engine
from yuan_train.train.ending import StopRequest, ending_together, explaining_memory, stop_on_sigterm, watching
from yuan_train.train.engine import (
    BuildEngine,
    Engine,
    Progress,
    StepRecord,
    StepRequest,
    StepResult,
    measure_step,
)
from yuan_train.train.job import Job, machine_id, wait_for_steps
from yuan_train.train.metrics import Log, Moved
from yuan_train.train.saver import (
    Keeper,
    LiveCheckpoint,
    RanksMemory,
    Saver,
    checkpoint_state,
    keeping,
    make_saver,
    save_progress,
)
from yuan_train.train.step import Trainer
from yuan_train.train.trace import LinkClock, Tracer, device_clock


def train(job: Job, build: BuildEngine = build_engine) -> None:
    """Run a job to its last step, or until SIGTERM; collective over all ranks. Raises YuanError.

    `build` builds the engine.
    """
    board = None
    if job.position.world_size > 1:
        board = meet(job.run.train.startup_timeout, place=job.plan.ranks[job.position.rank].device)
    with ending_together(board, job.device) as ending, ExitStack() as held:

        @contextmanager
        def guarding(job: Job) -> Iterator[None]:
            with ending.telling(), explaining_memory(job.plan, job.position.rank, job.device):
                yield

        with guarding(job):
            keep_freed_memory(job.device)
            if board is not None:
                enter_world(board, device=job.device, timeout_seconds=job.run.train.timeout)
            held.enter_context(holding_directories(job))
            job, engine, progress = build(agree_on_job(job))
            run_loop(job, engine, progress, guarding=guarding, tell_stop=ending.tell_stop)


def run_loop(
    job: Job,
    engine: Engine,
    progress: Progress,
    *,
    guarding: Callable[[Job], AbstractContextManager[object]] = nullcontext,
    tell_stop: Callable[[], None] | None = None,
    hear_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Step, log, evaluate, save and stop, from `progress` to the last step: for every engine.

    `guarding` is around all that may fail, under the plan of a job, inside of what waits for others at its
    end; `tell_stop` tells the other ranks that SIGTERM has stopped this one, `hear_stop` says whether it has
    one of another role. Collective over all ranks. Raises YuanError.
    """
    with (
        stop_on_sigterm(tell_stop, hear_stop) as asked,
        _open_log(job, progress) as log,
        # Outside of the saver, whose end is when all is on disk.
        keeping(job, log) as keeper,
        make_saver(job, engine, log) as saver,
    ):
        watched = partial(
            watching, timeout_seconds=job.run.train.timeout, last_good=lambda: _last_good(saver.saved)
        )
        if keeper is not None and 0 < progress.step < job.run.train.steps:
            with guarding(job):
                # The nodes are others than before: another one may be lost before the next step that is kept.
                keeper.keep(job, engine, progress)
        left = Left(progress, job.plan, since=time.perf_counter())
        moved: Moved | None = None
        while left.plan is not None:
            world = engine.world
            with engine.reading(), watched(world.grid, world.coord, job.device), guarding(job):
                _begin(job, engine, progress, log)
                left = _run_steps(job, engine, progress, log, (saver, keeper), asked, moved)
                if left.plan is None and saver.started != left.progress.step:
                    save_progress(job, engine, left.progress, saver)
            if left.plan is not None:
                with guarding(replace(job, plan=left.plan)):
                    job, engine, progress, num_bytes = move_to(left.plan, job, engine, left.progress)
                saver.coord = engine.world.coord
                moved = Moved(plan_digest(job.plan), time.perf_counter() - left.since, num_bytes)
                _log_move(job, progress, moved, log)


@dataclass(frozen=True)
class Left:
    """Where the steps of a plan have ended."""

    progress: Progress
    plan: Plan | None
    """With which the run goes on; None: it ends."""
    since: float
    """When they had, on this process's `time.perf_counter`."""


def _begin(job: Job, engine: Engine, progress: Progress, log: Log | None) -> None:
    """What is left to do before the first step of an engine; collective over all ranks."""
    note = engine.prepare(job, progress)
    if log is not None and note is not None:
        log.say(note)
    if log is not None and progress.step >= job.run.train.steps:
        log.say(f"nothing left to train: train.steps is {job.run.train.steps}, and {progress.step} are done")


@contextmanager
def _open_log(job: Job, progress: Progress) -> Iterator[Log | None]:
    """The log of the run; None on every rank but 0."""
    if job.position.rank > 0:
        yield None
        return
    log = Log(job.run, first_step=progress.step + 1)
    try:
        _log_start(job, progress, log)
        yield log
    finally:
        log.close()


def _log_start(job: Job, progress: Progress, log: Log) -> None:
    """Log what the run starts from, and save the resolved config and the plan in the log directory."""
    run, plan = job.run, job.plan
    if job.checkpoint is not None:
        for note in job.checkpoint.notes:
            log.say(f"note: {note}")
        weights_only = "" if holds_optimizer_state(job.checkpoint) else " (weights only; new optimizer state)"
        log.say(f"resumed from {job.checkpoint.path} after step {progress.step}{weights_only}")
        if progress.step and _blend_differs(job):
            log.say(
                "note: data.train has other corpora or weights than when the checkpoint was saved: samples "
                "are assigned to steps anew, so some may be read twice and others not at all"
            )
        for change in changes(job) if progress.step else ():
            log.say(f"note: not as in the run that saved it: {change}")
    for note in many_epochs(job):
        log.say(f"note: {note}")
    if job.start is not None:
        log.say(f"begins with the weights of {job.start.path}")
    trained = "" if run.model.lora is None else f" ({sum(run.model.trained_unit_parameters):,} trained)"
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    log.say(
        f"{run.model.name}: {run.model.parameters:,} parameters{trained}, {ranks}, "
        f"layers per stage {_layers(plan)}, {run.train.precision} on {job.device.torch.type}"
    )
    if (unlike := unlike_owners(plan)) is not None:
        log.say(_drift_note(plan, *unlike))
    if run.log.directory is not None:
        write_text(Path(run.log.directory) / "config.yaml", dump(run))
        kept = keep_plan(run.log.directory, plan, step=progress.step)
        if kept.name != "plan.yaml":
            log.say(f"note: {kept.parent / 'plan.yaml'} is another plan, and stays; this one is in {kept}")


def _log_move(job: Job, progress: Progress, moved: Moved, log: Log | None) -> None:
    """Log a move, and save the plan in the log directory."""
    if log is None:
        return
    kept = ""
    if job.run.log.directory is not None:
        kept = f"; the plan is in {keep_plan(job.run.log.directory, job.plan, step=progress.step)}"
    log.say(
        f"moved in place after step {progress.step}, in {show_seconds(moved.seconds)}, with "
        f"{show_bytes(moved.bytes)} sent between ranks: layers per stage {_layers(job.plan)}{kept}"
    )


def _layers(plan: Plan) -> str:
    """`2,3 | 5`, by pipeline and stage."""
    return " | ".join(
        ",".join(str(stage.num_layers) for stage in pipeline.stages) for pipeline in plan.pipelines
    )


def _drift_note(plan: Plan, rank: int, other: int) -> str:
    """What to say of two ranks that step the same weights by unlike arithmetic."""
    types = {entry.rank: entry.type for entry in plan.ranks}
    ways = (
        "give each tensor-parallel group cards of one type"
        if plan.optimizer_sharding
        else "set optimizer_sharding: true in the plan, with which each element has one owner"
    )
    both = f"{rank} ({types[rank]}) and {other} ({types[other]})"
    return (
        f"note: ranks {both} each step the same weights, on unlike cards or hosts, which "
        f"round differently: the weights drift apart. To prevent it, {ways}; "
        "train.check_every says when they do"
    )


def _blend_differs(job: Job) -> bool:
    """Whether the training corpora, or their weights, are others than those of the checkpoint's run."""
    assert job.checkpoint is not None
    state, files = job.checkpoint.state, job.train.fingerprints
    saved = state.get("run", {}).get("data", {}).get("train")
    return bool(saved) and (
        saved != as_plain(job.run)["data"]["train"] or state.get("corpora", files) != files
    )


def _run_steps(
    job: Job,
    engine: Engine,
    progress: Progress,
    log: Log | None,
    savers: tuple[Saver, Keeper | None],
    asked: StopRequest,
    moved: Moved | None,
) -> Left:
    """Train from `progress` to the last step, or to a move, logging and saving on the way.

    `moved`: how the run has come to this plan.
    """
    run, clock = job.run, device_clock(job.device)
    saver, keeper = savers
    tracer = Tracer(run.train.trace, run.log.directory, grid=engine.world.grid, coord=engine.world.coord)
    links = LinkClock(engine.world.grid, engine.world.coord, engine.world.groups, job.device)
    plan, since = None, 0.0
    while progress.step < run.train.steps and plan is None:
        with tracer.step(progress.step + 1, job.device, clock):
            request = _request(job, progress, stop=asked.heard() or asked.moves or saver.failed())
            result = _step(job, engine, request, progress.step + 1, saver)
            progress = progress.advance(run, result)
            measured = measure_step(job, engine, progress.step, clock)
        with clock.paused():
            measured = replace(measured, links=_measure_links(job, engine, progress.step, links), moved=moved)
            moved = None
            evaluation = engine.evaluate(job, progress.step)
            _check_bits(job, engine, progress.step, saver)
        if log is not None:
            log.write(engine.describe(job, StepRecord(progress, request, result, measured, evaluation)))
            if result.is_empty:
                log.say(f"note: no token of step {progress.step} has a loss: weights stay as they were")
        if keeper is not None and progress.step % run.checkpoint.in_memory == 0:
            with clock.paused():
                keeper.keep(job, engine, progress)
        is_due = run.checkpoint.every and progress.step % run.checkpoint.every == 0
        if is_due or engine.kept_step == progress.step:
            with clock.paused():
                save_progress(job, engine, progress, saver)
        if result.stop:
            since = time.perf_counter()
            with clock.paused():
                saver.wait()  # Raises if the reason to stop is a failed save.
                found = agree_on_plan(job, engine, asked, is_last=progress.step == run.train.steps)
            if isinstance(found, str):
                if saver.exports is not None:
                    # Whoever sends SIGTERM gives a run the time of a checkpoint, not of another copy.
                    saver.exports.drop()
                if log is not None:
                    log.say(f"{found} after step {progress.step}")
                break
            plan = found if found != job.plan else None
    with as_training_error(engine.world.coord):
        engine.finish()
    tracer.finish()
    return Left(progress, plan, since)


def learning_rate(step: int, config: OptimizerConfig, *, decay_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Linear warm-up, then cosine (Yuan 2.0 paper, section 4.1) or linear decay to the minimum at
    `decay_steps`, then the minimum. With schedule `constant` there is no decay.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (step + 1 - config.warmup_steps) / (decay_steps - config.warmup_steps))
    factor = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.minimum_learning_rate + factor * (config.learning_rate - config.minimum_learning_rate)


def _request(job: Job, progress: Progress, *, stop: bool) -> StepRequest:
    """The step after `progress`."""
    run, scaling, scaler = job.run, job.run.train.scaling, progress.scaler
    return StepRequest(
        job.train,
        first_sample=progress.sequences,
        lr=learning_rate(progress.step, run.optimizer, decay_steps=run.decay_steps),
        clip=run.optimizer.clip_grad_norm,
        scale=scaler.scale if scaler else 1.0,
        may_skip=scaling is not None and scaler is not None and scaler.scale > scaling.minimum,
        check=_is_checked(job, progress.step + 1),
        stop=stop,
    )


def _step(job: Job, engine: Engine, request: StepRequest, number: int, saver: Saver) -> StepResult:
    """One training step. Raises TrainingError that names the step and the last good checkpoint."""
    try:
        with explaining_memory(job.plan, job.position.rank, job.device):
            return engine.step(request)
    except TrainingError as error:
        between = "\n" if "\n" in str(error) else "; "
        raise type(error)(f"step {number}: {error}{between}{_last_good(saver.saved)}") from error


def _measure_links(job: Job, engine: Engine, step: int, links: LinkClock) -> Mapping[str, float] | None:
    """What a message takes over each link between nodes, if that is due after a step; collective over all
    ranks."""
    every = job.run.train.links_every
    if not every or step % every or not links.has_links:
        return None
    with as_training_error(engine.world.coord):
        # Weights on their way to other owners would share the links.
        engine.finish()
    return links.measure()


def _is_checked(job: Job, step: int) -> bool:
    """Whether the bits of a step and of the weights after it are checked."""
    every = job.run.train.check_every
    return every > 0 and step % every == 0


def _check_bits(job: Job, engine: Engine, step: int, saver: Saver) -> None:
    """Check messages, gradients and weights if it is due after a step; collective over all ranks.

    Raises TrainingError that names the step, the ranks, and the last step after which all was well.
    """
    every = job.run.train.check_every
    if not _is_checked(job, step):
        return
    try:
        with as_training_error(engine.world.coord):
            engine.check_bits()
    except TrainingError as error:
        before = f"step {step - every}" if step > every else "the start"
        said = f"after step {step}: {error} (last after {before}); {_last_good(saver.saved)}"
        raise type(error)(said) from error


def _last_good(saved: int | None) -> str:
    if saved is None:
        return "no checkpoint is saved yet"
    return f"the last good checkpoint is that of step {saved}"


MANY_EPOCHS = 20
"""A corpus that is read so often is told: mostly a step takes more tokens than was thought."""
_FREE = "train.trace", "train.links_every", "model.name", "data.train", "data.validation"
"""Keys that change no weight; of `data.train` there is a note of its own."""


def changes(job: Job) -> list[str]:
    """What of training is another than in the run that saved the checkpoint, as `KEY OLD -> NEW`."""
    if job.checkpoint is None:
        return []
    parts = ("model", "train", "data", "optimizer", "objective")
    return differences(job.checkpoint.state.get("run", {}), job.run, parts)


def differences(saved: Mapping[str, Any], run: Any, parts: tuple[str, ...]) -> list[str]:
    """What is another than saved in some parts of a run, as `KEY OLD -> NEW`."""
    return [change for change in _changed(saved, as_plain(run), run, "") if change.startswith(parts)]


def _changed(before: Any, after: Any, value: Any, path: str) -> Iterator[str]:
    """The changes of one value, which is `after` as plain values, where those leave out what is None."""
    if is_dataclass(value) and isinstance(before, Mapping):
        for field in fields(value):
            key = field.name
            if key in before or field.default is None:  # Else another version has saved it.
                inner = f"{path}.{key}" if path else key
                yield from _changed(before.get(key), after.get(key), getattr(value, key), inner)
    elif before != after and not path.startswith(_FREE):
        yield f"{path} {before} -> {after}"


def many_epochs(job: Job) -> list[str]:
    """Of each corpus that the run reads many times over, how often."""
    if not isinstance(job.train, Blend):
        return []
    found: list[str] = []
    samples = job.run.train.steps * job.run.train.global_batch_size
    for corpus, weight in zip(job.train.corpora, job.train.weights, strict=True):
        epochs = weight * samples / corpus.samples_per_epoch
        if epochs >= MANY_EPOCHS:
            found.append(
                f"the run reads {corpus.prefix} {epochs:,.0f} times over: it has "
                f"{corpus.samples_per_epoch:,} samples, a step takes {job.run.train.global_batch_size:,}"
            )
    return found


HOST_SHARE = 0.8
"""Of the host memory that is free, what the state of a node's cards may take while it waits there."""


def agree_on_plan(job: Job, engine: Engine, asked: StopRequest, *, is_last: bool) -> Plan | str:
    """After a step at whose end some rank wants to stop: the plan with which all go on, which may be the one
    that they have; or, in words, why the run ends here. Collective over all ranks.

    `is_last`: there is no other step.
    """
    with guard_world_collective(engine.world.coord, "the agreement on another plan"):
        told = gather_objects((asked.heard(), asked.take_move()))
        movers = [(rank, path) for rank, (_, path) in enumerate(told) if path is not None]
        if any(is_end for is_end, _ in told) or not movers:
            return "stopped by SIGTERM"
        if is_last:
            return "all is done"
        first, path = movers[0]
        plan = share_object(_read(path) if job.position.rank == first else "", source=first)
        if isinstance(plan, Plan) and plan != job.plan:
            plan = _obstacle(job, engine, plan) or plan
    return plan if isinstance(plan, Plan) else f"{NOT_IN_PLACE}{plan}; saved for a restart"


def _read(path: Path) -> Plan | str:
    """The plan of a file, or what is wrong with it."""
    try:
        return load_plan(path)
    except YuanError as error:
        return str(error)


def _obstacle(job: Job, engine: Engine, plan: Plan) -> str | None:
    """Why the ranks cannot go on under a plan as they are; None: they can. The same on all ranks."""
    if not isinstance(engine, Trainer):
        return "another engine than ours trains"
    reason = restart_reason(job.plan, plan, job.run)
    if reason is not None:
        return reason
    try:
        check_plan_of_run(plan, job.run)
        check_precision(plan, job.run)
        check_engine(plan, job.run)
    except YuanError as error:
        return str(error)
    if wait_for_steps(job.run, plan) != job.run:
        return "its steps take longer than ranks wait for each other (train.timeout)"
    return _lacking_room(job, engine)


def _lacking_room(job: Job, trainer: Trainer) -> str | None:
    """Where the hosts have not enough memory for the state of their cards; collective over all ranks."""
    wanted = 0
    if job.device.is_card:
        wanted = sum(box.tensor.nbytes for s in trainer.tensors("held").values() for box in s.boxes)
    totals, free, names = defaultdict[str, int](int), dict[str, float](), dict[str, str]()
    node = node_of(job.plan.ranks[job.position.rank])
    for machine, name, size, available in gather_objects((machine_id(), node, wanted, available_bytes())):
        totals[machine] += size
        free[machine] = min(available, free.get(machine, available))
        names.setdefault(machine, name)
    for machine, size in totals.items():
        if size > HOST_SHARE * free[machine]:
            return (
                f"the state of the cards of {names[machine]}, {show_bytes(size)}, does not fit its host's "
                f"memory, of which {show_bytes(free[machine])} are free"
            )
    return None


def move_to(plan: Plan, job: Job, engine: Engine, progress: Progress) -> tuple[Job, Trainer, Progress, int]:
    """Go on under a plan on which all ranks have agreed: the job, the engine and its progress, and the bytes
    of state that were sent between ranks. Collective over all ranks; the old engine can do nothing any more.

    Raises TrainingError if a rank is lost.
    """
    with guard_world_collective(engine.world.coord, "the move to another plan"):
        memory, state = _take_apart(job, cast(Trainer, engine), progress)
        checkpoint = LiveCheckpoint(Path("the memory of the ranks"), state, memory=memory)
        trainer, progress = build(replace(job, plan=plan, checkpoint=checkpoint))
    sent = torch.tensor([float(memory.num_bytes)], dtype=torch.float64)
    sum_over_world(
        trainer.runtime.groups, trainer.runtime.coord, sent, "the sum of the bytes that were moved"
    )
    del memory, checkpoint
    if can_track_memory(job.device):
        reset_peak_memory(job.device)
    return replace(job, plan=plan), trainer, progress, int(sent)


def _take_apart(job: Job, trainer: Trainer, progress: Progress) -> tuple[RanksMemory, dict[str, Any]]:
    """What a checkpoint would hold of an engine, of which nothing else stays."""
    state = checkpoint_state(job, trainer, progress)
    trainer.finish()
    held = _on_host(trainer.tensors("held"), job.device)
    # Once all have told what they hold, nobody waits for anything of the groups.
    memory = RanksMemory(held, node_of(job.plan.ranks[job.position.rank]))
    take_apart(trainer.runtime, [box.tensor for shard in held.values() for box in shard.boxes])
    release_free_memory(job.device)
    return memory, state


def _on_host(shards: Mapping[str, LocalShard], device: Device) -> Mapping[str, LocalShard]:
    """What a rank holds, in host memory: of a card a copy."""
    if not device.is_card:
        return shards
    return {
        key: replace(
            shard, boxes=tuple(replace(box, tensor=device.to_host(box.tensor)) for box in shard.boxes)
        )
        for key, shard in shards.items()
    }
