"""Shows what PATH holds: a model, run, cluster, plan or profile file; token files (their prefix, or the
.idx); a checkpoint's directory, a run's log directory, a model or adapters in Hugging Face's format. Exits
with 2 and the reasons if incomplete."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

from yuan_train.config.cluster import load_cluster
from yuan_train.config.errors import ConfigError, YuanError
from yuan_train.config.load import is_mapping, read_document
from yuan_train.config.model import load_model
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import load_plan
from yuan_train.config.profile import load_profile
from yuan_train.config.rl import is_rl_run, load_rl
from yuan_train.config.rl_plan import is_rl_plan, load_rl_plan
from yuan_train.config.run import load_run
from yuan_train.config.units import show_bytes, show_seconds
from yuan_train.report.run_log import is_log_directory, read_run

Facts = dict[str, Any]


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("path", metavar="PATH", help="a file, a directory, or a prefix of token files")
    add("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the facts. With --json, also those of an incomplete file, before YuanError is raised."""
    path = Path(arguments.path)
    facts: Facts = {"kind": "unknown", "path": str(path), "whole": True}
    failure: YuanError | None = None
    try:
        facts["kind"] = kind_of(path)
        facts |= INSPECT[facts["kind"]](path)
        if not facts["whole"]:
            faults = facts.get("faults") or ["it is incomplete"]
            failure = YuanError("\n".join(f"{path}: {fault}" for fault in faults))
    except YuanError as error:
        failure = error
        facts |= {"whole": False, "faults": str(error).splitlines()}
    if arguments.json:
        print(json.dumps(facts, ensure_ascii=False))
    elif failure is None:
        print("\n".join(_lines(facts)))
    if failure is not None:
        raise failure
    return 0


def kind_of(path: Path) -> str:
    """The kind of what is at `path`: a key of INSPECT. Raises ConfigError if its keys match no kind."""
    if path.is_dir():
        if is_log_directory(path) and not any(path.glob("step-*")):
            return "log"
        if (path / "adapter_config.json").is_file():
            return "adapters"
        weights = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")
        if (path / "config.json").is_file() and any(any(path.glob(name)) for name in weights):
            return "hugging_face"
        names = ("tokenizer.model", "tokenizer.json")
        return "tokenizer" if any((path / name).exists() for name in names) else "checkpoint"
    if path.suffix in (".idx", ".bin") or any(Path(f"{path}{end}").exists() for end in (".idx", ".bin")):
        return "tokens"
    if path.suffix == ".model":
        return "tokenizer"
    document = read_document(path)
    if is_rl_plan(document):
        return "rl_plan"
    keys = set(document.value) if is_mapping(document.value) else set[str]()
    for kind, keys_of_kind in _KEYS_OF_KIND.items():
        if keys & keys_of_kind:
            return kind
    raise ConfigError(
        f"{path}: its keys match no kind of file (a model has num_layers, a run train, a cluster nodes, "
        "a plan pipelines, an RL plan roles, a profile entries)"
    )


_KEYS_OF_KIND = {
    # In this order: a plan and a run hold a model, a profile may hold links as a cluster does.
    "plan": {"pipelines", "ranks"},
    "profile": {"entries"},
    "cluster": {"nodes", "device_types"},
    "run": {"data", "train", "optimizer"},
    "model": {"num_layers", "hidden_size", "num_attention_heads", "vocab_size", "ffn_hidden_size"},
}


# --- one function per kind: what it holds ----------------------------------------------------------------


def inspect_model(path: Path) -> Facts:
    """Sizes, parameters and FLOP of a model."""
    model = load_model(path)
    layer = model.layer_forward_flops(model.max_sequence_length)
    return {
        **_fields(model, "name", "architecture", "attention", "parameters"),
        **({"active_parameters": model.active_parameters} if model.num_experts else {}),
        "parameters_per_layer": model.layer_parameters,
        **_fields(model, "embedding_parameters", "num_layers", "hidden_size", "num_attention_heads"),
        "num_key_value_heads": model.key_value_heads,
        **_fields(model, "head_dim", "vocab_size", "max_sequence_length"),
        "forward_flops_per_token": model.num_layers * layer + model.head_forward_flops,
        "training_flops_per_token": model.training_flops(model.max_sequence_length),
    }


def inspect_log(path: Path) -> Facts:
    """What a run has reached; `show` tells more."""
    run = read_run(path)
    return {
        "model": run.model,
        "trains": run.kind,
        "steps": run.num_steps,
        "steps_done": run.steps.last["step"],
        "loss": run.steps.last.get("loss"),
        "step_seconds": run.step_seconds,
        "forecast_step_seconds": run.forecast_seconds,
        "more": f"yuan-train show {quote(str(path))}",
    }


def inspect_run(path: Path) -> Facts:
    """Lengths of a run, and whether its data exists."""
    if is_rl_run(path):
        return _rl_facts(path)
    config = load_run(path)
    tokens = config.train.global_batch_size * config.data.sequence_length
    flops = config.model.training_flops(config.data.sequence_length)
    return {
        "model": config.model.name,
        "parameters": config.model.parameters,
        **_fields(config.train, "steps", "global_batch_size"),
        "sequence_length": config.data.sequence_length,
        "tokens_per_step": tokens,
        "tokens": tokens * config.train.steps,
        "training_flops": flops * tokens * config.train.steps,
        "precision": config.train.precision,
        "objective": config.objective.kind,
        "data": [
            _fields(source, "prefix", "weight")
            | {"there": all(Path(f"{source.prefix}{end}").exists() for end in (".bin", ".idx"))}
            for source in (*config.data.train, *config.data.validation)
        ],
        "pairs": config.data.pairs,
        "checkpoints": config.checkpoint.directory,
        "log": config.log.directory,
    }


def inspect_cluster(path: Path) -> Facts:
    """The cards of a cluster."""
    cluster = load_cluster(path)
    cards = [cluster.device_type(card.type) for card in cluster.cards]
    return {
        "name": cluster.name,
        "nodes": [
            {
                "name": group.name,
                "count": group.count,
                "devices": count,
                "device": name,
                "memory": show_bytes(cluster.device_type(name).memory),
                "bf16": cluster.device_type(name).bf16 is not None,
            }
            for group in cluster.nodes
            for name, count in Counter(group.types).items()
        ],
        "cards": len(cards),
        "memory_bytes": sum(card.memory for card in cards),
        "cards_without_bf16": sum(card.bf16 is None for card in cards),
        "dedicated_links": len(cluster.links),
    }


def inspect_plan(path: Path) -> Facts:
    """The stages of a plan; loading checks every constraint."""
    plan = load_plan(path)
    forecast = plan.forecast
    return {
        "valid": True,
        "cluster": plan.cluster,
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        **_fields(plan, "sequence_length", "global_batch_size", "schedule"),
        **_fields(plan, "optimizer_sharding", "sequence_parallel", "world_size"),
        "pipelines": len(plan.pipelines),
        "stages": [
            _stage_facts(plan, p, s)
            for p, pipeline in enumerate(plan.pipelines)
            for s in range(len(pipeline.stages))
        ],
        "forecast_step_seconds": forecast.step_seconds if forecast else None,
        "forecast_source": forecast.source if forecast else None,
    }


def inspect_rl_plan(path: Path) -> Facts:
    """The roles of an RL plan and their stages; loading checks every constraint."""
    plan = load_rl_plan(path)
    generation, forecast = plan.roles.generation, plan.forecast
    engines = plan.roles.policy.plan if generation.plan is None else generation.plan
    reference, critic = plan.roles.reference, plan.roles.critic
    return {
        "valid": True,
        "cluster": plan.cluster,
        "model": plan.roles.policy.plan.model.name,
        **_fields(plan, "mode", "staleness", "world_size"),
        "placement": "shared" if generation.is_shared else generation.with_ or "apart",
        "reference": None if reference is None else reference.where or "own cards",
        "critic": None if critic is None else critic.with_ or "own cards",
        "engines": [
            {
                "engine": e,
                "share": round(share, 4),
                "slots": generation.slots or pipeline.num_sequences,
                "cards": sorted({engines.ranks[rank].type for rank in pipeline.ranks}),
            }
            for e, (pipeline, share) in enumerate(zip(engines.pipelines, plan.engine_shares, strict=True))
        ]
        if generation.with_ != "servers"
        else [{"server": e, "share": round(share, 4)} for e, share in enumerate(plan.engine_shares)],
        "stages": [
            {"role": name, "ranks": f"{ranks.start}-{ranks.stop - 1}", **_stage_facts(own, p, s)}
            for (name, own), ranks in zip(plan.plans.items(), plan.role_ranks.values(), strict=True)
            for p, pipeline in enumerate(own.pipelines)
            for s in range(len(pipeline.stages))
        ],
        "forecast_step_seconds": forecast.step_seconds if forecast else None,
        "forecast_sync_mode_seconds": forecast.sync_mode_seconds if forecast else None,
        "forecast_source": forecast.source if forecast else None,
    }


def inspect_profile(path: Path) -> Facts:
    """What was measured."""
    profile = load_profile(path)
    return {
        **_fields(profile, "source", "model", "machine", "precision", "sequence_length"),
        "entries": [
            {
                **_fields(entry, "device_type", "tensor_parallel", "micro_batch_size", "recompute"),
                "layers": len(entry.layers),
                "layer_forward": show_seconds(entry.layers[0].forward_seconds),
                "layer_backward": show_seconds(entry.layers[0].backward_seconds),
            }
            for entry in profile.entries
        ],
        "links": [f"{link.from_} to {link.to}" for link in profile.links],
        "generation": [
            {
                **_fields(own, "device_type", "tensor_parallel"),
                "slots": list(own.slots),
                "layer_of_a_round": show_seconds(own.layer_seconds[-1][-1]),
            }
            for own in profile.generation
        ],
    }


def inspect_tokens(path: Path) -> Facts:
    """Documents and tokens of a pair of token files; opening them checks that they are complete."""
    from yuan_train.data.indexed import IndexedDataset

    return {key: value for key, value in asdict(IndexedDataset(path).facts()).items() if value is not None}


def inspect_tokenizer(path: Path) -> Facts:
    """Size and special tokens of a tokenizer."""
    from yuan_train.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(path)
    return {
        **_fields(tokenizer, "vocab_size", "eod_id", "prefix_ids"),
        "stop_ids": sorted(tokenizer.stop_ids),
        "chat_template": tokenizer.settings.chat_template is not None,
        "sha256": tokenizer.digest,
    }


def inspect_checkpoint(path: Path) -> Facts:
    """Content of a checkpoint, and whether it is complete."""
    from yuan_train.checkpoint.load import describe

    return describe(path)


def inspect_published(path: Path) -> Facts:
    """A model in Hugging Face's format: its weights, which must be those of its config, and its tokenizer."""
    from yuan_train.checkpoint.hf import find_tokenizer_file, open_model

    tensors = open_model(path, load_model(path)).values()
    tokenizer = find_tokenizer_file(path)
    return inspect_model(path) | {
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}),
        "bytes": sum(tensor.num_bytes for tensor in tensors),
        "tokenizer": tokenizer and tokenizer.name,
        "more": f"yuan-train import-hf {quote(str(path))} --out CKPT",
    }


def inspect_adapters(path: Path) -> Facts:
    """Adapters in PEFT's format."""
    from yuan_train.checkpoint.hf import open_safetensors, read_json_object
    from yuan_train.checkpoint.peft import CONFIG, WEIGHTS_FILE

    config, tensors = read_json_object(path / CONFIG), open_safetensors(path / WEIGHTS_FILE).values()
    return {
        **{key: config.get(key) for key in ("peft_type", "r", "lora_alpha", "target_modules")},
        "tensors": len(tensors),
        "bytes": sum(tensor.num_bytes for tensor in tensors),
        "more": f"yuan-train import-hf {quote(str(path))} --base CKPT --out CKPT",
    }


INSPECT: dict[str, Callable[[Path], Facts]] = {
    "model": inspect_model,
    "run": inspect_run,
    "cluster": inspect_cluster,
    "plan": inspect_plan,
    "rl_plan": inspect_rl_plan,
    "profile": inspect_profile,
    "tokens": inspect_tokens,
    "tokenizer": inspect_tokenizer,
    "log": inspect_log,
    "hugging_face": inspect_published,
    "adapters": inspect_adapters,
    "checkpoint": inspect_checkpoint,
}


def _rl_facts(path: Path) -> Facts:
    run = load_rl(path)
    files = [source.file for source in run.data.prompts]
    return {
        "model": run.model.name,
        "parameters": run.model.parameters,
        "algorithm": run.algorithm.name,
        **_fields(run.algorithm, "advantage", "scale", "normalise"),
        **_fields(run.train, "steps", "prompts_per_step"),
        "group": run.algorithm.group,
        "samples_per_step": run.samples_per_step,
        "max_prompt_tokens": run.data.max_prompt_tokens,
        "max_new_tokens": run.generation.max_new_tokens,
        "precision": run.train.precision,
        "rewards": [function.label for function in run.reward.functions],
        "reference": run.needs_reference,
        "prompts": [{"file": file, "there": Path(file).exists()} for file in files],
        "checkpoints": run.checkpoint.directory,
        "log": run.log.directory,
    }


def _fields(value: object, *names: str) -> Facts:
    """Facts that are called as the value calls them."""
    return {name: getattr(value, name) for name in names}


def _stage_facts(plan: Plan, p: int, s: int) -> Facts:
    stage = plan.pipelines[p].stages[s]
    facts: Facts = {
        "pipeline": p,
        "stage": s,
        "layers": list(stage.layers),
        **_fields(stage, "embedding", "head"),
        "replicas": [list(replica) for replica in stage.replicas],
        "cards": sorted({plan.ranks[rank].type for rank in stage.ranks}),
        "recompute": stage.recompute,
        "recomputed_layers": stage.num_recomputed,
    }
    if plan.optimizer_sharding:
        facts["optimizer_share"] = stage.optimizer_share
    if stage.experts is not None:
        facts["experts"] = list(stage.experts)
    if stage.in_flight is not None:
        facts["in_flight"] = stage.in_flight
    for entry in plan.forecast.stages if plan.forecast else ():
        if (entry.pipeline, entry.stage) == (p, s):
            facts["peak_memory_bytes"] = entry.peak_memory_bytes
    return facts


# --- for a reader ----------------------------------------------------------------------------------------


def _lines(facts: Facts) -> list[str]:
    """`key: value` lines; a list of facts gets one line per item below its key."""
    width = max(map(len, facts)) + 1
    lines: list[str] = []
    for key, value in facts.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            words = (
                ("  ".join(f"{name} {_show(name, fact)}" for name, fact in item.items())) for item in value
            )
            lines += [f"{key}:", *("  " + line for line in words)]
        else:
            lines.append(f"{key + ':':<{width}} {_show(key, value)}")
    return lines


def _show(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_bytes"):
        return show_bytes(value)
    if key.endswith("_seconds"):
        return show_seconds(value)
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}" if value < 1e15 else f"{value:.4g}"
    return str(value)
