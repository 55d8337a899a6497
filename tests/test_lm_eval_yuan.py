"""The scorer of the lm-evaluation-harness adapter; tools/check_lm_eval.sh runs the harness itself."""

from pathlib import Path

import pytest
import torch

from tests.support.project import MODEL
from tools import lm_eval_yuan as tool
from yuan_train.config.errors import YuanError
from yuan_train.config.load import Document, build
from yuan_train.config.model import ModelConfig
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.models.attention import find_resets
from yuan_train.models.generate import DocumentRules, Sampling, generate
from yuan_train.models.transformer import Transformer, init_weights
from yuan_train.train.evaluate import TrainedModel

RESETS = {"reset_position_ids": True, "reset_attention": False, "reset_filter": False}


@pytest.fixture(scope="module")
def trained(run_file: Path) -> TrainedModel:
    model = Transformer(build(Document("test", MODEL | {"init_std": 0.2}, {}), ModelConfig))
    init_weights(model, seed=1)
    return TrainedModel(model, Tokenizer.load(run_file.parent / "tokenizer"), dict(RESETS))


def logprobs(trained: TrainedModel, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of ids[1:], from one forward."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        hidden = trained.model(tokens, **vars(find_resets(tokens, eod_id=trained.eod_id, **trained.resets)))
        scores = trained.model.logits(hidden)[0].log_softmax(-1)
    return scores[:-1].gather(1, tokens[0, 1:, None])[:, 0]


def test_a_continuation(trained: TrainedModel) -> None:
    scorer = tool.Scorer(trained)
    assert trained.tokenizer is not None and trained.eod_id is not None
    context, text = "the quick brown", " fox jumps over"
    first, whole = trained.tokenizer.encode(context), trained.tokenizer.encode(context + text)
    assert whole[: len(first)] == first
    expected = logprobs(trained, [trained.eod_id, *whole])[len(first) :].sum()
    found, greedy = scorer.continuation(context, text)
    assert found == pytest.approx(float(expected), rel=1e-5) and not greedy
    assert scorer.continuation("", context)[0] == pytest.approx(scorer.rolling(context), rel=1e-6)


def test_generated_text_is_greedy(trained: TrainedModel) -> None:
    scorer = tool.Scorer(trained)
    text = scorer.generate("the quick", [], 6)
    ids = trained.tokenizer.encode("the quick") if trained.tokenizer else []
    alone = generate(
        trained.model,
        [trained.eod_id or 0, *ids],
        max_new_tokens=6,
        sampling=Sampling(temperature=0),
        documents=DocumentRules(**trained.resets),
    )
    assert trained.tokenizer and text == trained.tokenizer.decode([*ids, *alone])[len("the quick") :]
    stop = text[2:4]
    assert scorer.generate("the quick", [stop, ""], 6) == text[: text.index(stop)]


def test_long_texts_are_scored_in_windows(trained: TrainedModel) -> None:
    """Each token once; a window begins with the last token of the window before."""
    scorer = tool.Scorer(trained)
    assert trained.tokenizer is not None and trained.eod_id is not None
    text = "seven wizards box quietly " * 60
    ids = [trained.eod_id, *trained.tokenizer.encode(text)]
    assert len(ids) > 2 * scorer.max_length
    expected = sum(float(logprobs(trained, ids[i : i + 65]).sum()) for i in range(0, len(ids) - 1, 64))
    assert scorer.max_length == 64 and scorer.rolling(text) == pytest.approx(expected, rel=1e-5)
    context = text * 2
    loss, _ = scorer.continuation(context, " fox")
    last = [trained.eod_id, *trained.tokenizer.encode(context + " fox")][-65:]
    count = len(trained.tokenizer.encode(context + " fox")) - len(trained.tokenizer.encode(context))
    assert count > 0 and loss < 0
    assert loss == pytest.approx(float(logprobs(trained, last)[-count:].sum()), rel=1e-4)


def test_it_needs_a_tokenizer(trained: TrainedModel) -> None:
    with pytest.raises(YuanError, match="no tokenizer"):
        tool.Scorer(TrainedModel(trained.model, None, dict(RESETS)))
    assert tool.main(["--checkpoint", "/nowhere", "--tasks", "x"]) == 2


def test_local_tasks_are_yaml(tmp_path: Path) -> None:
    import yaml

    names = tool.write_local_task(tmp_path / "tasks", ["some text", "other text"])
    for name in names:
        task = yaml.safe_load((tmp_path / "tasks" / f"{name}.yaml").read_text())
        assert task["task"] == name and Path(task["dataset_kwargs"]["data_files"]["test"]).exists()
        assert task["doc_to_target"] in ("{{text}}", "{{end}}")
