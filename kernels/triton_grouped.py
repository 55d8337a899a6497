"""A Triton kernel for matrix products of groups of rows: all groups in one launch.

    y_r = x_r W_e^T      for the rows r of group e

On request only (`YUAN_KERNELS=grouped_linear=triton`): it saves a launch for each group, which counts where
groups are small. Below compute capability 8.0 Triton multiplies without tensor cores, so that large groups
are faster one by one. Imported only when it is used, because Triton may not be installed. Sums are fp32,
rounded once; a row's result depends on its own group alone. Row offsets are 64-bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from yuan_kernels.triton_forms import ceil_div, launch

GROUPED_BLOCK = {"ROWS": 32, "COLUMNS": 64, "INNER": 32, "num_warps": 4}


@triton.jit
def grouped_linear_kernel(
    x,
    weight,
    y,
    tiles,
    columns,
    inner,
    group_stride,
    row_stride,
    column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """One tile of y: the rows [first, end) of a group, as tiles [n, 3] = (group, first, end) says."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 3
    matrix = weight + tl.load(tile).to(tl.int64) * group_stride
    row = (tl.load(tile + 1) + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    live_row = row < tl.load(tile + 2)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    live_column = column < columns
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, inner, INNER):
        k = start + tl.arange(0, INNER).to(tl.int64)
        own = tl.load(x + row * inner + k[None, :], mask=live_row & (k[None, :] < inner), other=0.0)
        other = tl.load(
            matrix + column * row_stride + k[:, None] * column_stride,
            mask=live_column & (k[:, None] < inner),
            other=0.0,
        )
        total += tl.dot(own, other, input_precision="ieee")
    tl.store(y + row * columns + column, total.to(y.dtype.element_ty), mask=live_row & live_column)


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Return y [R, N] of x [R, K] and weight [E, N, K] in any memory order; counts [E] sum to R."""
    rows, columns, inner = x.shape[0], weight.shape[1], weight.shape[2]
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    tiles = _tiles(counts, GROUPED_BLOCK["ROWS"])
    table = torch.tensor(tiles, dtype=torch.int32).to(x.device, non_blocking=True)
    grid = (len(tiles), ceil_div(columns, GROUPED_BLOCK["COLUMNS"]))
    sizes = (columns, inner, *weight.stride())
    launch(grouped_linear_kernel, grid, x.contiguous(), weight, y, table, *sizes, **GROUPED_BLOCK)
    return y


def _tiles(counts: Sequence[int], size: int) -> list[tuple[int, int, int]]:
    """(group, first row, end of its rows) of blocks of `size` rows, each within one group."""
    tiles: list[tuple[int, int, int]] = []
    end = 0
    for group, count in enumerate(counts):
        first, end = end, end + count
        tiles += [(group, row, end) for row in range(first, end, size)]
    return tiles
