"""Training an imported model under an uneven plan; fill-in-the-middle and masked losses under any plan."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.models import tiny_model
from tests.support.project import difference, make_plan, make_project, read_metrics, run_config
from tests.support.ranks import Case, run_alone, run_cases
from tests.support.yuan_hf import GOLDEN, read_published, same_bits
from yuan_train.checkpoint.hf import export_hf, import_hf
from yuan_train.checkpoint.load import find_checkpoint
from yuan_train.cli.main import main
from yuan_train.config.load import as_plain
from yuan_train.data.indexed import IndexedWriter
from yuan_train.data.loader import IGNORED
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.models.transformer import Transformer
from yuan_train.train.job import Position, prepare

pytestmark = pytest.mark.slow


def test_an_imported_model_is_unchanged_by_an_uneven_plan(tmp_path: Path) -> None:
    """One step with a learning rate of almost 0, saved by stages of 2 and 1 layers, gives the same model."""
    folder = tmp_path / "project"
    folder.mkdir()
    tiny_a = tiny_model("yuan", num_layers=3, vocab_size=96, max_sequence_length=256)
    path = make_project(folder, model=as_plain(tiny_a))
    with IndexedWriter(folder / "ids", dtype=torch.tensor([], dtype=torch.int32).numpy().dtype) as writer:
        generator = torch.Generator().manual_seed(0)
        for _ in range(80):
            writer.add(torch.randint(0, 96, (30,), generator=generator).tolist())
    import_hf(GOLDEN, tmp_path / "imported")
    keys = (
        *("train.steps=1", "optimizer.warmup_steps=0", "optimizer.minimum_learning_rate=1e-30"),
        *("optimizer.learning_rate=1e-30", "data.tokenizer=null", "data.reset_position_ids=false"),
        *(f"data.train=[{{prefix: {folder / 'ids'}}}]", f"checkpoint.directory={tmp_path / 'saved'}"),
        f"checkpoint.resume={tmp_path / 'imported'}",
    )
    plan = make_plan(run_config(path, *keys), [[2, 1]])
    run_cases([Case(path, tmp_path / "log", plan, keys)])
    saved = find_checkpoint(tmp_path / "saved")
    assert saved.step == 1
    expected = load_file(GOLDEN / "expected.safetensors")
    ids = ",".join(map(str, expected["input_ids"][0].tolist()))
    out = tmp_path / "logits.safetensors"
    assert main(["evaluate", "--checkpoint", str(saved.path), "--token-ids", ids, "--logits", str(out)]) == 0
    torch.testing.assert_close(load_file(out)["logits"][0], expected["logits"][0], rtol=0, atol=2e-5)
    export_hf(saved, tmp_path / "export")
    computed = {n: t for n, t in read_published(GOLDEN).items() if not n.endswith("inv_freq")}
    assert same_bits(read_published(tmp_path / "export"), computed)


RULES = ("data.fim_rate=0.7", "data.mask_loss_after_eod=true", "data.loss_after_separator=true")


def test_data_rules_give_the_same_losses_under_any_plan(tmp_path: Path) -> None:
    path = make_project(tmp_path)
    _write_questions_and_answers(tmp_path)
    keys = ("train.steps=3", "validation.every=2", "checkpoint.resume=never")
    plan = make_plan(run_config(path, *keys), [[1, 5], [1, 5]])
    cases = [Case(path, tmp_path / f"cut{i}", plan, (rule, *keys)) for i, rule in enumerate(RULES)]
    run_cases(cases)
    plain = run_alone(Case(path, tmp_path / "plain", overrides=keys))
    for case in cases:
        alone = run_alone(Case(path, case.folder.with_suffix(".alone"), overrides=case.overrides))
        assert [m["loss"] for m in alone] != [m["loss"] for m in plain]
        assert difference(read_metrics(case.folder), alone) < 1e-5
        assert difference(read_metrics(case.folder), alone, "grad_norm") < 1e-4


def _write_questions_and_answers(folder: Path) -> None:
    """Replace the project's corpus: every second document is question, separator and answer."""
    lines = [json.loads(line)["text"] for line in (folder / "corpus.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.load(folder / "tokenizer")
    texts = [line.replace(" ", "<sep>", 1) if i % 2 else line for i, line in enumerate(lines)]
    with IndexedWriter(folder / "corpus", dtype=torch.tensor([], dtype=torch.int32).numpy().dtype) as writer:
        for text in texts:
            writer.add([*tokenizer.encode(text.strip(), special=True), tokenizer.eod_id])


def test_the_loss_is_the_mean_over_trained_tokens(tmp_path: Path) -> None:
    path = make_project(tmp_path)
    _write_questions_and_answers(tmp_path)
    keys = ("data.loss_after_separator=true", "train.steps=1", "validation.every=0")
    (metrics,) = run_alone(Case(path, tmp_path / "log", overrides=keys))
    run = run_config(path, *keys)
    job = prepare(run, None, Position())
    batch = job.train.batch(0, run.train.global_batch_size)
    model = Transformer(run.model)
    from yuan_train.models.attention import find_resets
    from yuan_train.models.transformer import init_weights

    init_weights(model, seed=run.train.seed)
    tokens = torch.from_numpy(batch.inputs)
    assert job.tokenizer is not None
    hidden = model(tokens, positions=find_resets(tokens, eod_id=job.tokenizer.eod_id).positions)
    losses = model.loss(hidden, torch.from_numpy(batch.targets), reduction="none")
    trained = torch.from_numpy(batch.targets) != IGNORED
    assert 0 < int(trained.sum()) < trained.numel()
    assert metrics["loss"] == pytest.approx(float(losses[trained].mean().detach()), rel=1e-5)
