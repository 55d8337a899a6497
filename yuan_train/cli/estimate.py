"""Estimates the peak memory of GRPO or PPO on one card, by phase and category, from a model's sizes; says if
it fits, and what would make it fit. Needs neither a card, nor weights, nor torch. No number is fitted.

--model is a name (Qwen2.5-7B), a config.json of Hugging Face's, its folder, a model file of ours, or a
checkpoint.
Without --method, all methods are shown.

  full              all parameters, torch's AdamW      adam8            8-bit Adam
  adam8+recompute   and gradient checkpointing         lora             adapters of rank 16 alone
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from yuan_train.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from yuan_train.config.model import ModelConfig
    from yuan_train.estimate.memory import GroupShape, MemoryCase
    from yuan_train.estimate.shape import ModelShape

METHODS = ("full", "adam8", "adam8+recompute", "lora")
ENGINES = ("trl-0.14", "yuan")
DEFAULT_CARD = "H100-80G"
DEFAULT_SAMPLES = {"group": 4, "prompt": 256, "new": 786}
LARGEST_LENGTH = 2**31


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--model", metavar="M", help="a name, a config.json or its folder, a model file, or a checkpoint")
    add("--method", choices=METHODS, help="what is trained, and how; without it, all")
    add("--group", type=_count, metavar="N", help="answers to a prompt (4)")
    add("--prompt", type=_count, metavar="N", help="tokens of the prompt (256)")
    add("--new", type=_count, metavar="N", help="tokens of the longest answer (786)")
    add("--card", default=DEFAULT_CARD, metavar="NAME", help=f"of the catalogue ({DEFAULT_CARD})")
    add(
        "--engine",
        choices=ENGINES,
        help="whose code trains: TRL 0.14 as it was counted, or our own engine, whose methods are full "
        "and lora (trl-0.14; yuan for layers that only our engine has)",
    )
    add("--algorithm", choices=("grpo", "ppo"), help="ppo has a critic: our own engine alone (grpo)")
    add("--reward-model", metavar="M", help="a model that scores on the same cards: our own engine alone")
    add("--largest", choices=("group", "new"), help="also find the largest of these that fits")
    add("--plan", metavar="F", help="an RL plan: every role's bytes on its cards, as its roles hold them")
    add("--json", action="store_true", help="print one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Estimate and print; 0 whether it fits or not. Raises ConfigError for wrong input."""
    from yuan_train.config.devices import CATALOGUE, find_card, suggest_cards
    from yuan_train.estimate import memory as report

    if arguments.plan:
        return _print_roles(arguments)
    card = find_card(arguments.card)
    if card is None:
        meant = suggest_cards(arguments.card)
        hint = f"; did you mean {meant}?" if meant else ""
        raise ConfigError(
            f"--card {arguments.card}: there is no such card{hint} (has: {', '.join(CATALOGUE)})"
        )
    arguments.card = card
    if arguments.model is None:
        raise ConfigError("no --model; wanted a name such as Qwen2.5-7B, a config.json or a model file")
    cases = _cases(arguments)
    if arguments.method is None and len(cases) > 1:
        if arguments.largest:
            raise ConfigError(
                f"--largest {arguments.largest} without --method; add one of {', '.join(METHODS)}"
            )
        if arguments.json:
            print(json.dumps(report.methods_json(cases)))
        else:
            print(report.methods_text(cases))
        return 0
    if arguments.json:
        print(json.dumps(report.estimate_json(cases[0], arguments.largest)))
    else:
        print(report.estimate_text(cases[0], arguments.largest))
    return 0


def _print_roles(arguments: argparse.Namespace) -> int:
    """Every role of an RL plan. Raises ConfigError if something else is asked for as well."""
    from yuan_train.config.rl_plan import load_rl_plan
    from yuan_train.estimate.memory import plan_memory, roles_memory_json, roles_memory_text

    for name in ("model", "method", "engine", "algorithm", "largest", "new"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--plan has its own model, cards and slots; leave --{name} out")
    plan = load_rl_plan(arguments.plan)
    scorer = _reward_model(arguments.reward_model)
    if scorer is not None and plan.roles.reward is not None:
        raise ConfigError("--reward-model: the plan has one on cards of its own; leave it out")
    found = plan_memory(plan, prompt=arguments.prompt, group=arguments.group or 1, reward_model=scorer)
    if arguments.json:
        print(json.dumps(roles_memory_json(found)))
    else:
        print(roles_memory_text(found))
    return 0


def _cases(arguments: argparse.Namespace) -> list[MemoryCase]:
    """The case of the method that was asked for, or of each that the engine has."""
    from yuan_train.config.model import ModelConfig
    from yuan_train.estimate.memory import MemoryCase

    engine, critic = arguments.engine, arguments.algorithm == "ppo"
    if critic or arguments.reward_model is not None:
        if engine == "trl-0.14":
            raise ConfigError(
                "--engine trl-0.14: its GRPO with reward functions was counted, without a critic or a reward "
                "model; use --engine yuan, or leave --algorithm and --reward-model out"
            )
        engine = "yuan"
    model = _for_engine(read_model(arguments.model), engine)
    samples = _samples(arguments)
    wanted = METHODS if arguments.method is None else (arguments.method,)
    cases = [
        MemoryCase(
            model=model,
            method=name,
            samples=samples,
            card=arguments.card,
            critic=critic,
            reward_model=_reward_model(arguments.reward_model),
        )
        for name in wanted
    ]
    if cases[0].engine == "yuan":
        if arguments.method not in (None, "full", "lora"):
            raise ConfigError(
                f"--method {arguments.method}: our engine (yuan) has no 8-bit Adam; wanted full or lora. It "
                "keeps optimizer state on the host and recomputes instead: see what would fit"
            )
        if arguments.method == "lora" and isinstance(model, ModelConfig) and model.num_experts:
            raise ConfigError("--method lora: a model with experts has no adapters yet; wanted full")
        return cases[:1]
    return cases


def _reward_model(name: str | None) -> ModelConfig | None:
    """The reward model of the sizes that a name or a file has; None without a name."""
    if name is None:
        return None
    return replace(_our_model(read_model(name)), output="value")


def _samples(arguments: argparse.Namespace) -> GroupShape:
    from yuan_train.estimate.memory import GroupShape

    given = {name: getattr(arguments, name) for name in ("group", "prompt", "new")}
    return GroupShape(**DEFAULT_SAMPLES | {name: value for name, value in given.items() if value is not None})


def _for_engine(model: ModelShape | ModelConfig, engine: str | None) -> ModelShape | ModelConfig:
    """The model as the engine wants it: sizes for TRL, a model for ours.

    Without a wish it is TRL's, as far as its layer is one that TRL trains. Raises ConfigError if the engine
    does not have such a layer.
    """
    from yuan_train.estimate.shape import ModelShape, shape_of

    if engine == "yuan":
        return _our_model(model)
    if isinstance(model, ModelShape):
        return model
    try:
        return shape_of(model)
    except ConfigError as error:
        if engine is not None:
            raise
        print(f"{error}: so it is estimated", file=sys.stderr)
        return model


def _our_model(model: ModelShape | ModelConfig) -> ModelConfig:
    from yuan_train.estimate.shape import ModelShape, to_model

    return to_model(model) if isinstance(model, ModelShape) else model


def read_model(name: str) -> ModelShape | ModelConfig:
    """A model by name (in any case of letters), of a `config.json` or its folder, or of a model file.

    Raises ConfigError if there is none, or if its layer is not known.
    """
    from yuan_train.config.load import read_document
    from yuan_train.config.model import is_published, load_model, locate_model, published_name
    from yuan_train.estimate.shape import PUBLISHED_SHAPES, has_shape, shape_from_config

    if not Path(name).exists():
        by_name = {known.lower(): shape for known, shape in PUBLISHED_SHAPES.items()}
        # As on the Hub: Qwen/Qwen2.5-7B-Instruct has the sizes of Qwen2.5-7B.
        plain = name.lower().rpartition("/")[2].removesuffix("-instruct")
        if plain in by_name:
            return by_name[plain]
    try:
        path = locate_model(name)
    except ConfigError as error:
        known = _unknown("file or model", name, PUBLISHED_SHAPES)
        raise ConfigError(f"--model {name}: {known}, and {error}") from None
    config = path / "config.json" if path.is_dir() else path
    document = read_document(config) if config.is_file() else None
    # Of Llama's layer sizes are enough, so that more models are counted than the engine trains.
    if document is not None and is_published(document) and has_shape(document):
        return shape_from_config(document, name=published_name(config))
    return load_model(path)


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    by_lower = {candidate.lower(): candidate for candidate in names}
    close = [candidate for candidate in by_lower if candidate.startswith(name.lower())]
    close += difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    hint = f"; did you mean {by_lower[close[0]]!r}?" if close else ""
    return f"there is no such {what}{hint} (has: {', '.join(names)})"


def _count(text: str) -> int:
    """A number of answers or tokens, for argparse."""
    if not text.isdecimal() or len(text) > 10 or not 0 < int(text) < LARGEST_LENGTH:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a whole number from 1 to {LARGEST_LENGTH - 1}")
    return int(text)
