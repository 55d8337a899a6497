"""Estimates of memory as text for the terminal, and as plain values for --json. GB are 1e9 bytes.

It stands alone because what estimates does not print.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from yuan_train.config.devices import MEMORY_FRACTION
from yuan_train.estimate.memory import (
    Length,
    MemoryCase,
    StageBytes,
    largest_fitting,
    memory_of,
    remedies,
    with_length,
)


def estimate_text(case: MemoryCase, length: Length | None) -> str:
    """Bytes by phase and category, the verdict, and what would make it fit; the largest of `length`."""
    memory = memory_of(case)
    lines = [
        heading(case),
        f"  always          {_categories(memory.states)} | reserved {_gb(memory.reserved)}",
    ]
    for name, categories in memory.phases.items():
        mark = "  <- peak" if name == memory.peak_phase else ""
        words = f"{name.replace('_', ' '):<15} {_categories(categories)}"
        lines.append(f"  {words:<75} {_gb(memory.of_phase(name)):>7}{mark}")
    lines.append(f"  peak {verdict(case)}")
    if not case.fits:
        ways = [
            f"{way.change.replace('_', ' ')} {way.value} ({_gb(memory_of(way.case).peak)} GB)"
            for way in remedies(case)
        ]
        lines += [f"  would fit: {way}" for way in ways]
        if not ways:
            lines.append("  no one change makes it fit: divide the model over cards with `yuan-train plan`")
    if length is not None:
        lines.append(f"  {_largest_words(case, length)}")
    return "\n".join(lines)


def heading(case: MemoryCase) -> str:
    """Model, method, engine and lengths in a line."""
    samples = case.samples
    return (
        f"{case.model.name} ({case.model.parameters:,} parameters), {case.method}, {case.engine}"
        f"{', with a critic' if case.critic else ''}: "
        f"group {samples.group}, prompt {samples.prompt}, new {samples.new}"
    )


def verdict(case: MemoryCase) -> str:
    """`98.4 GB of 80.7 GB (95% of an H100-80G): does not fit`."""
    words = "fits" if case.fits else "does not fit"
    usable = f"{_gb(case.usable_bytes)} GB ({MEMORY_FRACTION:.0%} of an {case.card})"
    return f"{_gb(memory_of(case).peak)} GB of {usable}: {words}"


def methods_text(cases: Sequence[MemoryCase]) -> str:
    """A line for each method of one model."""
    samples = cases[0].samples
    lines = [
        f"{cases[0].model.name} ({cases[0].model.parameters:,} parameters), {cases[0].engine}: "
        f"group {samples.group}, prompt {samples.prompt}, new {samples.new}"
    ]
    return "\n".join([*lines, *(f"  {case.method:<16} {verdict(case)}" for case in cases)])


def estimate_json(case: MemoryCase, length: Length | None) -> dict[str, Any]:
    """The same as plain values, in bytes; `largest` only if it was asked for."""
    memory = memory_of(case)
    found: dict[str, Any] = {
        **_cell_json(case),
        "parameters": case.model.parameters,
        "engine": case.engine,
        "algorithm": "ppo" if case.critic else "grpo",
        **_lengths_json(case),
        "states": dict(memory.states),
        "reserved": memory.reserved,
        "phases": {
            name: {"bytes": memory.of_phase(name), "categories": dict(categories)}
            for name, categories in memory.phases.items()
        },
        "peak_phase": memory.peak_phase,
        "remedies": []
        if case.fits
        else [
            {"change": remedy.change, "value": remedy.value, "bytes": memory_of(remedy.case).peak}
            for remedy in remedies(case)
        ],
    }
    if length is not None:
        value = largest_fitting(case, length)
        found["largest"] = {
            "of": length,
            "value": value,
            "bytes": memory_of(with_length(case, length, value)).peak if value else None,
            "bytes_with_one_more": memory_of(with_length(case, length, value + 1)).peak,
        }
    return found


def methods_json(cases: Sequence[MemoryCase]) -> dict[str, Any]:
    """A cell for each method of one model."""
    return {
        "parameters": cases[0].model.parameters,
        "engine": cases[0].engine,
        **_lengths_json(cases[0]),
        "cells": [_cell_json(case) for case in cases],
    }


def _cell_json(case: MemoryCase) -> dict[str, Any]:
    return {"model": case.model.name, "method": case.method, "bytes": memory_of(case).peak, "fits": case.fits}


def _lengths_json(case: MemoryCase) -> dict[str, Any]:
    samples = case.samples
    return {
        "group": samples.group,
        "prompt": samples.prompt,
        "new": samples.new,
        "card": case.card,
        "capacity_bytes": case.device.memory,
        "usable_bytes": case.usable_bytes,
    }


def _largest_words(case: MemoryCase, length: Length) -> str:
    value = largest_fitting(case, length)
    beyond = _gb(memory_of(with_length(case, length, value + 1)).peak)
    if not value:
        return f"largest {length}: none; 1 needs {beyond} GB"
    needed = _gb(memory_of(with_length(case, length, value)).peak)
    return f"largest {length} that fits: {value} ({needed} GB; {value + 1} needs {beyond} GB)"


def _categories(values: Mapping[str, float]) -> str:
    return " | ".join(f"{name.replace('_', ' ')} {_gb(value)}" for name, value in values.items())


def _gb(value: float) -> str:
    return f"{value / 1e9:.1f}"


def roles_memory_text(stages: Sequence[StageBytes]) -> str:
    """A line for each stage of each role; equal ones together."""
    lines: dict[str, int] = {}
    for stage in stages:
        verdict = "fits" if stage.fits else "does not fit"
        line = (
            f"{stage.role:<10} stage {stage.stage} on {stage.card}: {_gb(stage.peak)} of "
            f"{_gb(stage.capacity)}, {verdict} ({_categories(stage.categories)})"
        )
        lines[line] = lines.get(line, 0) + 1
    return "\n".join(line + (f" x {count}" if count > 1 else "") for line, count in lines.items())


def roles_memory_json(stages: Sequence[StageBytes]) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "roles": [
            {
                "role": stage.role,
                "pipeline": stage.pipeline,
                "stage": stage.stage,
                "card": stage.card,
                "bytes": stage.peak,
                "capacity_bytes": stage.capacity,
                "fits": stage.fits,
                "categories": stage.categories,
            }
            for stage in stages
        ]
    }
