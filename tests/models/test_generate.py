"""Generation against full forwards, the sampling filters, and errors."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from yuan_train.config.errors import YuanError
from yuan_train.models import generate as generate_module
from yuan_train.models.attention import find_resets
from yuan_train.models.generate import DocumentRules, Sampling, generate, generate_batch, sample

EOD = 9
GREEDY = Sampling(temperature=0)


def greedy_by_full_forwards(model, ids, count, **switches):
    ids = list(ids)
    for _ in range(count):
        tokens = torch.tensor([ids])
        hidden = model(tokens, **vars(find_resets(tokens, eod_id=EOD, **switches)))
        ids.append(int(model.logits(hidden[0, -1]).argmax()))
    return ids[-count:]


@pytest.mark.parametrize(
    "prompt", [[3, 1, 4, 1, 5], [3], [EOD], [3, EOD, 4, 1], [3, 4, EOD], [7] * 9 + [EOD, 2, 2]]
)
@pytest.mark.parametrize(
    "switches",
    [
        {},
        dict(reset_position_ids=False),
        dict(reset_attention=True, reset_filter=True),
        dict(reset_position_ids=False, reset_filter=True),
    ],
)
def test_greedy_equals_full_forwards(make_model, monkeypatch, prompt, switches):
    monkeypatch.setattr(generate_module, "PREFILL_CHUNK", 4)
    model = make_model()
    rules = DocumentRules(eod_id=EOD, **switches)
    ours = list(generate(model, prompt, max_new_tokens=8, sampling=GREEDY, documents=rules))
    expected = greedy_by_full_forwards(model, prompt, 8, **switches)
    if EOD in expected:
        expected = expected[: expected.index(EOD) + 1]
    assert ours == expected


def test_streams(make_model, monkeypatch):
    model = make_model()
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append("forward"))
    step_slots = generate_module.step_slots
    monkeypatch.setattr(
        generate_module, "step_slots", lambda *a, **k: (calls.append("step"), step_slots(*a, **k))[1]
    )
    stream = generate(model, [1, 2, 3], max_new_tokens=5, seed=0)
    assert calls == []
    next(stream)
    assert calls == ["step"]
    next(stream)
    assert calls == ["step"] * 2


def test_the_seed_determines_the_tokens_and_the_global_generator_is_unused(make_model):
    model = make_model(init_std=0.1)
    before = torch.get_rng_state()
    runs = [list(generate(model, [1, 2], max_new_tokens=20, seed=seed)) for seed in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0] == list(generate(model, [1, 2], max_new_tokens=20, seed=5 + 2**64))
    assert torch.equal(before, torch.get_rng_state())
    assert len(list(generate(model, [1, 2], max_new_tokens=3))) == 3


def test_a_prompt_may_fill_the_model(make_model):
    model = make_model(max_sequence_length=8)
    assert len(list(generate(model, [1] * 5, max_new_tokens=3, seed=0))) == 3
    assert list(generate(model, [1] * 8, max_new_tokens=0)) == []


# Batches

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2], [7, EOD, 8, 3], [EOD, 1, 1, 1, 1, 1, 1, 1, 1]]


def columns(batch):
    """New tokens of each prompt."""
    rows = list(map(list, zip(*batch, strict=True)))
    for row in rows:
        ended = row.index(None) if None in row else len(row)
        assert row[ended:] == [None] * (len(row) - ended)
    return [[token for token in row if token is not None] for row in rows]


@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("attention", ["localized_filter", "plain"])
@pytest.mark.parametrize(
    "switches",
    [
        {},
        dict(reset_position_ids=False),
        dict(reset_attention=True, reset_filter=True),
        dict(reset_position_ids=False, reset_attention=True),
    ],
)
def test_prompts_of_unequal_length(make_model, monkeypatch, switches, attention, chunk):
    monkeypatch.setattr(generate_module, "PREFILL_CHUNK", chunk)
    model = make_model(attention=attention)
    options: dict[str, Any] = dict(max_new_tokens=10, sampling=GREEDY)
    options["documents"] = DocumentRules(eod_id=EOD, **switches)
    together = columns(generate_batch(model, PROMPTS, **options))
    assert together == [list(generate(model, prompt, **options)) for prompt in PROMPTS]


def test_a_batch_samples_the_same_tokens_as_its_prompts_alone(make_model):
    model = make_model(init_std=0.1)
    together = columns(generate_batch(model, PROMPTS, max_new_tokens=9, seed=5))
    alone = [list(generate(model, p, max_new_tokens=9, seed=5 + i)) for i, p in enumerate(PROMPTS)]
    assert together == alone


def test_a_batch_ends_with_its_last_prompt(make_model):
    model = make_model()
    options: dict[str, Any] = dict(max_new_tokens=8, sampling=GREEDY)
    rules = DocumentRules(reset_position_ids=False)
    unlimited = columns(generate_batch(model, PROMPTS[:2], documents=rules, **options))
    stop = next(token for token in unlimited[0] if token not in unlimited[1])
    rules = replace(rules, eod_id=stop)
    batch = columns(generate_batch(model, PROMPTS[:2], documents=rules, **options))
    assert batch[1] == unlimited[1] and len(batch[0]) == unlimited[0].index(stop) + 1
    same = list(generate_batch(model, [PROMPTS[0]] * 2, documents=rules, **options))
    assert len(same) == unlimited[0].index(stop) + 1


def test_no_prompt(make_model):
    with pytest.raises(YuanError, match="there is no prompt"):
        generate_batch(make_model(), [], max_new_tokens=1)


# Sampling

LOGITS = torch.tensor([0.5, 0.1, 0.05, 0.3, 0.05]).log()


def samples(count=400, **options):
    generator = torch.Generator().manual_seed(0)
    return [sample(LOGITS, Sampling(**options), generator) for _ in range(count)]


def test_temperature_one_follows_the_probabilities():
    counts = torch.bincount(torch.tensor(samples(4000)), minlength=5) / 4000
    torch.testing.assert_close(counts, LOGITS.exp(), rtol=0, atol=0.03)


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1e-40, 1e-320])
def test_low_temperatures_sample_the_most_probable_token(temperature):
    assert set(samples(20, temperature=temperature)) == {0}


@pytest.mark.parametrize(("top_k", "kept"), [(1, {0}), (2, {0, 3}), (3, {0, 1, 3}), (99, {0, 1, 2, 3, 4})])
def test_top_k(top_k, kept):
    assert set(samples(top_k=top_k)) == kept


@pytest.mark.parametrize(("top_p", "kept"), [(1e-9, {0}), (0.49, {0}), (0.6, {0, 3}), (0.85, {0, 1, 3})])
def test_top_p_keeps_the_token_that_crosses_p(top_p, kept):
    assert set(samples(top_p=top_p)) == kept


def test_top_p_applies_after_top_k():
    """Of the two most probable tokens, the first has 0.5 / 0.8 = 0.625, which reaches 0.6."""
    assert set(samples(top_k=2, top_p=0.6)) == {0}


# Errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(prompt_ids=[]), "the prompt is empty"),
        (dict(prompt_ids=[1, 50]), r"prompt_ids\[1\]: 50 is not in the vocabulary \[0, 50\)"),
        (dict(prompt_ids=[-1]), r"prompt_ids\[0\]: -1"),
        (dict(max_new_tokens=-1), "max_new_tokens -1"),
        (dict(max_new_tokens=63), "2 prompt tokens and 63 new ones .* at most 62 new tokens"),
    ],
)
def test_errors_are_raised_by_the_call(make_model, changes, message):
    arguments = {"prompt_ids": [1, 2], "max_new_tokens": 4, **changes}
    with pytest.raises(YuanError, match=message):
        generate(make_model(), **arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=-0.1), "temperature -0.1"),
        (dict(temperature=float("nan")), "temperature nan"),
        (dict(top_k=-1), "top_k -1"),
        (dict(top_p=0.0), "top_p 0.0"),
        (dict(top_p=1.5), "top_p 1.5"),
    ],
)
def test_sampling_out_of_range(options, message):
    with pytest.raises(YuanError, match=message):
        Sampling(**options)


def test_a_stage_alone_does_not_generate(make_model):
    with pytest.raises(YuanError, match="only a whole model generates"):
        generate(make_model(layers=(0, 2)), [1], max_new_tokens=1)
