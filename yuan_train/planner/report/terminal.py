"""The search result as text: a table for the terminal, and one object for --json; HTML is in `page.py`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from yuan_train.config.dump import as_plain
from yuan_train.config.express import to_layout
from yuan_train.config.plan import MemoryForecast
from yuan_train.config.plan_units import divides_experts
from yuan_train.config.units import show_bytes, show_seconds
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.evaluate.plan_cost import PlanCost
from yuan_train.planner.evaluate.stage_cost import StageCost
from yuan_train.planner.report.notations import to_blocks
from yuan_train.planner.report.reasons import bound_values, bound_words
from yuan_train.planner.search.explore import Candidate
from yuan_train.planner.search.search_result import LeftOut, SearchResult

CATEGORIES = tuple(name for name in MemoryForecast.__dataclass_fields__ if name != "critic")
"""Of a plan's memory; a critic is beside the policy of an RL plan alone."""
GIB = 2.0**30


def plan_table(result: SearchResult, problem: PlanProblem) -> str:
    """At most a screen of plain text: stages, step, even split, runners-up, idle cards, source of costs."""
    best, cost = result.best, result.best.cost
    lines = [f"Plan: {describe_shape(best)}" + even_words(result)]
    lines += _stage_rows(best)
    lines.append(" " + step_words(result, problem))
    lines.append(f" layers {layer_list(best)}; Megatron layout {megatron_layout(best)}")
    lines += [f" {line}" for line in [*best_reasons(result), *host_lines(cost)]]
    lines += [f" runner-up: {line}" for line in runner_lines(result)]
    lines += [f" left out: {line}" for line in left_out_lines(result.left_out)]
    lines.append(f" {cost.source}: " + "; ".join(result.notes))
    return "\n".join(lines)


def plan_json(result: SearchResult, *, path: str | None) -> dict[str, Any]:
    """The same as plain values, for --json; `path` is where the plan is written, if it is."""
    best = result.best
    assert best.plan.forecast is not None
    return {
        "plan": path,
        "forecast": as_plain(best.plan.forecast),
        "num_pipelines": len(best.plan.pipelines),
        "schedule": best.plan.schedule,
        "micro_batch_size": best.plan.pipelines[0].micro_batch_size,
        "num_micro_batches": best.plan.pipelines[0].num_micro_batches,
        "optimizer_sharding": best.plan.optimizer_sharding,
        "stages": [_stage_json(stage) for stage in best.cost.stages],
        "exact": result.exact,
        "stopped_by_time_limit": result.stopped,
        "gap": best.step_seconds / result.lower_bound_seconds - 1.0,
        "bounds": bound_values(result.bounds, best.step_seconds),
        "plans_simulated": result.num_simulated,
        "even_split": None
        if result.even_split is None
        else {"step_seconds": result.even_split.step_seconds, "fits": result.even_split.cost.fits},
        "runners_up": [
            {
                "step_seconds": c.step_seconds,
                "layers": layer_list(c),
                "why": slower_because(c.cost, best.cost),
            }
            for c in result.runners_up
        ],
        "left_out": [{"card": item.card.name, "reason": item.reason} for item in result.left_out],
        "notes": list(result.notes),
    }


def describe_shape(candidate: Candidate) -> str:
    """`2 pipelines x 3 stages, 16 micro-batches of 1, 1f1b`."""
    plan = candidate.plan
    first = plan.pipelines[0]
    stages = sorted({len(pipeline.stages) for pipeline in plan.pipelines})
    counts = sorted({pipeline.num_micro_batches for pipeline in plan.pipelines})
    words = [
        f"{_count(len(plan.pipelines), 'pipeline')} x {_range(stages, 'stage')}",
        f"{_range(counts, 'micro-batch', 'micro-batches')} of {first.micro_batch_size}",
        plan.schedule,
    ]
    widths = sorted({len(r) for p in plan.pipelines for stage in p.stages for r in stage.replicas})
    if widths != [1]:
        what = "experts over" if divides_experts(plan) else "tensor width"
        words.append(f"{what} {'/'.join(map(str, widths))}" + " cards" * divides_experts(plan))
    if plan.optimizer_sharding:
        words.append("optimizer sharded")
    return ", ".join(words)


def _range(values: Sequence[int], word: str, plural: str | None = None) -> str:
    if len(values) == 1:
        return _count(values[0], word, plural)
    return f"{values[0]} to {values[-1]} {plural or word + 's'}"


def step_words(result: SearchResult, problem: PlanProblem) -> str:
    """`step 1.02 s | 32.1k tok/s | MFU ... | bubble ... | ...`."""
    cost, step = result.best.cost, result.best.step_seconds
    tokens = problem.global_batch_size * problem.sequence_length
    peaks = sum(
        problem.cluster.device_type(card.type).peak(problem.precision) or 0.0
        for card in {card for stage in cost.stages for card in stage.cards}
    )
    utilisation = (
        tokens * problem.model.training_flops(problem.sequence_length) / step / peaks if peaks else 0.0
    )
    parts = [
        f"step {show_seconds(step)}",
        f"{tokens / step:,.0f} tok/s",
        f"MFU {utilisation:.0%} of the combined peak",
        f"bubble {cost.bubble_fraction:.0%}",
        f"gradient reduction {(cost.grad_reduce_seconds + cost.tied_embedding_seconds) / step:.0%}",
        f"optimizer step {cost.update_seconds / step:.0%}",
    ]
    if result.best.plan.optimizer_sharding:
        parts.append(f"weight sync {cost.weight_sync_seconds / step:.0%}")
    return " | ".join(parts)


def best_reasons(result: SearchResult) -> list[str]:
    """Whether the plan is proven fastest, or its gap to the lower bound."""
    stopped = "; stopped by search.time_limit" if result.stopped else ""
    simulated = f"{stopped} ({_count(result.num_simulated, 'plan')} simulated)"
    if result.bounds is None:
        return [f"proven fastest of the searched plans, in the simulation{simulated}"]
    first, *rest = bound_words(result.bounds, result.best.step_seconds)
    return [f"best found, not proven{simulated}; {first}", *rest]


def runner_lines(result: SearchResult) -> list[str]:
    """Each runner-up: how much slower it is, its cards and layers, and what makes it slower."""
    best = result.best
    return [
        f"+{candidate.step_seconds / best.step_seconds - 1:.1%} {describe_cards(candidate)}, layers "
        f"{layer_list(candidate)}: {slower_because(candidate.cost, best.cost)}"
        for candidate in result.runners_up
    ]


def slower_because(cost: PlanCost, best: PlanCost) -> str:
    """The part of the step that grew most against `best`."""
    parts, best_parts = _parts(cost), _parts(best)
    name = max(parts, key=lambda part: parts[part] - best_parts[part])
    growth = parts[name] - best_parts[name]
    return f"{name} +{show_seconds(growth)}" if growth > 0 else "as fast"


def left_out_lines(left_out: Sequence[LeftOut]) -> list[str]:
    """The cards that are left out, one line per reason."""
    reasons = dict.fromkeys(item.reason for item in left_out)
    lines: list[str] = []
    for reason in reasons:
        cards = [item.card for item in left_out if item.reason == reason]
        types = ", ".join(dict.fromkeys(card.type for card in cards))
        names = ", ".join(card.name for card in cards[:4]) + (", ..." if len(cards) > 4 else "")
        lines.append(f"{len(cards)} {types} ({names}): {reason}")
    return lines


def layer_list(candidate: Candidate) -> str:
    """Layers per stage, as Yuan 2.0's scripts write them."""
    return to_blocks(candidate.plan.pipelines[0])


def megatron_layout(candidate: Candidate) -> str:
    """The cut of pipeline 0 as Megatron-LM writes it; nothing if it divides layers."""
    return "" if candidate.plan.divided_layers else to_layout(candidate.plan.pipelines[0])


def describe_cards(candidate: Candidate) -> str:
    """`4 A100-80G > 2 T4`: the cards of pipeline 0 in the order of its stages; `2 x (...)` if there are
    two pipelines."""
    stages = [stage for stage in candidate.cost.stages if stage.pipeline == 0]
    types = [card.type for stage in stages for card in stage.cards]
    runs = " > ".join(f"{len(list(group))} {name}" for name, group in itertools.groupby(types))
    pipelines = len(candidate.plan.pipelines)
    return f"{pipelines} x ({runs})" if pipelines > 1 else runs


def limited_by(stage: StageCost, cost: PlanCost) -> str:
    """What keeps the stage from taking another layer."""
    slowest = max(s.forward_seconds + s.backward_seconds for s in cost.stages)
    words: list[str] = []
    if stage.forward_seconds + stage.backward_seconds >= slowest * (1 - 1e-9):
        words.append("time, the slowest")
    if stage.memory.total + stage.one_more_layer_bytes > stage.capacity_bytes:
        words.append("MEMORY")
    return " and ".join(words) or "-"


def even_words(result: SearchResult) -> str:
    """How the even split compares, to append to a line."""
    even = result.even_split
    if even is None:
        return "     even split: more cards than layers"
    ratio = even.step_seconds / result.best.step_seconds
    return f"     even split: {ratio:.2f}x the time" + ("" if even.cost.fits else ", and it does not fit")


def _stage_rows(best: Candidate) -> list[str]:
    """One row per stage of pipeline 0, with the slowest time and the tightest memory of this stage in all
    pipelines."""
    cost = best.cost
    stages = len(best.plan.pipelines[0].stages)
    rows = [("stage", "cards", "layers", "fwd+bwd", "busy", "memory of capacity, GiB", "limited by")]
    for s in range(stages):
        same = [stage for stage in cost.stages if stage.stage == s]
        worst = max(same, key=lambda stage: (stage.memory.total / stage.capacity_bytes, -stage.pipeline))
        seconds = max(stage.forward_seconds + stage.backward_seconds for stage in same)
        busy = _stage_busy(cost, s) / cost.step_seconds
        rows.append(
            (
                str(s),
                _cards_words(same),
                layer_words(worst),
                show_seconds(seconds),
                "#" * round(10 * busy) + "." * (10 - round(10 * busy)) + f" {busy:.0%}",
                f"{worst.memory.total / GIB:.1f} / {worst.capacity_bytes / GIB:.1f}",
                limited_by(worst, cost),
            )
        )
    if len(rows) > 17:
        rows = [*rows[:9], ("...", f"{len(rows) - 17} more", "", "", "", "", ""), *rows[-8:]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        (" " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def _stage_busy(cost: PlanCost, s: int) -> float:
    """Busy seconds of the busiest worker of stage s of pipeline 0, over all stages of that worker."""
    return max(cost.simulations[0].busy_seconds[worker] for worker in cost.workers[0][s])


def layer_words(stage: StageCost) -> str:
    """`0-9 +emb`, `none +head`; `recompute` if all layers are recomputed, `recompute 3` if the first three
    are; under selective recompute `selective` instead of `recompute`."""
    first, end = stage.layers
    words = [f"{first}-{end - 1}" if end > first + 1 else str(first) if end > first else "none"]
    words += ["+emb"] * stage.embedding + ["+head"] * stage.head
    if stage.num_recomputed:
        words += ["selective" if stage.recompute == "selective" else "recompute"]
        words += [str(stage.num_recomputed)] * (stage.num_recomputed < end - first)
    return " ".join(words)


def _cards_words(stages: Sequence[StageCost]) -> str:
    first = stages[0]
    words = f"{group_types(first)} {first.card.name}"
    if len(first.experts) > 1:
        words += " " + expert_words(first)
    else:
        words += f" tensor {len(first.replicas[0])}" * (len(first.replicas[0]) > 1)
    words += f" replicas {len(first.replicas)}" * (len(first.replicas) > 1)
    return words + (f" x{len(stages)}" if len(stages) > 1 else "")


def group_types(stage: StageCost) -> str:
    """The types of the cards of a stage's replica, in order: unlike ones joined by `+`."""
    return "+".join(dict.fromkeys(card.type for card in stage.replicas[0]))


def expert_words(stage: StageCost) -> str:
    """`experts 19/9/4`: experts of each layer on each card of a replica; nothing if no cards share them."""
    return f"experts {'/'.join(map(str, stage.experts))}" if len(stage.experts) > 1 else ""


def _parts(cost: PlanCost) -> dict[str, float]:
    """Seconds of the step by cause."""
    work = max(busy for simulation in cost.simulations for busy in simulation.busy_seconds)
    return {
        "slowest stage": work,
        "bubble and waiting": cost.compute_seconds - work,
        "gradient reduction": cost.grad_reduce_seconds + cost.tied_embedding_seconds,
        "optimizer step": cost.update_seconds,
        "weight sync": cost.weight_sync_seconds,
        "late updates": cost.late_seconds,
    }


def host_lines(cost: PlanCost) -> list[str]:
    """What the hosts hold, by type of card; none if they hold nothing."""
    most: dict[str, StageCost] = {}
    for stage in cost.stages:
        if stage.host_bytes > most.get(stage.card.type, stage).host_bytes or stage.card.type not in most:
            most[stage.card.type] = stage
    lines: list[str] = []
    for name, stage in most.items():
        if stage.host_bytes:
            limit = stage.host_capacity_bytes
            of = "host memory not checked" if math.isinf(limit) else f"of {show_bytes(limit)}"
            what = "optimizer state" if stage.leaving is None else "optimizer state and activations"
            what = what if stage.pages is None else f"parameters in pages, {what}"
            lines.append(f"{what} on the host: at most {show_bytes(stage.host_bytes)} per {name} ({of})")
    return lines


def _stage_json(stage: StageCost) -> dict[str, Any]:
    return {
        "pipeline": stage.pipeline,
        "stage": stage.stage,
        "card": stage.card.name,
        "cards": [[card.name for card in replica] for replica in stage.replicas],
        "type": stage.card.type,
        "layers": list(stage.layers),
        "experts": list(stage.experts) if len(stage.experts) > 1 else None,
        "recompute": stage.recompute,
        "recomputed_layers": stage.num_recomputed,
        "in_flight": stage.in_flight,
        "forward_seconds": stage.forward_seconds,
        "backward_seconds": stage.backward_seconds,
        "peak_memory_bytes": stage.memory.total,
        "capacity_bytes": stage.capacity_bytes,
        "host_bytes": stage.host_bytes,
        "source": stage.source,
    }


def _count(number: int, word: str, plural: str | None = None) -> str:
    return f"{number} {word if number == 1 else plural or word + 's'}"
