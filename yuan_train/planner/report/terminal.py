"""The search result as text: a table for the terminal, and one object for --json; HTML is in `page.py`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from yuan_train.config.express import to_blocks, to_layout
from yuan_train.config.load import as_plain
from yuan_train.config.plan import MemoryForecast, StagePlan
from yuan_train.config.units import show_bytes, show_seconds
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.evaluate.plan_cost import PlanCost
from yuan_train.planner.evaluate.stage_cost import StageCost
from yuan_train.planner.report.answer import bound_values, bound_words, mfu_of, values_of
from yuan_train.planner.search.candidate import Candidate
from yuan_train.planner.search.search_result import LeftOut, SearchResult

CATEGORIES = tuple(name for name in MemoryForecast.__dataclass_fields__ if name != "critic")
"""Of a plan's memory; a critic is beside the policy of an RL plan alone."""
GIB = 2.0**30
MAX_STAGE_ROWS = 16
"""Rows of stages in the table, over all kinds of pipelines; each kind has at least four."""
MAX_KINDS = 6
MAX_WORDS = 90
"""Characters of one thing in which a runner-up differs."""


def plan_table(
    result: SearchResult, problem: PlanProblem, *, answer: Sequence[str] = (), verbose: bool = False
) -> str:
    """At most a screen of plain text: the answer, then stages, even split, idle cards and notes. `verbose`
    adds bounds, runners-up, the cut in other tools' notations, and the source of every cost."""
    best, cost = result.best, result.best.cost
    lines = [step_words(result, problem)]
    left_out = [f"left out: {line}" for line in left_out_lines(result.left_out)]
    if verbose:
        lines += [cut_words(best), *best_reasons(result), *memory_lines(cost, problem)]
        lines += [f"runner-up: {line}" for line in runner_lines(result)]
        lines += [*left_out, f"{cost.source}: " + "; ".join(result.notes)]
    else:
        catalogued = tuple(f"{card.type}: " for stage in cost.stages for card in stage.cards)
        kept = (own for own in result.notes if cost.source != "estimated" or not own.startswith(catalogued))
        lines += [*memory_lines(cost, problem)[1:], *left_out, *(f"note: {note}" for note in kept)]
        lines.append("--verbose: bounds, runners-up, the cut as Megatron-LM writes it, sources of all times")
    head = [*answer, f"Plan: {describe_shape(best)}" + even_words(result)]
    return "\n".join([*head, *(f" {line}" for line in (*_stage_rows(best), *lines))])


def plan_json(result: SearchResult, *, path: str | None) -> dict[str, Any]:
    """The same as plain values, for --json; `path` is where the plan is written, if it is."""
    best, even = result.best, result.even_split
    assert best.plan.forecast is not None
    batches = [values_of(own, "micro_batch_size", "num_micro_batches") for own in best.plan.pipelines]
    return {
        "plan": path,
        "forecast": as_plain(best.plan.forecast),
        "num_pipelines": len(batches),
        "schedule": best.plan.schedule,
        **batches[0],
        "pipelines": batches,
        **values_of(best.plan, "optimizer_sharding", "sequence_parallel"),
        "stages": [_stage_json(stage) for stage in best.cost.stages],
        "exact": result.exact,
        "stopped_by_time_limit": result.stopped,
        "gap": best.step_seconds / result.lower_bound_seconds - 1.0,
        "bound": bound_values(result.bound),
        "plans_simulated": result.num_simulated,
        "even_split": even and {"step_seconds": even.step_seconds, "fits": even.cost.fits},
        "no_even_split": result.no_even_split or None,
        "runners_up": [
            {
                "step_seconds": c.step_seconds,
                "layers": layer_list(c),
                "differs": differences(c, best),
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
    stages = sorted({len(pipeline.stages) for pipeline in plan.pipelines})
    counts = sorted({pipeline.num_micro_batches for pipeline in plan.pipelines})
    sizes = sorted({pipeline.micro_batch_size for pipeline in plan.pipelines})
    words = [
        f"{_count(len(plan.pipelines), 'pipeline')} x {_range(stages, 'stage')}",
        f"{_range(counts, 'micro-batch', 'micro-batches')} of "
        + (str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"),
        plan.schedule,
    ]
    widths = sorted({len(r) for stage in plan.stages for r in stage.replicas})
    if widths != [1]:
        what = "experts over" if plan.divides_experts else "tensor width"
        words.append(f"{what} {'/'.join(map(str, widths))}" + " cards" * plan.divides_experts)
    if plan.sequence_parallel:
        words.append("tokens divided")
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
    parts = [
        f"step {show_seconds(step)}",
        f"{tokens / step:,.0f} tok/s",
        f"MFU {mfu_of(cost, problem):.0%} of the combined peak",
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
    if result.bound is None:
        return [f"proven fastest of the searched plans, in the simulation{simulated}"]
    first, *rest = bound_words(result.bound, result.best.step_seconds, result.best.plan.world_size)
    return [f"best found, not proven{simulated}; {first}", *rest]


def runner_lines(result: SearchResult) -> list[str]:
    """Each runner-up: how much slower it is, in what it differs from the plan, and where its time goes."""
    best = result.best
    return [
        f"+{candidate.step_seconds / best.step_seconds - 1:.1%} {differences(candidate, best)}: "
        f"{slower_because(candidate.cost, best.cost)}"
        for candidate in result.runners_up
    ]


def differences(candidate: Candidate, best: Candidate) -> str:
    """What a plan has otherwise than the best one: `layers 4,9 | 13; micro-batches 8 of 4`."""
    own, others = _looks(candidate), _looks(best)
    words = [f"{name} {own[name]}".strip() for name in own if own[name] != others[name]]
    words = [text if len(text) <= MAX_WORDS else f"{text[: MAX_WORDS - 3]}..." for text in words]
    return "; ".join(words) or "the same on other cards of these types"


def _looks(candidate: Candidate) -> dict[str, str]:
    """What may differ between plans, in words: by stage, and once where all have the same."""
    plan = candidate.plan

    def each(value: Callable[[StagePlan], object]) -> str:
        rows = [[str(value(stage)) for stage in pipeline.stages] for pipeline in plan.pipelines]
        values = {text for row in rows for text in row}
        return values.pop() if len(values) == 1 else " | ".join(dict.fromkeys(map(",".join, rows)))

    batches = (f"{p.num_micro_batches} of {p.micro_batch_size}" for p in plan.pipelines)
    return {
        "": plan.schedule,
        "cards": describe_cards(candidate),
        "layers": layer_list(candidate),
        "micro-batches": " | ".join(dict.fromkeys(batches)),
        "tensor width": each(lambda stage: len(stage.replicas[0])),
        "replicas": each(lambda stage: len(stage.replicas)),
        "recompute": each(lambda stage: f"{stage.num_recomputed} {stage.recompute}".removeprefix("0 ")),
        "in flight": each(lambda stage: stage.in_flight or "least"),
        "tokens": "divided" if plan.sequence_parallel else "whole",
        "optimizer": "sharded" if plan.optimizer_sharding else "whole",
        "optimizer on hosts": each(lambda stage: f"{stage.optimizer_offload:.2g}"),
        "layers with activations on hosts": each(lambda stage: stage.activation_offload),
        "pages": each(lambda stage: stage.parameter_offload),
    }


def slower_because(cost: PlanCost, best: PlanCost) -> str:
    """The parts of the step that differ most from those of `best`, those that are shorter among them."""
    parts, best_parts = _parts(cost), _parts(best)
    growth = {name: parts[name] - best_parts[name] for name in parts}
    most = max(map(abs, growth.values()))
    named = [name for name in growth if abs(growth[name]) >= max(most / 4, 1e-6)]
    named.sort(key=lambda name: -abs(growth[name]))
    signs = {name: "+" if growth[name] > 0 else "-" for name in named}
    return ", ".join(f"{name} {signs[name]}{show_seconds(abs(growth[name]))}" for name in named) or "as fast"


def left_out_lines(left_out: Sequence[LeftOut]) -> list[str]:
    """The cards that are left out, by type, one line per reason."""
    found: dict[str, dict[str, list[str]]] = {}
    for item in left_out:
        found.setdefault(item.reason, {}).setdefault(item.card.type, []).append(item.card.name)
    return [
        ", ".join(f"{len(names)} {name} ({_some(names)})" for name, names in types.items()) + f": {reason}"
        for reason, types in found.items()
    ]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def layer_list(candidate: Candidate) -> str:
    """Layers per stage, as Yuan 2.0's scripts write them; unlike pipelines with ` | ` between."""
    return " | ".join(dict.fromkeys(map(to_blocks, candidate.plan.pipelines)))


def megatron_layout(candidate: Candidate) -> str:
    """The cut as Megatron-LM writes it; nothing if it divides layers or pipelines are cut unlike."""
    if candidate.plan.divided_layers:
        return ""
    layouts = set(map(to_layout, candidate.plan.pipelines))
    return layouts.pop() if len(layouts) == 1 else ""


def cut_words(candidate: Candidate) -> str:
    layout = megatron_layout(candidate)
    return f"layers {layer_list(candidate)}" + (f"; Megatron layout {layout}" if layout else "")


def describe_cards(candidate: Candidate) -> str:
    """`4 A100-80G > 2 T4`: a pipeline's cards in the order of its stages; of several `2 x (...) + ...`."""
    types: list[list[str]] = [[] for _ in candidate.plan.pipelines]
    for stage in candidate.cost.stages:
        types[stage.pipeline] += [card.type for card in stage.cards]
    runs = (((name, len(list(own))) for name, own in itertools.groupby(row)) for row in types)
    counts = Counter(" > ".join(f"{count} {name}" for name, count in row) for row in runs)
    return " + ".join(f"{count} x ({words})" if count > 1 else words for words, count in counts.items())


def limited_by(stages: Sequence[StageCost], cost: PlanCost) -> str:
    """What keeps a stage, or one of alike pipelines' stages, from taking another layer. The slowest stages
    are those of the worker that is busiest in a step: replicas divide the micro-batches among them, and
    unlike pipelines have unlike numbers of these."""
    words: list[str] = []
    busy = max(_busy_seconds(cost, stage.pipeline, stage.stage) for stage in stages)
    if busy >= _most_busy_seconds(cost) * (1 - 1e-9):
        words.append("time, the slowest")
    if any(stage.memory.total + stage.one_more_layer_bytes > stage.capacity_bytes for stage in stages):
        words.append("MEMORY")
    return " and ".join(words) or "-"


def even_words(result: SearchResult) -> str:
    """How the even split compares, to append to a line."""
    even = result.even_split
    if even is None:
        return f"     no even split: {result.no_even_split}"
    ratio = even.step_seconds / result.best.step_seconds
    return f"     even split: {ratio:.2f}x the time" + ("" if even.cost.fits else ", and it does not fit")


def _stage_rows(best: Candidate) -> list[str]:
    """A row for each stage of each kind of pipeline; several kinds have a heading each."""
    kinds = _kinds(best)
    rows = [("stage", "cards", "layers", "fwd+bwd", "busy", "memory of card, GiB", "limited by")]
    headings: dict[int, str] = {}
    for numbers in kinds[:MAX_KINDS]:
        if len(kinds) > 1:
            headings[len(rows)] = _kind_words(best, numbers)
        of_kind = [
            _stage_row(best.cost, numbers, s) for s in range(len(best.plan.pipelines[numbers[0]].stages))
        ]
        most = max(MAX_STAGE_ROWS // min(len(kinds), MAX_KINDS), 4)
        if len(of_kind) > most:
            left_out = ("...", f"{len(of_kind) - most} more", "", "", "", "", "")
            of_kind = [*of_kind[: most // 2], left_out, *of_kind[-(most - most // 2) :]]
        rows += of_kind
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines: list[str] = []
    for number, row in enumerate(rows):
        lines += [headings[number]] if number in headings else []
        lines.append("  ".join(map(str.ljust, row, widths)).rstrip())
    if len(kinds) > MAX_KINDS:
        lines.append(f"... and {len(kinds) - MAX_KINDS} more kinds of pipelines; --report F.html shows all")
    return lines


def _kinds(best: Candidate) -> list[list[int]]:
    """Numbers of the pipelines that are alike in types of cards, layers and share of the batch."""
    looks: list[list[object]] = [[p.micro_batch_size, p.num_micro_batches] for p in best.plan.pipelines]
    for stage in best.cost.stages:
        types = tuple(card.type for card in stage.cards)
        looks[stage.pipeline].append((types, len(stage.replicas), layer_words(stage), stage.experts))
    found: dict[object, list[int]] = {}
    for number, look in enumerate(looks):
        found.setdefault(tuple(look), []).append(number)
    return list(found.values())


def _kind_words(best: Candidate, numbers: Sequence[int]) -> str:
    """`pipelines 0, 2: 5 micro-batches of 6 each, 60 of 80 sequences`: the share of a kind of pipeline."""
    pipeline = best.plan.pipelines[numbers[0]]
    share = len(numbers) * pipeline.micro_batch_size * pipeline.num_micro_batches
    names = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return (
        f"pipeline{'s' * (len(numbers) > 1)} {names}: "
        f"{_count(pipeline.num_micro_batches, 'micro-batch', 'micro-batches')} of {pipeline.micro_batch_size}"
        f"{' each' * (len(numbers) > 1)}, {share} of the batch's {best.plan.global_batch_size} sequences"
    )


def _stage_row(cost: PlanCost, numbers: Sequence[int], s: int) -> tuple[str, ...]:
    """A stage of some alike pipelines, with its slowest time and its tightest memory in these."""
    same = [stage for stage in cost.stages if stage.stage == s and stage.pipeline in numbers]
    worst = max(same, key=lambda stage: (stage.memory.total / stage.capacity_bytes, -stage.pipeline))
    busy = max(_busy_seconds(cost, number, s) for number in numbers) / cost.step_seconds
    return (
        str(s),
        _cards_words(same),
        layer_words(worst),
        show_seconds(max(stage.forward_seconds + stage.backward_seconds for stage in same)),
        "#" * round(10 * busy) + "." * (10 - round(10 * busy)) + f" {busy:.0%}",
        f"{worst.memory.total / GIB:.1f} / {worst.card_bytes / GIB:.1f} "
        f"({worst.memory.total / worst.card_bytes:.0%})",
        limited_by(same, cost),
    )


def _busy_seconds(cost: PlanCost, pipeline: int, s: int) -> float:
    """Seconds of a step in which the busiest worker of a stage computes, over all stages of that worker."""
    return max(cost.simulations[pipeline].busy_seconds[worker] for worker in cost.workers[pipeline][s])


def _most_busy_seconds(cost: PlanCost) -> float:
    return max(busy for simulation in cost.simulations for busy in simulation.busy_seconds)


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
    work = _most_busy_seconds(cost)
    return {
        "slowest stage": work,
        "bubble and waiting": cost.compute_seconds - work,
        "gradient reduction": cost.grad_reduce_seconds + cost.tied_embedding_seconds,
        "optimizer step": cost.update_seconds,
        "weight sync": cost.weight_sync_seconds,
    }


def memory_lines(cost: PlanCost, problem: PlanProblem) -> list[str]:
    """How far cards may be filled; and what the hosts hold, by type of card, if they hold something."""
    lines = [
        f"memory: at most {problem.memory_fraction:.0%} of what torch reports of a card "
        f"(search.memory_fraction: {problem.memory_fraction:g})"
    ]
    most: dict[str, StageCost] = {}
    for stage in cost.stages:
        if stage.host_bytes > most.get(stage.card.type, stage).host_bytes or stage.card.type not in most:
            most[stage.card.type] = stage
    for name, stage in most.items():
        if stage.host_bytes:
            of = f"of {show_bytes(stage.host_capacity_bytes)}"
            if problem.cluster.groups[stage.card.node].host is None:
                key = problem.cluster.host_key(stage.card.node)
                of += f", assumed: as much as the cards have together; state {key}"
            what = "optimizer state" if stage.leaving is None else "optimizer state and activations"
            what = what if stage.pages is None else f"parameters in pages, {what}"
            lines.append(f"{what} on the host: at most {show_bytes(stage.host_bytes)} per {name} ({of})")
    return lines


def _stage_json(stage: StageCost) -> dict[str, Any]:
    return {
        **values_of(stage, "pipeline", "stage"),
        "card": stage.card.name,
        "cards": [[card.name for card in replica] for replica in stage.replicas],
        "type": stage.card.type,
        "layers": list(stage.layers),
        "experts": list(stage.experts) if len(stage.experts) > 1 else None,
        "recompute": stage.recompute,
        "recomputed_layers": stage.num_recomputed,
        **values_of(stage, "in_flight", "forward_seconds", "backward_seconds"),
        "peak_memory_bytes": stage.memory.total,
        "capacity_bytes": stage.card_bytes,
        "usable_bytes": stage.capacity_bytes,
        **values_of(stage, "host_bytes", "source"),
    }


def _count(number: int, word: str, plural: str | None = None) -> str:
    return f"{number} {word if number == 1 else plural or word + 's'}"
