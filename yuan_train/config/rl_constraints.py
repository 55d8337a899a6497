"""Constraints between the parts of a run of reinforcement learning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from yuan_train.config.errors import Violation
from yuan_train.config.rl import RewardFunction, RLConfig, policy_run
from yuan_train.config.run import validate_run

OF_A_TRAINING_RUN = ("model", "train", "optimizer", "checkpoint", "log")
"""Sections of which the constraints are those of a training run."""


def validate_rl(run: RLConfig) -> Iterator[Violation]:
    """Yield the violated constraints between the parts of a run."""
    for violation in validate_run(policy_run(run)):
        if violation.path[0] in OF_A_TRAINING_RUN and violation.path[1:] not in _SAID_BELOW:
            yield violation
        elif run.model.lora is not None and violation.path[0] == "search":
            yield replace(violation, path=("search", "policy", *violation.path[1:]))
    yield from _sizes(run)
    yield from _algorithm(run)
    yield from _rewards(run)
    if run.schedule.mode == "sync" and run.schedule.staleness:
        yield Violation(
            ("schedule", "staleness"),
            f"{run.schedule.staleness}, but in sync mode no answer is older than its batch; leave it out, or "
            "set mode: async",
        )
    evaluation = run.evaluation
    if evaluation.every and run.data.evaluation is None:
        yield Violation(("evaluation", "every"), "there is nothing to measure; give data.evaluation")
    if evaluation.samples > 1 and not evaluation.temperature:
        yield Violation(
            ("evaluation", "samples"),
            f"{evaluation.samples} answers to a prompt are all the same at temperature 0; set "
            "evaluation.temperature above 0, or samples: 1",
        )


_SAID_BELOW = (("global_batch_size",), ("compile",), ("trace",), ("output",))


def _sizes(run: RLConfig) -> Iterator[Violation]:
    model, train, generation, group = run.model, run.train, run.generation, run.algorithm.group
    if "{prompt}" not in run.data.template:
        yield Violation(("data", "template"), f"{run.data.template!r} has no {{prompt}}; say where it goes")
    if run.sequence_length > model.max_sequence_length:
        yield Violation(
            ("generation", "max_new_tokens"),
            f"{generation.max_new_tokens} tokens after a prompt of {run.data.max_prompt_tokens} "
            f"(data.max_prompt_tokens), but the model allows {model.max_sequence_length} in all "
            "(model.max_sequence_length)",
        )
    if model.hidden_dropout:
        yield Violation(
            ("model", "hidden_dropout"),
            f"{model.hidden_dropout}: the policy that trains would not be the one that drew; set it to 0",
        )
    if model.output != "vocabulary":
        yield Violation(("model", "output"), "a policy draws words; set it to vocabulary")
    if train.compile:
        yield Violation(("train", "compile"), "layers are not compiled here yet; leave it out")
    if train.trace is not None:
        yield Violation(("train", "trace"), "steps are not traced here yet; leave it out")
    for tier in ("parameters", "disk"):
        if tier in run.search.policy.tiers:
            yield Violation(
                ("search", "policy", "offload"), f"{tier}: written for pretraining alone; leave it out"
            )
    if train.prompts_per_step % run.algorithm.updates:
        yield Violation(
            ("train", "prompts_per_step"),
            f"{train.prompts_per_step} groups do not divide into {run.algorithm.updates} updates "
            "(algorithm.updates)",
        )
    elif train.prompts_per_step // run.algorithm.updates * group % train.micro_batch_size:
        rows = train.prompts_per_step // run.algorithm.updates * group
        yield Violation(
            ("train", "micro_batch_size"),
            f"{rows} answers of an update do not divide into micro-batches of {train.micro_batch_size}",
        )
    if generation.weights == "in_flight":
        yield Violation(
            ("generation", "weights"),
            "in_flight: engines do not take weights between two tokens yet; set between_batches, or leave it "
            "out",
        )
    if generation.slots is not None and generation.slots % group:
        yield Violation(
            ("generation", "slots"),
            f"{generation.slots}, but a prompt's {group} answers (algorithm.group) are written together; "
            f"wanted a multiple of {group}",
        )
    for stop in generation.stop_ids:
        if stop >= model.vocab_size:
            yield Violation(
                ("generation", "stop_ids"), f"{stop} is no token of a vocabulary of {model.vocab_size}"
            )


def _algorithm(run: RLConfig) -> Iterator[Violation]:
    algorithm = run.algorithm
    of_groups = ("group", "mean", "leave_one_out")
    if algorithm.group < 2 and algorithm.advantage in of_groups:
        yield Violation(
            ("algorithm", "group"),
            f"{algorithm.group}: advantage {algorithm.advantage} compares the answers to a prompt; "
            "wanted 2 or more",
        )
    if algorithm.filter == "zero_variance" and algorithm.group < 2:
        yield Violation(
            ("algorithm", "filter"), "zero_variance would drop every group of 1; set group to 2 or more"
        )
    if algorithm.scale == "group" and algorithm.advantage not in of_groups:
        yield Violation(
            ("algorithm", "scale"),
            f"group, but advantage {algorithm.advantage} is of tokens; wanted batch or none",
        )
    if algorithm.advantage == "gae" and algorithm.name != "ppo":
        yield Violation(
            ("algorithm", "advantage"), f"gae needs the critic of name: ppo; {algorithm.name} has none"
        )
    if algorithm.advantage == "gae" and algorithm.scale != "batch":
        yield Violation(("algorithm", "scale"), f"{algorithm.scale}, but gae is whitened; wanted batch")
    if run.critic is not None and algorithm.advantage != "gae":
        yield Violation(
            ("critic",),
            f"advantage {algorithm.advantage} has none; leave it out, or set algorithm.name: ppo",
        )
    if run.critic is not None and run.train.precision == "fp16":
        yield Violation(
            ("train", "precision"), "fp16: a critic's loss is not scaled yet; wanted bf16, fp32 or fp64"
        )
    kl = algorithm.kl
    if kl.coefficient and kl.where == "loss" and kl.estimator == "k1":
        yield Violation(
            ("algorithm", "kl", "estimator"),
            "k1 in the loss has a mean gradient of zero; wanted k2 or k3, or where: reward",
        )
    if algorithm.dual_clip is not None and algorithm.correction == "aipo":
        yield Violation(("algorithm", "dual_clip"), "aipo does not clip; leave it out")
    if algorithm.clip[0] >= 1:
        yield Violation(
            ("algorithm", "clip", 0), f"{algorithm.clip[0]:g}: a ratio is never below 0; wanted less than 1"
        )


def _rewards(run: RLConfig) -> Iterator[Violation]:
    reward = run.reward
    if not reward.functions and reward.model is None:
        yield Violation(("reward", "functions"), "nothing gives a reward; wanted a function, or reward.model")
    labels = [function.label for function in reward.functions]
    for i, function in enumerate(reward.functions):
        where = ("reward", "functions", i)
        for message in _faults(function):
            yield Violation(where, message)
        if function.label in labels[:i]:
            yield Violation(where, f"a second {function.label!r}; metrics go by name, so keep one")
    if reward.model is not None and "model" in labels:
        yield Violation(
            ("reward", "functions", labels.index("model")),
            "'model' is the name of reward.model's score; give the function another",
        )
    if reward.model is not None and not reward.functions and run.data.evaluation is not None:
        yield Violation(
            ("data", "evaluation"),
            "pass@1 counts answers that the first reward function gives 1, and there is none; give one "
            "(weight: 0 leaves the reward as it is), or leave the evaluation out",
        )
    if reward.clip is not None and reward.clip[0] >= reward.clip[1]:
        yield Violation(("reward", "clip"), f"wanted [smallest, largest], got {list(reward.clip)}")
    if reward.overlong.buffer > run.generation.max_new_tokens:
        yield Violation(
            ("reward", "overlong", "buffer"),
            f"{reward.overlong.buffer} tokens of answers of at most {run.generation.max_new_tokens} "
            "(generation.max_new_tokens); make it smaller",
        )


def _faults(function: RewardFunction) -> Iterator[str]:
    if (function.name is None) == (function.python is None):
        yield 'wanted either name (exact, number, regex, format) or python: "file.py:function"'
        return
    if function.python is not None:
        file, colon, name = function.python.rpartition(":")
        if not colon or not file.endswith(".py") or not name.isidentifier():
            yield f'python: wanted "file.py:function", got {function.python!r}'
    if function.pattern is None:
        if function.name in ("regex", "format"):
            yield f"{function.name} needs a pattern"
        return
    if function.name not in ("regex", "format"):
        yield f"{function.label} takes no pattern; leave it out"
        return
    try:
        groups = re.compile(function.pattern).groups
    except re.error as error:
        yield f"pattern {function.pattern!r}: {error}"
        return
    if function.name == "regex" and groups < 1:
        yield f"pattern {function.pattern!r} has no group (...) to compare with the answer"
