"""The model whole and in parts: names, sizes, initial values, documents, recomputation, cached decoding."""

import math
from fnmatch import fnmatch

import pytest
import torch
import torch.nn.functional as F

from tests.support.models import VARIANTS, tiny_model
from yuan_train.config.errors import ConfigError
from yuan_train.config.model import find_parameter, sharding_of
from yuan_train.models import transformer
from yuan_train.models.attention import find_resets, rotary_tables
from yuan_train.models.generate import new_slots, step_slots
from yuan_train.models.transformer import (
    IGNORE_INDEX,
    Transformer,
    init_weights,
    initial_rows,
    initial_weight,
)
from yuan_train.parallel.shard import Shard, part_of

EOD = 9
ALL_RESETS = dict(reset_position_ids=True, reset_attention=True, reset_filter=True)


def resets_of(tokens_BS, **switches):
    return vars(find_resets(tokens_BS, eod_id=EOD, **{**ALL_RESETS, **switches}))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


# Names and sizes


def test_parameter_names_and_shapes(make_model):
    shapes = {name: tuple(p.shape) for name, p in make_model(num_layers=1, head_dim=6).named_parameters()}
    assert shapes == {
        "embedding.weight": (50, 24),
        "layers.0.attention_norm.weight": (24,),
        "layers.0.filter.conv1.weight": (12, 24, 2),
        "layers.0.filter.conv1.bias": (12,),
        "layers.0.filter.conv2.weight": (24, 12, 2),
        "layers.0.filter.conv2.bias": (24,),
        "layers.0.filter.norm.weight": (24,),
        "layers.0.attention.value.weight": (18, 24),
        "layers.0.attention.query_key.weight": (36, 24),
        "layers.0.attention.out.weight": (24, 18),
        "layers.0.feed_forward_norm.weight": (24,),
        "layers.0.feed_forward.up.weight": (80, 24),
        "layers.0.feed_forward.down.weight": (24, 40),
        "final_norm.weight": (24,),
    }


@pytest.mark.parametrize("attention", ["localized_filter", "plain"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_every_part_has_its_subset_of_the_names(make_model, attention, tie_embeddings):
    options = dict(attention=attention, tie_embeddings=tie_embeddings)
    whole = dict(make_model(**options).named_parameters())
    first = dict(make_model(layers=(0, 1), head=False, **options).named_parameters())
    last = dict(make_model(layers=(1, 3), embedding=False, **options).named_parameters())
    assert set(first) | set(last) == set(whole)
    assert set(first) & set(last) == ({"embedding.weight"} if tie_embeddings else set())
    assert ("head.weight" in last) is not tie_embeddings
    assert any(".filter." in name for name in whole) is (attention == "localized_filter")
    for name, parameter in [*first.items(), *last.items()]:
        assert torch.equal(parameter, whole[name]), name


def test_tied_embeddings_are_one_parameter(make_model):
    model = make_model()
    assert model.output_weight is model.embedding.weight
    assert [name for name in model.state_dict() if "embedding" in name or "head" in name] == [
        "embedding.weight"
    ]
    assert make_model(embedding=False, layers=(3, 3)).output_weight.shape == (50, 24)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_the_spec_says_what_the_model_has(variant, tie_embeddings):
    """Each parameter once, with its shape; each module is sharded in one way."""
    config = tiny_model(variant, tie_embeddings=tie_embeddings)
    with torch.device("meta"):
        named = dict(Transformer(config).named_parameters())
    assert sum(parameter.numel() for parameter in named.values()) == config.parameters
    sharding, blocks = sharding_of(config)
    assert set(blocks) <= set(sharding)
    for name, parameter in named.items():
        assert find_parameter(config, name).shape == tuple(parameter.shape), name
        module = name.rpartition(".")[0]
        assert sum(fnmatch(module, pattern) for pattern in sharding) == 1, module


def test_errors(make_config):
    with pytest.raises(ValueError, match=r"layers \[2, 4\) do not lie within \[0, 3\)"):
        Transformer(make_config(), layers=(2, 4))
    with pytest.raises(ValueError, match="recompute 'some' is unknown"):
        Transformer(make_config(), recompute="some")
    with pytest.raises(ConfigError, match="model yuan: num_attention_heads: 5 heads do not divide"):
        Transformer(make_config(num_attention_heads=5))


# Initial values


def test_initial_distributions(make_config):
    config = make_config(num_layers=8, hidden_size=128, num_attention_heads=4, init_std=0.02, vocab_size=1000)
    model = Transformer(config)
    init_weights(model, seed=1)
    weights = dict(model.named_parameters())
    stds = {
        "embedding": 0.02,
        "layers.5.attention.query_key": 0.02,
        "layers.5.attention.out": 0.02 / 4,
        "layers.5.feed_forward.up": 0.02,
        "layers.5.feed_forward.down": 0.02 / 4,
    }
    for name, std in stds.items():
        assert weights[f"{name}.weight"].std().item() == pytest.approx(std, rel=0.05), name
    for name, in_size in {"conv1": 128, "conv2": 64}.items():
        for part in ("weight", "bias"):
            largest = weights[f"layers.2.filter.{name}.{part}"].abs().max().item()
            assert 0.8 / math.sqrt(2 * in_size) < largest <= 1 / math.sqrt(2 * in_size)
    assert all((p == 1).all() for name, p in weights.items() if name.endswith("norm.weight"))
    assert not torch.equal(
        weights["layers.0.attention.value.weight"], weights["layers.1.attention.value.weight"]
    )


def test_initial_values_depend_on_seed_and_name_only(make_model):
    model = make_model(seed=5, dtype=torch.bfloat16)
    name = "layers.2.attention.out.weight"
    wide = initial_weight(model.config, name, (24, 24), seed=5)
    assert torch.equal(dict(model.named_parameters())[name], wide.bfloat16())
    assert not torch.equal(wide, initial_weight(model.config, name, (24, 24), seed=6))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embedding.weight", (96, 10)),
        ("embedding.weight", (4, 3)),
        ("layers.0.feed_forward.up.weight", (24, 5)),
        ("layers.0.filter.conv1.bias", (40,)),
        ("layers.0.filter.conv2.weight", (12, 6, 2)),
        ("final_norm.weight", (20,)),
    ],
)
def test_a_shard_is_drawn_by_rows_as_it_is_in_the_whole(make_model, name, shape, monkeypatch):
    config = make_model().config
    whole = initial_weight(config, name, shape, seed=5)
    monkeypatch.setattr(transformer, "BLOCK_ELEMENTS", 50)
    assert torch.equal(initial_weight(config, name, shape, seed=5), whole)
    for dim, blocks in ((None, 1), (0, 1), (0, 2), (1, 1)):
        if dim is not None and (dim >= len(shape) or shape[dim] % (2 * blocks)):
            continue
        for shard in [Shard(shape, dim, blocks, index, 2) for index in range(2)]:
            found = torch.full(shard.local_shape, math.nan)
            for first, rows in initial_rows(config, name, shape, seed=5, wanted=shard.holds_rows):
                shard.fill_rows(found, first, rows)
            assert torch.equal(found, part_of(whole, shard, shard.index, 2).reshape(shard.local_shape))


# Results


def test_parts_compose(make_model, tokens_BS):
    options = resets_of(tokens_BS)
    whole = make_model()
    expected = whole(tokens_BS, **options)
    hidden = make_model(layers=(0, 0), head=False)(tokens_BS)
    hidden = make_model(layers=(0, 2), embedding=False, head=False)(hidden, **options)
    last = make_model(layers=(2, 3), embedding=False)
    assert torch.equal(last(hidden, **options), expected)
    assert torch.equal(last.loss(expected, tokens_BS), whole.loss(expected, tokens_BS))


def test_plain_attention_by_hand(make_model):
    """One layer written out: the rows of queries and keys, the scale, the gate."""
    model = make_model(num_layers=1, attention="plain", head_dim=6)
    block = model.blocks[0]
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    x = model.embedding.weight[tokens]
    u = F.rms_norm(x, (24,), None, 1e-6)
    value = (u @ block.attention.value.weight.T).view(1, 5, 3, 6)
    query, key = [], []
    for j in range(3):
        rows = block.attention.query_key.weight[12 * j : 12 * (j + 1)]
        query.append(u @ rows[:6].T)
        key.append(u @ rows[6:].T)
    angles = torch.arange(5.0, dtype=torch.float64)[:, None] * 10000.0 ** (
        -torch.arange(0, 6, 2).double() / 6
    )

    def rotate(x):
        a, b = x[..., :3], x[..., 3:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    heads = []
    for j in range(3):
        scores = rotate(query[j]) @ rotate(key[j]).mT / math.sqrt(6)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ value[:, :, j])
    x = x + torch.cat(heads, -1) @ block.attention.out.weight.T
    z = F.rms_norm(x, (24,), None, 1e-6) @ block.feed_forward.up.weight.T
    x = x + (F.silu(z[..., :40]) * z[..., 40:]) @ block.feed_forward.down.weight.T
    close(model(tokens), F.rms_norm(x, (24,), None, 1e-6))


@pytest.mark.parametrize("attention", ["localized_filter", "plain"])
def test_packed_documents_equal_separate_ones(make_model, tokens_BS, attention):
    model = make_model(attention=attention)
    packed = model(tokens_BS, **resets_of(tokens_BS)).flatten(0, 1)
    ranges = find_resets(tokens_BS, eod_id=EOD, **ALL_RESETS).document_ranges
    assert ranges is not None and len(ranges) == 6
    for first, last in ranges:
        close(packed[first:last], model(tokens_BS.flatten()[first:last][None])[0])


def test_each_switch_resets_its_own_part(make_model, tokens_BS):
    model = make_model()
    all_off = dict(reset_position_ids=False, reset_attention=False, reset_filter=False)
    plain = model(tokens_BS)
    close(model(tokens_BS, **resets_of(tokens_BS, **all_off)), plain)
    for switch in all_off:
        differs = (model(tokens_BS, **resets_of(tokens_BS, **{**all_off, switch: True})) - plain).abs() > 1e-9
        # Sequence 0 ends its first document at token 4, sequence 1 at token 0.
        assert not differs[0, :5].any() and differs[0, 5:].any(dim=-1).all(), switch


def test_loss_equals_logits_and_cross_entropy(make_model, tokens_BS):
    model = make_model(tie_embeddings=False)
    targets = tokens_BS.roll(-1, 1)
    targets[0, 3] = IGNORE_INDEX
    hidden = model(tokens_BS)
    expected = F.cross_entropy(model.logits(hidden).flatten(0, 1), targets.flatten(), reduction="none")
    close(model.loss(hidden, targets), expected.sum())
    close(model.loss(hidden, targets, reduction="none"), expected.view(2, 12))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_recompute_changes_no_bit(make_model, tokens_BS, dtype):
    gradients = []
    for recompute, layers in (("none", None), ("selective", None), ("full", None), ("full", 1)):
        model = make_model(recompute=recompute, recompute_layers=layers, dtype=dtype, init_std=0.1)
        loss = model.loss(model(tokens_BS, **resets_of(tokens_BS)), tokens_BS.roll(-1, 1))
        loss.backward()
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        gradients.append([loss.detach(), *(p.grad for p in model.parameters())])
    for a, *others in zip(*gradients, strict=True):
        assert torch.isfinite(a).all() and all(torch.equal(a, b) for b in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes_agree_with_fp64(make_model, tokens_BS, dtype):
    wide, narrow = make_model(init_std=0.1), make_model(init_std=0.1, dtype=dtype)
    a, b = wide(tokens_BS), narrow(tokens_BS)
    assert b.dtype == dtype
    assert (a - b.double()).norm() <= 8 * torch.finfo(dtype).eps * a.norm()


def test_rotary_tables_are_never_narrow(make_config):
    """bf16 cannot represent the difference between positions 8191 and 8192; the tables must."""
    positions = torch.tensor([[8191, 8192]])
    config = make_config(head_dim=8, rope_base=10000.0)
    cos = rotary_tables(config, positions, length=8193, dtype=torch.bfloat16).cos
    assert cos.dtype == torch.float32
    exact = (positions.double()[..., None] * 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)).cos()
    torch.testing.assert_close(cos.double(), exact, rtol=0, atol=1e-3)


# Cached decoding


def step(model, x, cache, places_BS, documents=None):
    return step_slots(model, x, cache, places_BS, last=int(places_BS.max()), documents=documents)


PLACES = torch.arange(12).expand(2, -1)


@pytest.mark.parametrize("chunks", [[12], [1] * 12, [5, 1, 4, 2], [1, 11]])
@pytest.mark.parametrize("attention", ["localized_filter", "plain"])
def test_cached_forward_equals_the_whole(make_model, tokens_BS, chunks, attention):
    model = make_model(attention=attention)
    cache = new_slots(model, slots=2, max_length=12)
    rows = zip(tokens_BS.split(chunks, dim=1), PLACES.split(chunks, dim=1), strict=True)
    close(torch.cat([step(model, tokens, cache, places) for tokens, places in rows], dim=1), model(tokens_BS))
