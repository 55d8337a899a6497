"""Runs of flat elements as boxes of global tensors: every element once, at its place."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yuan_train.parallel.shard import Shard, global_boxes, part_of, run_boxes


def taken(whole: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    index = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    return whole[index].reshape(-1)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_run_is_a_few_boxes(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    end = data.draw(st.integers(start, whole.numel()))
    boxes = list(run_boxes(tuple(shape), start, end))
    assert len(boxes) <= 2 * len(shape) - 1
    assert [box.start for box in boxes] == [
        sum(box.num_elements for box in boxes[:i]) for i in range(len(boxes))
    ]
    found = [taken(whole, box.offsets, box.sizes) for box in boxes]
    assert torch.equal(torch.cat(found) if found else whole.new_empty(0), whole.flatten()[start:end])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_run_of_a_part_lies_in_the_global_tensor(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 3))
    dim = data.draw(st.one_of(st.none(), st.integers(0, dims - 1)))
    blocks, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    shape = [data.draw(st.integers(1, 4)) for _ in range(dims)]
    if dim is not None:
        shape[dim] *= blocks * count
    shard = Shard(tuple(shape), dim, blocks)
    index = data.draw(st.integers(0, count - 1))
    whole = torch.arange(math.prod(shape)).view(shape)
    part = part_of(whole, shard, index, count).flatten()
    start = data.draw(st.integers(0, part.numel()))
    end = data.draw(st.integers(start, part.numel()))
    boxes = list(global_boxes(shard, index, count, start, end))
    for box in boxes:
        mine = part[start + box.start : start + box.start + box.num_elements]
        assert torch.equal(taken(whole, box.offsets, box.sizes), mine)
    assert sum(box.num_elements for box in boxes) == end - start
