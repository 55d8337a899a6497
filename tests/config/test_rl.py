"""Run files of reinforcement learning: defaults, laws, and the policy's run inside one."""

from dataclasses import replace

import pytest

from yuan_train.config.errors import ConfigError
from yuan_train.config.load import build, dump, parse_document
from yuan_train.config.rl import (
    AlgorithmConfig,
    RLConfig,
    ScheduleConfig,
    is_rl_run,
    load_rl,
    policy_run,
    validate_rl,
)

TINY = "configs/run/rl-tiny.yaml"


def refusal(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_rl(TINY, overrides)
    return str(error.value).splitlines()


def test_the_shipped_file_and_the_policys_run() -> None:
    run = load_rl(TINY)
    assert is_rl_run(TINY) and not is_rl_run("configs/run/tiny.yaml")
    assert build(parse_document(dump(run), name="again"), RLConfig, validate=validate_rl) == run
    policy = policy_run(run)
    assert policy.train.global_batch_size == 32 * 16 == run.samples_per_step
    assert policy.data.sequence_length == 5 and policy.data.resets
    assert policy_run(run, sequence_length=16).data.sequence_length == 16
    assert policy.optimizer == run.optimizer and policy.search == run.search.policy


def test_defaults_that_follow_from_others() -> None:
    def shape(algorithm: AlgorithmConfig) -> tuple[str | None, ...]:
        return algorithm.advantage, algorithm.scale, algorithm.normalise

    assert shape(AlgorithmConfig()) == ("group", "group", "sequence")
    assert shape(AlgorithmConfig(advantage="mean")) == ("mean", "none", "sequence")
    assert shape(AlgorithmConfig(name="reinforce_baseline")) == ("mean", "batch", "token")
    assert shape(AlgorithmConfig(name="dr_grpo", normalise="token")) == ("mean", "none", "token")
    assert shape(AlgorithmConfig(name="ppo")) == ("gae", "batch", "token")
    assert ScheduleConfig().staleness == 1 and ScheduleConfig(mode="sync").staleness == 0
    run = load_rl(TINY)
    assert (run.correction("sync"), run.correction("async")) == ("none", "aipo")
    kept = replace(run, algorithm=AlgorithmConfig(correction="decoupled"))
    assert kept.correction("sync") == "decoupled"


FAULTS = """
algorithm.group=1 | algorithm.group: 1: advantage group compares
algorithm.updates=3 | train.prompts_per_step: 32 groups do not divide into 3 updates
algorithm.kl={coefficient: 0.1, estimator: k1} | algorithm.kl.estimator: k1 in the loss
schedule={mode: sync, staleness: 2} | schedule.staleness: 2, but in sync mode
generation.weights=in_flight | generation.weights: in_flight, but in sync mode
generation.max_new_tokens=100 |
generation.max_new_tokens: 100 tokens after a prompt of 3 (data.max_prompt_tokens), but the model
generation.stop_ids=[12] | generation.stop_ids: 12 is no token
model.hidden_dropout=0.1 | model.hidden_dropout: 0.1
reward.clip=[1, 0] | reward.clip: wanted [smallest, largest]
reward.functions=[{name: regex, pattern: a}, {python: b}, {name: exact, python: 'c.py:d'}, {name: format}] |
reward.functions[0]: pattern 'a' has no group
reward.functions[1]: python: wanted
reward.functions[2]: wanted one of name
reward.functions[3]: format needs a pattern
optimizer.minimum_learning_rate=1 | optimizer.minimum_learning_rate: greater
evaluation.samples=4 | evaluation.samples: 4 answers
train.compile=true | train.compile
"""
"""Overrides, each with what is said of it; of one with several faults these follow."""


def test_every_fault_at_once() -> None:
    lines = FAULTS.strip().splitlines()
    overrides = [line.partition(" |")[0] for line in lines if " |" in line]
    parts = [part for line in lines if (part := line.rpartition(" |")[2].strip())]
    found = refusal(*overrides)
    for part in parts:
        assert any(part in line for line in found), (part, found)
    assert (len(overrides), len(parts), len(found)) == (13, 16, 16)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.groop=3", "unknown key 'groop'; did you mean 'group'?"),
        ("train.global_batch_size=4", "unknown key 'global_batch_size'"),
        ("generation.temperature=0", "greater than or equal to 0.001"),
        ("evaluation.temperature=1e-9", "evaluation.temperature: 1e-09; wanted 0 (the most probable"),
        ("algorithm.epochs=1000000000000000000000", "algorithm.epochs"),
        ("algorithm.name=gppo", "algorithm.name"),
        ("algorithm.advantage=gae", "gae needs the critic of name: ppo; grpo has none"),
        ("critic={lam: 0.9}", "critic: advantage group has none; leave it out, or set algorithm.name: ppo"),
        ("critic={gamma: 1.5}", "critic.gamma"),
        ("algorithm={advantage: return, scale: group}", "wanted batch or none"),
        ("generation.slots=24", "wanted a multiple of 16"),
        ("train.micro_batch_size=7", "512 answers of an update do not divide into micro-batches of 7"),
        ("data.prompts=[]", "wanted at least one, got none"),
        ("data.evaluation=", "evaluation.every: there is nothing to measure"),
        ("reward.timeout=10", "wanted a number with a unit"),
        ("reward.truncated=-2e12", "reward.truncated: "),
        ("reward.clip=[-1, 1e13]", "reward.clip[1]: "),
        ("reward.overlong.penalty=1e13", "reward.overlong.penalty: "),
        ("reward.functions=[{name: exact, weight: 1e13}]", "reward.functions[0].weight: "),
        ("reward.overlong.buffer=3", "3 tokens of answers of at most 2"),
        ("reward.functions=[{name: exact}, {name: exact}]", "a second 'exact'"),
        ("reward.functions=[{name: number, pattern: a}]", "number takes no pattern"),
        ("reward.functions=[]", "nothing gives a reward"),
        ("algorithm.clip=[1.0, 0.2]", "wanted less than 1"),
        ("data.template='Q: '", "has no {prompt}"),
        ("checkpoint={in_memory: 4, directory: ck}", "in_memory: 4: is for training, not yet for"),
    ],
)
def test_one_fault(override: str, message: str) -> None:
    (found,) = refusal(override)
    assert message in found
