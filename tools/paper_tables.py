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

    @property
    def sequences(self) -> int:
        """Of a pipeline and step."""
        return self.accumulation * self.micro_batch

    @property
    def work(self) -> float:
        """Tokens and layers of a stage in a step."""
        return self.sequences * self.sequence * self.layers / self.pipeline

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.sequences * self.sequence * self.data


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
    (chips, method, gbs): seconds
    for chips, method, printed in (
        (96, 1, (584.28, 405.45, 316.32)),
        (96, 2, (239.06, 238.40, 238.10)),
        (256, 1, (224.10, 156.64, 123.21)),
        (256, 2, (101.22, 100.92, 100.81)),
    )
    for gbs, seconds in zip((100, 200, 400), printed, strict=True)
}
"""Chips, method, P2P bandwidth in GB/s: seconds per iteration."""


def yuan_1_terms(case: Case) -> tuple[float, ...]:
    """T0 to T4 of Eq. (1) in seconds: compute, bubble, pipeline, tensor, data parallel."""
    c = case
    parameters = (
        12 * c.layers * c.hidden**2 * (1 + 13 / (12 * c.hidden) + c.vocabulary / (12 * c.layers * c.hidden))
    )
    compute = 96 * c.work * c.hidden**2 * (1 + 1 / (6 * c.hidden)) / (c.tensor * c.flops_per_second)
    return (
        compute,
        compute * (c.pipeline - 1) / c.accumulation,
        _pipeline_seconds(c, c.network_bytes_per_second),
        _tensor_seconds(c, bytes_per_value=48),
        4 * parameters * (c.data - 1) / c.data / (c.pipeline * c.network_bytes_per_second),
    )


def method_1_terms(case: Case) -> tuple[float, ...]:
    """T0 to T4 of Eq. (2) in seconds: tensor, pipeline and data parallel."""
    compute = _compute_seconds(case) / case.tensor
    return (
        compute,
        compute * (case.pipeline - 1) / case.accumulation,
        _pipeline_seconds(case, case.network_bytes_per_second),
        _tensor_seconds(case, bytes_per_value=64),
        _data_seconds(case, bytes_per_parameter=4),
    )


def method_2_terms(case: Case) -> tuple[float, ...]:
    """T0 to T4 of Eq. (4) in seconds: non-uniform pipeline, data and optimizer parallel."""
    compute = _compute_seconds(case)
    return (
        compute,
        compute * (case.pipeline - 1) / case.accumulation,
        _pipeline_seconds(case, case.link_bytes_per_second),
        _data_seconds(case, bytes_per_parameter=8),
        _data_seconds(case, bytes_per_parameter=4),
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
    return c.tokens * (c.layers * layer + 6 * c.vocabulary * c.hidden)


def paper_flops(case: Case) -> float:
    """The same as the paper's T0 counts it: 128H^2 (1 + S/(8H)) a token and layer."""
    return case.tokens * case.layers * _layer_flops(case)


def _layer_flops(c: Case) -> float:
    return 128 * c.hidden**2 * (1 + c.sequence / (8 * c.hidden))


def _compute_seconds(c: Case) -> float:
    return c.work * _layer_flops(c) / c.flops_per_second


def _tensor_seconds(c: Case, *, bytes_per_value: int) -> float:
    return bytes_per_value * c.work * (c.tensor - 1) * c.hidden / (c.tensor * c.link_bytes_per_second)


def _pipeline_seconds(c: Case, bytes_per_second: float) -> float:
    return 8 * c.sequences * c.sequence * c.hidden / bytes_per_second


def _data_seconds(c: Case, *, bytes_per_parameter: int) -> float:
    further = (1 + c.sequence) / (4 * c.hidden) + c.sequence / (16 * c.hidden**2)
    further += c.vocabulary / (16 * c.layers * c.hidden)
    parameters = 16 * c.layers * c.hidden**2 * (1 + further)
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
