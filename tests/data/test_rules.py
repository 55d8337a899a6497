"""Fill-in-the-middle and masks: what they preserve, and that they depend only on the sample's number."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from yuan_train.config.errors import ConfigError, DataError
from yuan_train.config.run import DataConfig, Source, load_run
from yuan_train.data.loader import IGNORED, Blend, SampleRules, SampleSpec, open_corpora, sample_rules
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.models.transformer import IGNORE_INDEX

EOD, SEP = 9, 8
LENGTH = 24
FIM = DataConfig(train=(Source(prefix="x"),), sequence_length=8, tokenizer="x", fim_rate=1.0)


@pytest.fixture(scope="module")
def tokenizer(run_file: Path) -> Tokenizer:
    return Tokenizer.load(run_file.parent / "tokenizer")


def blend_of(run_file: Path, tokenizer: Tokenizer, *overrides: str, part: str = "train") -> Blend:
    run = load_run(run_file, tuple(f"data.{override}" for override in overrides))
    return open_corpora(
        [(source.prefix, source.weight) for source in run.data.train],
        SampleSpec(
            sequence_length=LENGTH,
            seed=run.train.seed,
            vocab_size=512,
            rules=sample_rules(run.data, tokenizer),
        ),
        split=run.data.split,
        part=part,  # pyright: ignore[reportArgumentType]
    )


def test_ignored_is_the_models_ignore_index() -> None:
    assert IGNORED == IGNORE_INDEX


# --- masks -----------------------------------------------------------------------------------------------

_ = IGNORED


@pytest.mark.parametrize(
    ("tokens", "targets"),
    [
        # The first token is an input only: labels are the tokens from the second on.
        ([1, 2, SEP, 3, EOD], [_, SEP, 3, EOD]),
        ([1, 2, 3, 4, EOD], [2, 3, 4, EOD]),  # no separator: all of it
        ([1, 2, SEP, 3, SEP], [_, SEP, 3, SEP]),  # no end, and only the first separator counts
        ([1, SEP, 2, EOD, 3, SEP, 4], [SEP, 2, EOD, _, SEP, 4]),  # the tail after a single end is masked too
        ([SEP, 1, EOD, 2, EOD], [1, EOD, 2, EOD]),
        ([1, 2, EOD, EOD, 3, SEP], [2, EOD, EOD, _, SEP]),
    ],
)
def test_loss_from_the_separator_on(tokens: list[int], targets: list[int]) -> None:
    rules = SampleRules(eod_id=EOD, separator_id=SEP)
    assert rules.targets(np.array(tokens)).tolist() == targets


def test_no_loss_where_the_input_ends_a_document() -> None:
    rules = SampleRules(eod_id=EOD, mask_after_eod=True)
    assert rules.targets(np.array([1, EOD, 2, EOD, EOD, 3])).tolist() == [EOD, _, EOD, _, _]


def test_trained_tokens_are_counted(run_file: Path, tokenizer: Tokenizer) -> None:
    blend = blend_of(run_file, tokenizer, "mask_loss_after_eod=true")
    counts = [blend.batch(first, 1).num_trained for first in range(10)]
    wanted = [int((blend.batch(first, 1).targets != IGNORED).sum()) for first in range(10)]
    assert counts == wanted and min(counts) < LENGTH and blend.masks
    assert blend.batch(2, 7).num_trained == sum(counts[2:9])
    plain = blend_of(run_file, tokenizer)
    assert plain.batch(3, 5).num_trained == 5 * LENGTH and not plain.masks


# --- fill-in-the-middle ----------------------------------------------------------------------------------


def documents_of(tokens: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    text = tokenizer.decode(tokens.tolist(), special=True)
    return text.split("<eod>")


def restored(document: str) -> str:
    """The text of a rearranged document that was not cut."""
    if document.startswith("<FIM_PREFIX><FIM_SUFFIX>"):
        suffix, _, rest = document.removeprefix("<FIM_PREFIX><FIM_SUFFIX>").partition("<FIM_MIDDLE>")
        return rest + suffix
    if document.startswith("<FIM_PREFIX>"):
        prefix, _, rest = document.removeprefix("<FIM_PREFIX>").partition("<FIM_SUFFIX>")
        suffix, _, middle = rest.partition("<FIM_MIDDLE>")
        return prefix + middle + suffix
    return document


def test_documents_keep_their_characters(run_file: Path, tokenizer: Tokenizer) -> None:
    plain = blend_of(run_file, tokenizer)
    fim = blend_of(run_file, tokenizer, "fim_rate=1", "fim_spm_rate=0.5")
    orders = set()
    for sample in range(60):
        before = documents_of(plain.corpora[0].sample(sample), tokenizer)
        tokens = fim.corpora[0].sample(sample)
        after = documents_of(tokens, tokenizer)
        assert len(tokens) == LENGTH + 1 and tokenizer.piece_id("<pad>") not in tokens
        for old, new in zip(before, after[:-1], strict=False):  # the last may be cut
            # PSM: P p S s M m; SPM: P S s M pm. Prefix and middle are one run of tokens in SPM.
            assert restored(new) == old or restored(new).replace(" ", "") == old.replace(" ", "")
        orders |= {document.startswith("<FIM_PREFIX><FIM_SUFFIX>") for document in after if document}
    assert orders == {True, False}


@pytest.mark.parametrize(("rate", "spm"), [(0.0, 0.5), (0.5, 0.5), (1.0, 0.0), (1.0, 1.0)])
def test_rates(run_file: Path, tokenizer: Tokenizer, rate: float, spm: float) -> None:
    plain = blend_of(run_file, tokenizer)
    blend = blend_of(run_file, tokenizer, f"fim_rate={rate}", f"fim_spm_rate={spm}")
    prefix, suffix = tokenizer.piece_id("<FIM_PREFIX>"), tokenizer.piece_id("<FIM_SUFFIX>")
    changed = spm_order = total = 0
    for sample in range(300):
        # First documents only: the others may be cut off at the end.
        total += plain.corpora[0].sample(sample)[0] != tokenizer.eod_id
        tokens = blend.corpora[0].sample(sample)
        changed += tokens[0] == prefix
        spm_order += tokens[0] == prefix and tokens[1] == suffix
    assert changed / total == pytest.approx(rate, abs=0.1)
    # PSM with an empty prefix looks the same: one cut in a few is at the very start.
    assert spm_order / max(changed, 1) == pytest.approx(spm if rate else 0, abs=0.13)


def test_a_sample_does_not_depend_on_what_was_read_before(run_file: Path, tokenizer: Tokenizer) -> None:
    one, two = (blend_of(run_file, tokenizer, "fim_rate=0.5") for _ in range(2))
    whole = one.batch(0, 12)
    for first in (8, 4, 0):
        part = two.batch(first, 4)
        assert np.array_equal(part.inputs, whole.inputs[first : first + 4])
        assert np.array_equal(part.targets, whole.targets[first : first + 4])
    per_epoch = one.corpora[0].samples_per_epoch
    assert whole.num_trained == 12 * LENGTH and not one.masks
    assert not np.array_equal(one.corpora[0].sample(0), one.corpora[0].sample(per_epoch))


def test_validation_is_not_rearranged(run_file: Path, tokenizer: Tokenizer) -> None:
    blend = blend_of(run_file, tokenizer, "fim_rate=1", part="validation")
    assert tokenizer.piece_id("<FIM_PREFIX>") not in blend.batch(0, 8).inputs


def test_what_stays_unchanged(tokenizer: Tokenizer) -> None:
    rules = sample_rules(FIM, tokenizer)
    assert rules is not None
    half = tokenizer.encode("\N{GRINNING FACE}")[:-1]  # its last byte is in the next sample
    separated = tokenizer.encode("the<sep>fox", special=True)
    for ids in (half, separated, [tokenizer.eod_id] * 3):
        assert rules.rearrange(np.array(ids), key=5).tolist() == ids
    assert replace(rules, fim=None).rearrange(np.array([1, 2]), key=5).tolist() == [1, 2]


# --- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.fim_rate=1.5",), "fim_rate"),
        (
            ("data.fim_rate=0.5", "data.loss_after_separator=true"),
            "would separate questions from their answers",
        ),
        (
            ("data.loss_after_separator=true", "data.tokenizer=null", "data.reset_position_ids=false"),
            "need the tokenizer's special tokens",
        ),
    ],
)
def test_contradictory_settings(run_file: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run(run_file, overrides)


def test_a_tokenizer_without_the_sentinels(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "piece_id", lambda self, piece: None)
    with pytest.raises(DataError, match="has no <FIM_PREFIX>, which data.fim_rate needs"):
        sample_rules(FIM, tokenizer)
