"""Gradients: flat buffers of them and of weights, their reduction and their norm; products added or deferred.

Reductions start inside the last backwards of a rank program, in one order on all ranks. A bucket's may start
when its last gradient is complete: inside the last backward of the stages that hold its units or, where
backwards are split, inside the last weight gradients. All ranks start their reductions in the reverse of the
model's order, in which gradients mostly become complete; a bucket that is complete before its turn waits for
it. Two ranks that share several groups need one order.

This cannot deadlock: starting does not block; a rank waits for the ends when its program has ended and all
its reductions have started; and no program waits for a reduction. So every rank of a reduction starts it, in
the same order as the others.

Weight gradients of linears, experts, routers and filters are added to fp32 buckets at once, or later. A
product of 16-bit matrices is added to the bucket in fp32, without a rounded gradient in between. Split in two
(zero bubble, Qi et al. 2023), a backward computes the gradients of inputs and defers those of these weights
until `flush`. All other weight gradients (norms, embedding, head) are small, or were computed in the forward,
and belong to the first part. Of the embedding's only the rows of a micro-batch's tokens are added: torch
would write and add a whole matrix [V, H]. Under tensor parallelism the products of column matrices wait for
the all-reduce of their input's gradient, and run beside it (as in Megatron-LM's
`LinearWithGradAccumulationAndAsyncCommunication`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from yuan_kernels import ops

from yuan_train.config.model import ADAPTERS
from yuan_train.parallel.activity import Activity, during
from yuan_train.parallel.device import HostSlab
from yuan_train.parallel.grid import Bucket
from yuan_train.parallel.shard import Shard, num_elements, part_of, sharding_style
from yuan_train.schedule.step import RankProgram, Step

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of masters and gradients for weights of `dtype`: fp32 for bf16 and fp16, else the same."""
    return torch.float32 if dtype in _LOW_PRECISION else dtype


@dataclass(frozen=True)
class Piece:
    """The position of a parameter in a flat buffer: elements [start, start + length)."""

    name: str
    shard: Shard
    start: int
    length: int


@dataclass(frozen=True)
class Slice:
    """One of the equal parts of a bucket; owners of different widths reduce gradients slice by slice.

    Laid out like the bucket: matrices, sharded vectors, replicated vectors; of adapters sharded matrices come
    before replicated ones. What is replicated is in every slice, and counts only in slice 0.
    """

    index: int
    """Number of the slice in the bucket."""
    local_index: int
    """Number among the slices that this rank holds."""
    group: tuple[int, ...]
    """The ranks that hold it, one of each owner."""
    pieces: tuple[Piece, ...]
    num_matrix_elements: int
    num_sharded_elements: int

    @property
    def num_elements(self) -> int:
        """Elements of the slice, replicated parameters included."""
        last = self.pieces[-1]
        return last.start + last.length

    @property
    def num_counted_elements(self) -> int:
        """The leading elements that count in this slice; what is replicated counts in slice 0 only."""
        return self.num_elements if self.index == 0 else self.num_sharded_elements


class FlatBucket:
    """The parameters of one bucket that a rank holds, end to end in flat buffers.

    `gradient` [n] holds the gradient summed over micro-batches, in fp32 (fp64 for fp64 models); `weights` [n]
    holds the model's weights in their own precision. The parameters become views of `weights`, and autograd
    accumulates into `gradient`.

    A bucket of a range of experts holds rows of one parameter that other buckets hold too: `shards` says
    which, and its buffers are parts of `whole`, the buffers of the parameter.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: Mapping[str, torch.nn.Parameter],
        shards: Mapping[str, Shard],
        *,
        rank: int,
        whole: FlatParameter | None = None,
        slab: HostSlab | None = None,
    ) -> None:
        """`slab`: the bucket is a page of the host, whose buffers are pieces of it."""
        self.bucket = bucket
        """The units, and who holds them."""
        self.rank = rank
        self.is_paged = slab is not None
        self.num_slices = bucket.num_slices
        self.owners_are_alike = len({len(owner) for owner in bucket.owners}) == 1
        """Whether all owners have the same tensor-parallel width, so that each holds a single slice."""
        self.is_first_owner = rank in bucket.owners[0]
        """Whether this rank belongs to the first owner, which writes what owners of different widths hold."""
        order = {name: _order(name, p, shards[name]) for name, p in parameters.items()}
        self.parameters = dict(sorted(parameters.items(), key=lambda item: order[item[0]]))
        self.shards = {name: shards[name] for name in self.parameters}
        sizes = {name: math.prod(shard.local_shape) for name, shard in self.shards.items()}
        self.pieces = tuple(_pieces(self.shards, sizes))
        self._piece_of = {piece.name: piece for piece in self.pieces}
        first = next(iter(self.parameters.values()))
        total = sum(sizes.values())
        self.is_low_precision = first.dtype in _LOW_PRECISION
        self.slices = tuple(_slices(bucket, self.shards, rank))
        if whole is not None:
            self.weights, self.gradient = whole.rows_of(next(iter(self.shards.values())))
            return
        if slab is not None:
            self.weights = slab.take(total, first.dtype)
            self.gradient = slab.take(total, master_dtype(first.dtype))
        else:
            self.weights = torch.empty(total, dtype=first.dtype, device=first.device)
            self.gradient = torch.zeros(total, dtype=master_dtype(first.dtype), device=first.device)
        for name, parameter in self.parameters.items():
            _move(parameter, self.view(self.weights, name), self.view(self.gradient, name))

    def drop_gradient(self) -> None:
        """The parameters are not trained: free what is there for their gradients."""
        self.gradient = self.gradient.new_empty(0)
        for parameter in self.parameters.values():
            parameter.grad = None
            parameter.main_gradient = self.gradient  # pyright: ignore[reportAttributeAccessIssue]

    def freeze(self) -> None:
        """The parameters are never trained: no gradient passes to them."""
        self.drop_gradient()
        for parameter in self.parameters.values():
            parameter.requires_grad_(False)
            # The head then computes no gradient of its matrix.
            del parameter.main_gradient  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def num_matrix_elements(self) -> int:
        """Elements of the matrices, which come before the vectors."""
        return sum(piece.length for piece in self.pieces if len(piece.shard.shape) >= 2)

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """The view of a flat buffer [n] that belongs to a parameter, in the parameter's local shape."""
        piece = self._piece_of[name]
        return flat[piece.start : piece.start + piece.length].view(piece.shard.local_shape)

    def pack(self, flat: torch.Tensor, part: Slice) -> torch.Tensor:
        """A contiguous copy of a slice of a flat buffer [n]; the buffer itself if it is a single slice."""
        if len(self.slices) == 1:
            return flat
        packed = flat.new_empty(part.num_elements)
        for piece in part.pieces:
            target = packed[piece.start : piece.start + piece.length]
            source = self.slice_view(flat, piece.name, part)
            target.view(source.shape).copy_(source)
        return packed

    def unpack(self, packed: torch.Tensor, part: Slice, flat: torch.Tensor) -> None:
        """Copy a packed slice back into a flat buffer [n]; nothing to do if it is the buffer itself."""
        if packed.data_ptr() == flat.data_ptr():
            return
        for piece in part.pieces:
            target = self.slice_view(flat, piece.name, part)
            target.copy_(packed[piece.start : piece.start + piece.length].view(target.shape))

    def slice_view(self, flat: torch.Tensor, name: str, part: Slice) -> torch.Tensor:
        """The view of a flat buffer [n] that a slice has of a parameter; blocks in a dim apart."""
        return part_of(self.view(flat, name), self.shards[name], part.local_index, len(self.slices))


class FlatParameter:
    """The buffers of a parameter of experts that several buckets share: of each, consecutive rows."""

    def __init__(self, parameter: torch.nn.Parameter, shard: Shard) -> None:
        """`shard` is what this rank holds of it."""
        assert shard.rows is not None
        self._first = shard.rows[0]
        self._weights = torch.empty_like(parameter, requires_grad=False)
        self._gradient = torch.zeros_like(self._weights, dtype=master_dtype(parameter.dtype))
        _move(parameter, self._weights, self._gradient)

    def rows_of(self, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        """The flat weights [n] and gradient [n] of the rows of `shard`."""
        assert shard.rows is not None
        rows = slice(shard.rows[0] - self._first, shard.rows[1] - self._first)
        return self._weights[rows].flatten(), self._gradient[rows].flatten()


def _move(parameter: torch.nn.Parameter, weights: torch.Tensor, gradient: torch.Tensor) -> None:
    """Make a parameter live in a buffer, and autograd accumulate into another, in the master's precision."""
    with torch.no_grad():
        weights.copy_(parameter)
    parameter.data = weights
    # The head adds its gradient here in the forward, linears and filters in their backward.
    parameter.main_gradient = gradient  # pyright: ignore[reportAttributeAccessIssue]
    parameter.on_main_gradient = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    if parameter.dtype not in _LOW_PRECISION:
        parameter.grad = gradient
        return

    def add(p: torch.Tensor) -> None:
        if p.grad is None:
            # torch calls this without a gradient too: for the head, and in a split backward's first part.
            return
        # Where it is now: that of a page moves.
        p.main_gradient.add_(p.grad)  # pyright: ignore[reportAttributeAccessIssue]
        p.grad = None

    parameter.register_post_accumulate_grad_hook(add)


def _order(name: str, parameter: torch.nn.Parameter, shard: Shard) -> int:
    """Sort key: matrices, replicated adapters, sharded vectors, replicated vectors."""
    if parameter.dim() >= 2:
        return 1 if _is_replicated(shard) and _is_adapter(name) else 0
    return 3 if _is_replicated(shard) else 2


def _is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in ADAPTERS


def _is_replicated(shard: Shard) -> bool:
    """Whether every rank of the tensor-parallel group holds the full tensor."""
    return shard.dim is None


def _pieces(shards: Mapping[str, Shard], lengths: Mapping[str, int]) -> Iterator[Piece]:
    start = 0
    for name, shard in shards.items():
        yield Piece(name, shard, start, lengths[name])
        start += lengths[name]


def _slices(bucket: Bucket, shards: Mapping[str, Shard], rank: int) -> Iterator[Slice]:
    indices = bucket.slices_of(rank)
    lengths = {name: num_elements(shard, bucket.num_slices) for name, shard in shards.items()}
    pieces = tuple(_pieces(shards, lengths))
    num_matrix = sum(piece.length for piece in pieces if len(piece.shard.shape) >= 2)
    counted = [
        not _is_replicated(piece.shard) or (len(piece.shard.shape) >= 2 and not _is_adapter(piece.name))
        for piece in pieces
    ]
    assert counted == sorted(counted, reverse=True), "what counts in every slice comes first"
    sharded = sum(piece.length for piece, counts in zip(pieces, counted, strict=True) if counts)
    for local_index, index in enumerate(indices):
        yield Slice(index, local_index, bucket.slice_group(index), pieces, num_matrix, sharded)


def squared_norm(bucket: FlatBucket) -> torch.Tensor:
    """This rank's term of a bucket in the squared global gradient norm: a scalar, fp64, on its device.

    Each slice counts on the first rank that holds it, and a replicated vector in slice 0 only.
    """
    total = torch.zeros((), dtype=torch.float64, device=bucket.gradient.device)
    for part in bucket.slices:
        if part.group[0] == bucket.rank:
            counted = bucket.pack(bucket.gradient, part)[: part.num_counted_elements]
            total += sum_of_squares(counted)
    return total


BLOCK = 1 << 16
CARD_BLOCK = 1 << 22
"""Elements that are summed at a time, on a CPU and on a card: torch makes a copy of its input in 8 bytes
each, which stays in a core's cache, or takes 32 MB of a card with few launches."""


def blocks_of(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A flat buffer [n] in blocks to be summed one after another; a single empty one if n is 0."""
    return flat.split(BLOCK if flat.device.type == "cpu" else CARD_BLOCK)


def sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """The sum of squares of a flat buffer [n], in fp64: of fp32 on a card in one pass where torch can, else
    from copies of a block at a time, which take seven times as long (5.2 ms for 2^29 elements of an H100)."""
    if flat.is_cuda and flat.dtype == torch.float32 and adds_up_in_fp64(flat.device):
        return wide_norm(flat) ** 2
    norms = [torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks_of(flat)]
    return (norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))) ** 2


def wide_norm(flat: torch.Tensor) -> torch.Tensor:
    """The norm of an fp32 buffer [n] in fp64, which torch's kernel for lists of tensors adds up as it reads.

    (Norms of rows in fp32 are as fast, and within 1e-10. But rows begin where a bucket does, so that plans
    and pages with other buckets would step by another norm.)
    """
    return torch._foreach_norm([flat], 2, dtype=torch.float64)[0]  # pyright: ignore[reportPrivateUsage]


@functools.cache
def adds_up_in_fp64(device: torch.device) -> bool:
    """Whether `wide_norm`, for which torch promises nothing, is that of fp64 there."""
    flat = torch.randn(100_003, generator=torch.Generator().manual_seed(0)).to(device)
    try:
        norm = wide_norm(flat)
    except (AttributeError, RuntimeError, TypeError):
        return False
    exact = torch.linalg.vector_norm(flat.double())
    return norm.dtype == torch.float64 and torch.allclose(norm, exact, rtol=1e-12, atol=0)


StageParameter = tuple[int, str]
"""A stage, and the global name of a parameter that its backwards accumulate into."""


class GradReducer:
    """Starts each bucket of a rank when it is complete and it is its turn.

    `parameters` are those of this rank by stage and name, `buckets_of` gives the numbers of the buckets of
    each, in the model's order. The weight gradients of `deferred` are computed in the `backward_weight` steps
    of a program that has them. Gradients of the stages `late` are complete when their last backward step has
    ended, and not before. `start(number)` starts the reduction of a bucket and must not wait.
    """

    def __init__(
        self,
        program: RankProgram,
        parameters: Mapping[int, Mapping[str, torch.nn.Parameter]],
        buckets_of: Mapping[str, Collection[int]],
        *,
        deferred: Collection[str] = (),
        late: Collection[int] = (),
        start: Callable[[int], None],
    ) -> None:
        self.follow(program)
        self._buckets_of = buckets_of
        self._deferred = frozenset(deferred)
        self._late = frozenset(late)
        self._start = start
        self.catch_up: Callable[[], None] = lambda: None
        """Called before each start: a simulated card waits here until it would have come so far."""
        self._needed: list[frozenset[StageParameter]] = _by_bucket(parameters, buckets_of)
        self._missing: list[set[StageParameter]] = []
        self._next = -1
        self._step: Step | None = None
        """The closing step that is running, if one is."""
        self._context = copy_context()
        self._ended: set[int] = set()
        """Stages whose closing step has ended since the last compute step."""
        self._hooks: list[RemovableHandle] = []
        for name, parameter in {n: p for held in parameters.values() for n, p in held.items()}.items():
            # Ops that add their weights' gradients say when: at once, or later.
            parameter.on_main_gradient = partial(self.arrived, name)  # pyright: ignore
            if name not in self._deferred:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook(name)))

    def close(self) -> None:
        """Forget the parameters, and they this: what refers to itself through torch is never collected."""
        for hook in self._hooks:
            hook.remove()

    def follow(self, program: RankProgram) -> None:
        """From the next optimizer step on, gradients are those of this program of the same stages."""
        self._closing = closing_steps(program)
        self._last = program[-1]
        self._marked = frozenset([*self._closing.values(), self._last])
        """The steps at which there is something to do, besides those after which a stage has ended."""

    def begin(self) -> None:
        """Expect every gradient of a new optimizer step."""
        assert self._next < 0, "a reduction of the step before has not started"
        self._missing = [set(needed) for needed in self._needed]
        self._next = len(self._missing) - 1

    def before_step(self, step: Step) -> None:
        """A step begins: if it is the last of its stage that completes gradients, count those that arrive."""
        if self._ended and step.is_compute:
            self._end_stages()
        if step not in self._marked:
            return
        closing = self._closing.get(step.stage) == step and step.stage not in self._late
        self._step = step if closing else None
        if self._step is not None:
            # Torch runs a card's backward in a thread of its own, where the trace would not hear of a start.
            self._context = copy_context()
        if self._step is not None and step.kind == "backward_weight":
            # What is not deferred was complete after the last backward_input.
            self._complete(lambda stage, name: stage == step.stage and name not in self._deferred)

    def after_step(self, step: Step) -> None:
        """A step of the rank program has ended: after its last one, all gradients of a stage are complete."""
        if step not in self._marked:
            return
        self._step = None
        if self._closing.get(step.stage) == step:
            self._ended.add(step.stage)
        if step == self._last:
            self._end_stages()

    def arrived(self, name: str) -> None:
        """A parameter's gradient of the running step has been accumulated."""
        if self._step is not None:
            for number in self._buckets_of[name]:
                self._missing[number].discard((self._step.stage, name))
            self._start_complete()

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        # In the last backward torch calls this once per parameter: with its gradient, or without one after an
        # op that has added it to the buffer itself.
        return lambda _: self.arrived(name)

    def _end_stages(self) -> None:
        # Not before the messages that follow the step: another stage waits for those, none for a reduction.
        if self._ended:
            self._complete(lambda stage, name: stage in self._ended)
            self._ended.clear()

    def _complete(self, condition: Callable[[int, str], bool]) -> None:
        for missing in self._missing:
            missing -= {entry for entry in missing if condition(*entry)}
        self._start_complete()

    def _start_complete(self) -> None:
        while self._next >= 0 and not self._missing[self._next]:
            self._next -= 1
            self._context.run(self._announced_start, self._next + 1)

    def _announced_start(self, number: int) -> None:
        self.catch_up()
        with during(Activity("start_grad_reduce", number=number)):
            self._start(number)


def closing_steps(program: RankProgram) -> dict[int, Step]:
    """By stage, the step of a rank program after which all its gradients are complete."""
    return {step.stage: step for step in program if step.kind in ("backward", "backward_weight")}


def _by_bucket(
    parameters: Mapping[int, Mapping[str, object]], buckets_of: Mapping[str, Collection[int]]
) -> list[frozenset[StageParameter]]:
    last = max((number for numbers in buckets_of.values() for number in numbers), default=-1)
    found: list[set[StageParameter]] = [set() for _ in range(1 + last)]
    for stage, held in parameters.items():
        for name in held:
            for number in buckets_of[name]:
                found[number].add((stage, name))
    return [frozenset(entries) for entries in found]


# --- weight gradients, at once or later ---------------------------------------------------------------------


WeightGrad = Callable[[], None]
"""Computes the weight gradient of one op and accumulates it."""
Compile = Callable[[torch.nn.Module], None]


class DeferredGrads:
    """The deferred weight gradients of one stage, by micro-batch.

    With `reduces_inputs` every backward all-reduces the gradients of the inputs of column matrices, and calls
    `run_queued` meanwhile.
    """

    def __init__(self, *, reduces_inputs: bool = False) -> None:
        self.reduces_inputs = reduces_inputs
        self._queued: list[WeightGrad] = []
        self._deferred: dict[int, list[WeightGrad]] = {}
        self._recording: list[WeightGrad] | None = None

    @contextmanager
    def splitting(self, micro_batch: int, split: bool) -> Iterator[None]:
        """Around a backward of a micro-batch: if `split`, its weight gradients are deferred until `flush`."""
        self._recording = self._deferred.setdefault(micro_batch, []) if split else None
        try:
            yield
        finally:
            self._recording = None
        assert not self._queued, "a backward has not reduced the gradient of a column matrix's input"

    def flush(self, micro_batch: int) -> None:
        """Compute and accumulate the deferred weight gradients of a micro-batch, in the order of deferral."""
        for weight_grad in self._deferred.pop(micro_batch):
            weight_grad()

    def take(self, weight_grad: WeightGrad, *, may_queue: bool) -> None:
        """Keep it for `flush` if a split backward is running, or if it `may_queue` for `run_queued`, where
        backwards call that; else compute and accumulate it now."""
        if self._recording is not None:
            self._recording.append(weight_grad)
        elif may_queue and self.reduces_inputs:
            self._queued.append(weight_grad)
        else:
            weight_grad()

    def run_queued(self) -> None:
        """Compute and accumulate what is queued, in the order of queueing."""
        queued, self._queued = self._queued, []
        for weight_grad in queued:
            weight_grad()


def take_over_weight_grads(
    model: Any, deferred: DeferredGrads, sharding: Mapping[str, str], compile: Compile | None
) -> set[str]:
    """The parameters whose ops add the gradients to the buckets themselves, and later if a backward is split;
    none in a part that `compile` compiles, for a compiled graph has no side effects."""
    add_embedding_rows(model)
    if compile is None:
        return add_weight_grads(model, deferred, sharding)
    compile(model)
    return set()


def add_weight_grads(model: Any, deferred: DeferredGrads, sharding: Mapping[str, str]) -> set[str]:
    """Make the modules that multiply matrices add their weight gradients to the buckets themselves.

    In split backwards they defer that. They call a weight's `on_main_gradient` when its gradient is there.
    The linears are the modules whose style in `sharding` is column or row; experts, routers and filters are
    known by their `op`. Returns the names of these parameters.
    """
    added: set[str] = set()
    for path, module in model.named_modules():
        style = sharding_style(path, sharding)
        if style in ("column", "row"):
            module.forward = _linear(module, deferred, is_column=style == "column")
        op = getattr(module, "op", None)
        if op is ops.wide_linear:
            added.add(f"{path}.weight")
        if op in _FORMS:
            forward, gradients = _FORMS[op]
            module.op = _Adding(forward, gradients, deferred)
    styles = {name: sharding_style(name.rpartition(".")[0], sharding) for name, _ in model.named_parameters()}
    return added | {
        name
        for name, style in styles.items()
        if style in ("filter", "expert", "column", "row") and not _is_added_outside(name, style, deferred)
    }


def _is_added_outside(name: str, style: str, deferred: DeferredGrads) -> bool:
    """Whether a parameter is the bias of a linear, or under tensor parallelism the filter's last one."""
    return name.endswith(".bias") and (
        style in ("column", "row") or (deferred.reduces_inputs and name.endswith("conv2.bias"))
    )


def add_embedding_rows(model: Any) -> None:
    """Make the lookup of tokens add the rows of its gradient to the bucket itself, never later."""
    if model.has_embedding:
        model.embedding.op = _Adding(F.embedding, _lookup_gradients, None)


def _linear(module: Any, deferred: DeferredGrads, *, is_column: bool) -> Callable[[Tensor], Tensor]:
    # A look into the module's own table: its attributes take longer than a small product.
    table = module._parameters
    linear = _Adding(ops.linear, _product_gradients, deferred, may_queue=is_column)
    adapted = _Adding(_multiply_adapted, _adapted_gradients, deferred, may_queue=is_column)

    def forward(x: Tensor) -> Tensor:
        weight = table["weight"]
        if module.lora_a is None or weight.requires_grad:
            y = linear(x, weight) if torch.is_grad_enabled() else ops.linear(x, weight)
        else:
            y = adapted(x, weight, module.lora_a, module.lora_b, scale=module.lora_scale)
        return y if module.bias is None else y + module.bias

    return forward


@dataclass(frozen=True)
class _Adding:
    """An op on x and weights, some of which may be None; the gradients of those that are trained are added to
    their buckets: in its backward, or later."""

    forward: Callable[..., Tensor | tuple[Tensor, ...]]
    """Of x, the weights and options: the result; or a tuple of it and what is kept for the weights' gradients
    besides the weights, else x."""
    gradients: Callable[..., tuple[Tensor | None, WeightGrad]]
    """Of the result's gradient, the weights, what is kept and options: the gradient of x, None if it is not
    wanted (`dx`), and what adds those of the weights."""
    deferred: DeferredGrads | None
    """None: they are added at once, and nobody is told."""
    may_queue: bool = False
    """Whether it may wait for the next all-reduce of an input's gradient."""

    def __call__(self, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        return _AddingOp.apply(x, self, options, *weights)  # pyright: ignore[reportReturnType]

    def add(self, weights: Sequence[Any], add: WeightGrad, *, dx: Tensor | None) -> None:
        """Add the gradients of `weights` and say that they are there; or keep that for later."""

        def add_now() -> None:
            add()
            for weight in weights:
                weight.on_main_gradient()

        if self.deferred is None:
            add()
        else:
            self.deferred.take(add_now, may_queue=self.may_queue and dx is not None)


class _AddingOp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, op: _Adding, options: Mapping[str, Any], *weights: Tensor | None
    ) -> Tensor:
        found = op.forward(x, *weights, **options)
        y, *kept = found if isinstance(found, tuple) else (found, x)
        ctx.trained = [weight for weight in weights if weight is not None and weight.requires_grad]
        # For the gradient of x, frozen weights are enough.
        ctx.save_for_backward(*(kept if ctx.trained else [None] * len(kept)))
        # Not saved tensors: under recompute those come back as copies, without the bucket's view.
        ctx.op, ctx.options, ctx.weights = op, options, weights
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        op, weights, wanted = ctx.op, ctx.weights, ctx.needs_input_grad[0]
        dx, add = op.gradients(gradients[0], weights, *ctx.saved_tensors, dx=wanted, **ctx.options)
        if ctx.trained:
            op.add(ctx.trained, add, dx=dx)
        return dx, None, None, *[None for _ in weights]


def _rows(x: Tensor) -> Tensor:
    """A view [T, K] of x [..., K], to multiply or to add to in place."""
    return x.view(-1, x.shape[-1])


def _product_gradients(dy: Tensor, weights: Any, x: Tensor, *, dx: bool) -> tuple[Tensor | None, WeightGrad]:
    (weight,) = weights

    def add() -> None:
        ops.add_product_(weight.main_gradient, dy.flatten(0, -2).T, x.flatten(0, -2).to(dy.dtype))

    return ops.linear(dy, weight.T.to(dy.dtype)).to(weight.dtype) if dx else None, add


def _multiply_adapted(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, *, scale: float) -> tuple[Tensor, ...]:
    """x W^T + scale (x A^T) B^T with a frozen W: keeps x, and the product [..., rank] between A and B.

    The products of the adapters are added to those of W in place: what they cost are passes over memory.
    """
    inner = scale * ops.linear(x, a)
    y = ops.linear(x, weight)
    ops.add_product_(_rows(y), inner.flatten(0, -2), b.T)
    return y, x, inner


def _adapted_gradients(
    dy: Tensor, weights: Any, x: Tensor, inner: Tensor, *, dx: bool, scale: float
) -> tuple[Tensor | None, WeightGrad]:
    weight, a, b = weights
    dinner = scale * ops.linear(dy, b.T)

    def add() -> None:
        ops.add_product_(b.main_gradient, dy.flatten(0, -2).T, inner.flatten(0, -2))
        ops.add_product_(a.main_gradient, dinner.flatten(0, -2).T, x.flatten(0, -2))

    if not dx:
        return None, add
    found = ops.linear(dy, weight.T)
    ops.add_product_(_rows(found), dinner.flatten(0, -2), a)
    return found, add


def _lookup_gradients(dy: Tensor, weights: Any, tokens_BS: Tensor, *, dx: bool) -> tuple[None, WeightGrad]:
    total_VH = weights[0].main_gradient

    def add() -> None:
        tokens_T, rows_TH = tokens_BS.flatten(), dy.flatten(0, -2).to(total_VH.dtype)
        # Each has one order of additions on its device: the other adds by atomics on a card, or in threads.
        if total_VH.is_cuda:
            total_VH.index_put_((tokens_T,), rows_TH, accumulate=True)
        else:
            total_VH.index_add_(0, tokens_T, rows_TH)

    return None, add


def _grouped_gradients(
    dy: Tensor, weights: Any, x: Tensor, *, dx: bool, counts: Sequence[int]
) -> tuple[Tensor | None, WeightGrad]:
    (weight,) = weights

    def add() -> None:
        ops.add_grouped_products_(weight.main_gradient, dy, x, counts)

    return ops.grouped_linear(dy, weight.transpose(1, 2), counts) if dx else None, add


def _filter(u: Tensor, *weights: Any, document_start: Tensor | None) -> tuple[Tensor, ...]:
    y, taps = ops.localized_filter_forward(u, *weights, document_start=document_start)
    return y, u, taps


def _filter_gradients(
    dy: Tensor, weights: Any, u: Tensor, taps: Tensor, *, dx: bool, document_start: Tensor | None
) -> tuple[Tensor | None, WeightGrad]:
    dy = dy.contiguous()
    du, dz, _ = ops.localized_filter_data_gradient(dy, weights[0], weights[2], document_start=document_start)

    def add() -> None:
        dtype = weights[0].main_gradient.dtype
        found = ops.localized_filter_weight_gradient(u, taps, dz, dy, dtype=dtype)
        for weight, gradient in zip(weights, found, strict=True):
            if weight is not None:
                weight.main_gradient += gradient

    return du, add


_FORMS = {
    ops.grouped_linear: (ops.grouped_linear, _grouped_gradients),
    ops.wide_linear: (ops.wide_linear, _product_gradients),
    ops.localized_filter: (_filter, _filter_gradients),
}
"""By the op of a module."""
