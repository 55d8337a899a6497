"""python tools/paper_tables.py: the step times of the Yuan 2.0 paper (Tables 5 and 6), printed beside ours.

Eq. (1), (2) and (4) of section 3.4 as they reproduce the printed numbers: where tables and text differ, with
the terms that the tables need (1/(6H) in Eq. (1); A in T0 of Eq. (4)). Values that the paper does not give
are marked [derived]. Also prints the corrected FLOP of a step, which count filter, head and recompute.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Case:
    """One column of a table. Rates in bytes and FLOP per second."""

    accumulation: int
    micro_batch: int = 1
    layers: int
    hidden: int
    sequence: int
    vocabulary: int
    pipeline: int
    tensor: int
    data: int
    flops_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    """n_net * BW_net."""


NETWORK = 2 * 195e9 / 8
"""Two NICs of 195 Gb/s measured each."""
YUAN_1 = Case(
    accumulation=480,
    layers=76,
    hidden=16384,
    sequence=2048,
    vocabulary=53_228,
    pipeline=38,
    tensor=8,
    data=7,
    flops_per_second=0.554 * 312e12,
    link_bytes_per_second=520e9,  # [derived] from T3
    network_bytes_per_second=NETWORK,
)
YUAN_2 = Case(
    accumulation=384,
    layers=84,
    hidden=8192,
    sequence=4096,
    vocabulary=135_040,
    pipeline=32,
    tensor=1,
    data=3,
    flops_per_second=0.55 * 312e12,  # [derived]
    link_bytes_per_second=0.85 * 400e9,
    network_bytes_per_second=NETWORK,
)
PRINTED_5 = (36.666, 2.826, 2.643, 2.602, 0.455, 45.192)
PRINTED_6 = {
    (96, 1, 100): 584.28,
    (96, 1, 200): 405.45,
    (96, 1, 400): 316.32,
    (96, 2, 100): 239.06,
    (96, 2, 200): 238.40,
    (96, 2, 400): 238.10,
    (256, 1, 100): 224.10,
    (256, 1, 200): 156.64,
    (256, 1, 400): 123.21,
    (256, 2, 100): 101.22,
    (256, 2, 200): 100.92,
    (256, 2, 400): 100.81,
}
"""Chips, method, P2P bandwidth in GB/s: seconds per iteration."""


def yuan_1_terms(case: Case) -> tuple[float, ...]:
    """T0 to T4 of Eq. (1) in seconds: compute, bubble, pipeline, tensor, data parallel."""
    c = case
    work = c.accumulation * c.micro_batch * c.layers * c.sequence
    parameters = (
        12 * c.layers * c.hidden**2 * (1 + 13 / (12 * c.hidden) + c.vocabulary / (12 * c.layers * c.hidden))
    )
    compute = (
        96 * work * c.hidden**2 * (1 + 1 / (6 * c.hidden)) / (c.pipeline * c.tensor * c.flops_per_second)
    )
    tensor = 48 * work * (c.tensor - 1) * c.hidden / (c.pipeline * c.tensor * c.link_bytes_per_second)
    return (
        compute,
        compute * (c.pipeline - 1) / c.accumulation,
        _pipeline_seconds(c, c.network_bytes_per_second),
        tensor,
        4 * parameters * (c.data - 1) / c.data / (c.pipeline * c.network_bytes_per_second),
    )


def method_1_terms(case: Case) -> tuple[float, ...]:
    """T0 to T4 of Eq. (2) in seconds: tensor, pipeline and data parallel."""
    c = case
    compute = _compute_seconds(c) / c.tensor
    work = c.accumulation * c.micro_batch * c.layers * c.sequence
    tensor = 64 * work * (c.tensor - 1) * c.hidden / (c.pipeline * c.tensor * c.link_bytes_per_second)
    return (
        compute,
        compute * (c.pipeline - 1) / c.accumulation,
        _pipeline_seconds(c, c.network_bytes_per_second),
        tensor,
        _data_seconds(c, bytes_per_parameter=4),
    )


def method_2_terms(case: Case) -> tuple[float, ...]:
    """T0 to T4 of Eq. (4) in seconds: non-uniform pipeline, data and optimizer parallel."""
    c = case
    compute = _compute_seconds(c)
    return (
        compute,
        compute * (c.pipeline - 1) / c.accumulation,
        _pipeline_seconds(c, c.link_bytes_per_second),
        _data_seconds(c, bytes_per_parameter=8),
        _data_seconds(c, bytes_per_parameter=4),
    )


def table_6_case(chips: int, method: int, peer_gbs: float) -> Case:
    """The case of a cell of Table 6; the values of Method 1 are [derived]."""
    data, accumulation = {96: (3, 384), 256: (8, 144)}[chips]
    case = replace(YUAN_2, data=data, accumulation=accumulation)
    if method == 1:
        return replace(case, tensor=8, pipeline=4, link_bytes_per_second=0.5 * 0.85 * peer_gbs * 1e9)
    return replace(case, link_bytes_per_second=0.85 * peer_gbs * 1e9)


def table_6_seconds(chips: int, method: int, peer_gbs: float) -> float:
    """Our value for a cell of Table 6, in seconds."""
    terms = method_1_terms if method == 1 else method_2_terms
    return sum(terms(table_6_case(chips, method, peer_gbs)))


def corrected_flops(case: Case) -> float:
    """FLOP of a step as the model runs them with recomputed layers: 4(36H^2 + 2SH) a token and layer (one
    forward of 36H^2 + 2SH, run twice, and a backward of twice that), and 6VH a token for the head."""
    c = case
    layer = 4 * (36 * c.hidden**2 + 2 * c.sequence * c.hidden)
    tokens = c.accumulation * c.micro_batch * c.sequence * c.data
    return tokens * (c.layers * layer + 6 * c.vocabulary * c.hidden)


def paper_flops(case: Case) -> float:
    """The same as the paper's T0 counts it: 128H^2 (1 + S/(8H)) a token and layer."""
    c = case
    tokens = c.accumulation * c.micro_batch * c.sequence * c.data
    return tokens * c.layers * 128 * c.hidden**2 * (1 + c.sequence / (8 * c.hidden))


def _compute_seconds(c: Case) -> float:
    work = c.accumulation * c.micro_batch * c.layers * c.sequence
    return 128 * work * c.hidden**2 * (1 + c.sequence / (8 * c.hidden)) / (c.pipeline * c.flops_per_second)


def _pipeline_seconds(c: Case, bytes_per_second: float) -> float:
    return 8 * c.accumulation * c.micro_batch * c.sequence * c.hidden / bytes_per_second


def _data_seconds(c: Case, *, bytes_per_parameter: int) -> float:
    parameters = (
        16
        * c.layers
        * c.hidden**2
        * (
            1
            + (1 + c.sequence) / (4 * c.hidden)
            + c.sequence / (16 * c.hidden**2)
            + c.vocabulary / (16 * c.layers * c.hidden)
        )
    )
    share = (c.data - 1) / c.data
    return parameters * bytes_per_parameter * share / (c.pipeline * c.network_bytes_per_second)


def main() -> int:
    """Print both tables and the FLOP counts."""
    ours = yuan_1_terms(YUAN_1)
    print("Table 5, Yuan 1.0 245B on 2128 GPUs, seconds per iteration (measured: 46.20)\n")
    print("| | T0 | T1 | T2 | T3 | T4 | total |\n|---|--:|--:|--:|--:|--:|--:|")
    for name, values in (("printed", PRINTED_5), ("ours", (*ours, sum(ours)))):
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
    print("\nTable 6, Yuan 2.0 102B, seconds per iteration\n")
    print("| chips | method | P2P GB/s | printed | ours | difference |\n|--:|--:|--:|--:|--:|--:|")
    for (chips, method, gbs), printed in PRINTED_6.items():
        value = table_6_seconds(chips, method, gbs)
        print(f"| {chips} | {method} | {gbs} | {printed:.2f} | {value:.2f} | {value / printed - 1:+.2%} |")
    case = table_6_case(96, 2, 400)
    paper, corrected = paper_flops(case), corrected_flops(case)
    print(
        f"\nFLOP of a step (102B, recompute): the paper's {paper:.4g}, corrected {corrected:.4g} "
        f"({corrected / paper - 1:+.1%}: the filter and the head)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
