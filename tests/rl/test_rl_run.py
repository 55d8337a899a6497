"""A run in one process: what is drawn, trained, learned, logged, refused, and resumed."""

import json
import os
import random
import re
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rl.test_rl_teacher import log_probs
from tests.support.commands import Refuse
from tests.support.hf_decoders import write_tokenizer
from tests.support.rl import RLCase, assert_same_run, read_lines, run_rl, write_rl
from tests.support.spawn import start_command
from tools import make_corpus, rl_tasks
from yuan_train.cli.main import main
from yuan_train.config.devices import DeviceType
from yuan_train.config.errors import CheckpointError, DataError, PlanError, TrainingError
from yuan_train.config.plan import single_card_plan
from yuan_train.config.rl import load_rl, policy_run
from yuan_train.models.transformer import Transformer
from yuan_train.parallel.executor import WARM_UP_PIECES
from yuan_train.rl import loop
from yuan_train.rl.collect import Collector
from yuan_train.rl.experience import Sample
from yuan_train.rl.job import prepare_rl
from yuan_train.rl.updates import Updater
from yuan_train.train.job import Position


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rl(tmp_path_factory.mktemp("rl"))


def drawn(project: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> list[Sample]:
    """All answers of a run of one step."""
    found: list[Sample] = []
    generate = Collector._generate

    def record(self: Collector, *arguments: Any) -> list[list[Sample]]:
        groups = generate(self, *arguments)
        found.extend(sample for group in groups for sample in group)
        return groups

    monkeypatch.setattr(Collector, "_generate", record)
    run_rl(RLCase(project, folder, None, ("train.steps=1", "train.prompts_per_step=6", *overrides)))
    monkeypatch.setattr(Collector, "_generate", generate)
    return found


def test_slots_and_chunks_change_no_token(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four slots for 24 answers, which take turns; prompts read one token at a time; rows packed or not."""
    plenty = drawn(project, tmp_path / "plenty", monkeypatch)
    changes = ("generation.slots=4", "generation.prefill_chunk=1", "train.pack=false")
    few = drawn(project, tmp_path / "few", monkeypatch, *changes)
    assert len({len(sample.ids) for sample in plenty}) > 2, "answers of unlike lengths"
    for one, other in zip(few, plenty, strict=True):
        assert replace(one, log_probs=()) == replace(other, log_probs=())
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-12)
    for found, expected in zip(read_lines(tmp_path / "few"), read_lines(tmp_path / "plenty"), strict=True):
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-10)
        assert found["log_prob_gap"]["max"] < 1e-12


@pytest.mark.parametrize("model", ["plain", "llama", "bf16", "fp32"])
def test_log_probabilities_of_the_draw_are_the_trainers(project: Path, tmp_path: Path, model: str) -> None:
    overrides = {
        "plain": ("model.attention=plain",),
        "llama": ("model.architecture=llama", "model.num_key_value_heads=2", "model.attention="),
        "bf16": ("train.precision=bf16",),
        "fp32": ("train.precision=fp32", "generation.temperature=0.5"),
    }[model]
    line = run_rl(RLCase(project, tmp_path, None, (*overrides, "train.steps=1")))[0]
    largest = {"bf16": 0.2, "fp32": 1e-5}.get(model, 1e-12)
    assert line["log_prob_gap"]["max"] < largest
    if model == "bf16":
        assert line["log_prob_gap"]["mean"] < 2e-2


def test_draw_and_trainer_are_each_near_fp64(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 each rounds in its own way: both are within 1e-5 of what the same weights give in fp64."""
    answers: list[tuple[tuple[int, ...], Sample]] = []
    gaps: list[tuple[float, float]] = []
    parts, score = Updater._parts, Updater._score  # pyright: ignore[reportPrivateUsage]

    def note(self: Any, groups: Any, **more: Any) -> Any:
        answers[:] = [(group.prompt.ids, sample) for group in groups for sample in group.samples]
        return parts(self, groups, **more)

    def compare(self: Any, own: Any) -> torch.Tensor:
        found_N = score(self, own)
        (module,) = self._trainer.runtime.parts.values()
        exact = Transformer(self._run.model, dtype=torch.float64)
        exact.load_state_dict({name: weight.double() for name, weight in module.state_dict().items()})
        exact_N = torch.cat([log_probs(exact, prompt, sample.ids) for prompt, sample in answers]).detach()
        drawn_N = torch.tensor([p for _, sample in answers for p in sample.log_probs], dtype=torch.float64)
        gaps.append((float((drawn_N - exact_N).abs().max()), float((found_N - exact_N).abs().max())))
        return found_N

    monkeypatch.setattr(Updater, "_parts", note)
    monkeypatch.setattr(Updater, "_score", compare)
    more = ("train.precision=fp32", "train.steps=4", "algorithm.epochs=2", "optimizer.learning_rate=0.01")
    run_rl(RLCase(project, tmp_path, None, more))
    assert len(gaps) == 4 and 1e-7 < max(map(max, gaps)) < 1e-5


def test_aipo_is_the_clipped_loss_where_nothing_is_old(project: Path, tmp_path: Path) -> None:
    names = ("none", "aipo", "decoupled")
    changes = {name: (f"algorithm.correction={name}", "train.steps=1") for name in names}
    lines = {name: run_rl(RLCase(project, tmp_path / name, None, changes[name])) for name in names}
    norms = {name: line["grad_norm"] for name, (line,) in lines.items()}
    assert norms["none"] > 0.1 and norms == pytest.approx(dict.fromkeys(names, norms["none"]), rel=1e-6)


def test_what_is_measured_is_of_all_updates_of_a_batch(project: Path, tmp_path: Path) -> None:
    """Before the first step the policy is that which drew: each ratio is 1, and there the gap is taken.
    Passes over the whole batch read all of its tokens again."""
    shared = ("train.steps=1", "optimizer.learning_rate=3e-2", "algorithm.clip=[0.01, 0.01]")
    once, twice, thrice = (
        run_rl(RLCase(project, tmp_path / change, None, (*shared, f"algorithm.{change}")))[0]
        for change in ("updates=1", "updates=2", "epochs=3")
    )
    for line, steps in ((once, 1), (twice, 2), (thrice, 3)):
        assert line["log_prob_gap"]["max"] < 1e-12 and line["optimizer_steps"] == steps
    assert once["ratio_max"] == pytest.approx(1, abs=1e-12) and once["clipped"] == 0
    for line in (twice, thrice):
        assert line["ratio_max"] > 1.05 and 0.1 < line["clipped"] <= 0.9
        assert line["ratio_mean"] != pytest.approx(1, abs=1e-4)
    assert thrice["tokens"] == 3 * once["tokens"] and thrice["reward"] == once["reward"]


def test_a_run_whose_prompts_are_chats(project: Path, tmp_path: Path) -> None:
    """The chat template writes what is drawn from, up to where the answer begins."""
    write_tokenizer(tmp_path)
    prompts = tmp_path / "chats.jsonl"
    turns = [{"prompt": [{"role": "user", "content": f"Say {n}."}], "answer": n} for n in range(4)]
    prompts.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    chats = (f"data.tokenizer={tmp_path}", f"data.prompts=[{{file: {prompts}}}]")
    longer = ("data.max_prompt_tokens=120", "model.vocab_size=260", "model.max_sequence_length=128")
    lines = run_rl(RLCase(project, tmp_path / "log", None, (*chats, *longer)))
    assert [line["step"] for line in lines] == [1, 2] and all(line["grad_norm"] > 0 for line in lines)
    asked = {sample["prompt"] for sample in read_lines(tmp_path / "log", "samples.jsonl")}
    assert asked and all(re.search(r"user.*Say \d\..*assistant", text, re.DOTALL) for text in asked), asked


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "reinforce_baseline", "reinforce_plus_plus"])
def test_every_algorithm_trains(project: Path, tmp_path: Path, name: str) -> None:
    where = "reward" if name in ("rloo", "reinforce_plus_plus") else "loss"
    kl = f"algorithm.kl={{coefficient: 0.1, estimator: k2, where: {where}}}"
    lines = run_rl(RLCase(project, tmp_path, None, (f"algorithm.name={name}", kl)))
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-20)
    assert lines[1]["kl"] > 1e-6
    assert all(line["grad_norm"] > 0 for line in lines)


def test_nothing_is_learned_of_equal_rewards(project: Path, tmp_path: Path) -> None:
    """Not even weight decay; and with the filter such a batch ends the run."""
    same = "reward.functions=[{name: exact}]"
    lines = run_rl(RLCase(project, tmp_path, None, (same, f"checkpoint.directory={tmp_path / 'c'}")))
    assert [line["optimizer_steps"] for line in lines] == [0, 0]
    assert [line["groups_zero_variance"] for line in lines] == [2, 2]
    assert lines[0]["loss"] == 0 and lines[0]["ratio_mean"] is None
    with pytest.raises(TrainingError, match=r"step 1: 0 of 2 groups after 4 prompts .*4 had equal rewards"):
        refilled = (same, "algorithm.filter=zero_variance", "algorithm.max_refill=2")
        run_rl(RLCase(project, tmp_path / "f", None, refilled))


def test_groups_that_fail_are_replaced_and_counted(project: Path, tmp_path: Path) -> None:
    function = f"reward.functions=[{{python: '{project.parent / 'rewards.py'}:raises'}}]"
    lines = run_rl(RLCase(project, tmp_path, None, (function,)))
    assert [line["groups_failed"] for line in lines] == [1, 1]
    assert [line["next_ticket"] for line in lines] == [3, 6]
    with pytest.raises(TrainingError, match="step 1: ticket 1: raises raised KeyError: 'no such answer'"):
        run_rl(RLCase(project, tmp_path / "stop", None, (function, "reward.on_error=stop")))


def test_evaluation_and_files(project: Path, tmp_path: Path) -> None:
    prompts = project.parent / "prompts.jsonl"
    evaluation = "evaluation={every: 2, samples: 3, temperature: 1.0, prompts: 4}"
    lines = run_rl(RLCase(project, tmp_path, None, (f"data.evaluation={prompts}", evaluation)))
    assert lines[0]["evaluation"] is None
    assert set(lines[1]["evaluation"]) == {"pass_1", "pass_k", "mean_reward"}
    assert 0 <= lines[1]["evaluation"]["pass_1"] <= lines[1]["evaluation"]["pass_k"] <= 1
    samples = read_lines(tmp_path, "samples.jsonl")
    assert [line["step"] for line in samples] == [1, 1, 2, 2]
    assert samples[0]["reward"] == samples[0]["rewards"]["evenness"]
    assert load_rl(tmp_path / "config.yaml").evaluation.samples == 3


def test_killed_and_resumed_it_is_the_same_run(project: Path, tmp_path: Path) -> None:
    """SIGKILL at some moment, then on; with a reference, two updates a batch, and failing groups."""
    function = f"[{{python: '{project.parent / 'rewards.py'}:evenness'}}]"
    steps = ("train.steps=4", "algorithm.updates=2", "checkpoint.every=1")
    overrides = (*steps, "algorithm.kl={coefficient: 0.05}", f"reward.functions={function}")

    def case(name: str) -> RLCase:
        directory = f"checkpoint.directory={tmp_path / name / 'checkpoints'}"
        return RLCase(project, tmp_path / name, None, (*overrides, directory))

    whole = case("whole")
    run_rl(whole)
    killed = case("killed")
    words = ["rl", "--config", project, *killed.overrides, f"log.directory={killed.folder}"]
    command = start_command(words, tmp_path / "stderr", environment={"OMP_NUM_THREADS": "1"})
    log = killed.folder / "metrics.jsonl"
    while command.process.is_alive() and (not log.exists() or len(log.read_text().splitlines()) < 1):
        time.sleep(0.002)
    command.kill()
    assert log.exists(), command.stderr.read_text()
    assert len(log.read_text().splitlines()) < 4, "it was killed on the way"
    run_rl(killed)
    assert_same_run(killed.folder, whole.folder, "checkpoints/step-00000004")


def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_room(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In samples.jsonl and in a checkpoint: exit codes, nothing half-written, and the same run in the end."""

    def words(name: str) -> list[str]:
        folder = tmp_path / name
        places = [f"log.directory={folder}", f"checkpoint.directory={folder / 'c'}"]
        return ["rl", "--config", str(project), "train.steps=2", "checkpoint.every=1", *places]

    assert main(words("whole")) == 0
    write = loop.write_lines

    def full_at_step_2(file: Any, lines: Any) -> None:
        if json.loads(lines[0])["step"] == 2:
            file.write(lines[0][:20])
            file.flush()
            with Path("/dev/full").open("w") as full:
                write(full, lines)
        write(file, lines)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "write_lines", full_at_step_2)
        assert main(words("samples")) == 1
    assert re.search(r"cannot be written: .*No space left.* Free some space", capsys.readouterr().err)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        assert main(words("checkpoint")) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "step-00000001: cannot be written" in capsys.readouterr().err
    assert not list((tmp_path / "checkpoint" / "c").iterdir()), "nothing half-written"
    for name in ("samples", "checkpoint"):
        assert main(words(name)) == 0
        assert_same_run(tmp_path / name, tmp_path / "whole", "c/step-00000002")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rate=1e30", "step 2: ticket 2, answer 0: the log-probability of token 0 is nan"),
        ("algorithm.kl={coefficient: 1e308, estimator: k2}", "loss nan, gradient norm nan: the first output"),
        ("[{python: 'FILE:large'}]", "ticket 7: an answer's reward is 1e+300; wanted one within 1e+12"),
        (
            "[{python: 'FILE:large', weight: 1e10}, {python: 'FILE:small', weight: 1e10}]",
            "ticket 7: an answer's reward is nan; wanted one within 1e+12",
        ),
    ],
)
def test_what_is_not_finite_ends_the_run(
    project: Path, tmp_path: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 1, and nothing of the step in files."""
    large = "def large(sample):\n    return 1e300 * (sample + 1)\n\n\n"
    (tmp_path / "large.py").write_text(f"{large}def small(sample):\n    return -large(sample)\n")
    if "FILE" in override:
        override = f"reward.functions={override.replace('FILE', str(tmp_path / 'large.py'))}"
    words = ["rl", "--config", str(project), override, "train.precision=fp32", f"log.directory={tmp_path}"]
    assert main(words) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: step ") and message in error
    assert "no checkpoint is saved yet" in error
    steps = {line["step"] for line in read_lines(tmp_path)}
    assert {line["step"] for line in read_lines(tmp_path, "samples.jsonl")} == steps
    assert f"step {max(steps, default=0) + 1}: " in error


def test_sigterm_saves(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collect = Collector.collect

    def stop_in_step_1(self: Collector, ticket: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return collect(self, ticket)

    monkeypatch.setattr(Collector, "collect", stop_in_step_1)
    directory = f"checkpoint.directory={tmp_path / 'c'}"
    lines = run_rl(RLCase(project, tmp_path, None, ("train.steps=50", directory)))
    assert len(lines) <= 2
    assert (tmp_path / "c" / f"step-{len(lines):08}").is_dir()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.mode=async", "async is not there yet"),
        ("reward.model={checkpoint: nowhere}", "nowhere"),
        ("data.prompts=[{file: nowhere.jsonl}]", "nowhere.jsonl: cannot be read"),
        ("data.max_prompt_tokens=3", r"longer than data.max_prompt_tokens 3: lines \d+ \(\d tokens\)"),
        ("reward.functions=[{python: 'nowhere.py:f'}]", "nowhere.py: no such file"),
        ("start.checkpoint=nowhere", "nowhere"),
    ],
)
def test_what_is_refused(project: Path, override: str, message: str, refuse: Refuse) -> None:
    assert re.search(message, refuse("rl", "--config", project, override))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no prompts"),
        ("[]", "wanted a JSON object"),
        ('{"prompt_ids": []}', "an empty prompt"),
        ('{"prompt_ids": [1.5]}', "not a list of token ids"),
        ('{"prompt": "text"}', "text needs data.tokenizer"),
        ('{"prompt_ids": [5, 64]}', "token id 64 is beyond"),
        ('{"prompt_ids": [-1, 5]}', "token id -1 is beyond"),
        ('{"prompt_ids": [5], "answer": NaN}', "NaN is no JSON"),
        ('{"prompt_ids": [5], "answer": "\\ud800"}', "1: holds half a surrogate pair; fix the escapes"),
    ],
)
def test_prompts_that_cannot_be_used(project: Path, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "odd.jsonl").write_text(line + "\n")
    run = load_rl(project, (f"data.prompts=[{{file: '{tmp_path / 'odd.jsonl'}'}}]",))
    with pytest.raises(DataError, match=rf"odd\.jsonl.*{message}"):
        prepare_rl(run, None, Position())


def test_plans_that_do_not_fit(project: Path) -> None:
    run = load_rl(project)
    short = single_card_plan(policy_run(run, sequence_length=10))
    with pytest.raises(PlanError, match="was made for 10, but a prompt of 6 tokens .* take 11"):
        prepare_rl(run, short, Position())
    other = single_card_plan(policy_run(load_rl(project, ("algorithm.group=2",))))
    with pytest.raises(PlanError, match="global_batch_size"):
        prepare_rl(run, other, Position())


def test_a_checkpoint_of_another_model(project: Path, tmp_path: Path) -> None:
    directory = f"checkpoint.directory={tmp_path / 'c'}"
    run_rl(RLCase(project, tmp_path, None, ("train.steps=1", directory)))
    state = json.loads(next((tmp_path / "c").glob("step-*/state.json")).read_text())
    assert state["rl"]["progress"]["next_ticket"] == 2
    with pytest.raises(CheckpointError, match="holds another model: vocab_size 64 there, 128 here"):
        prepare_rl(load_rl(project, (directory, "model.vocab_size=128")), None, Position())


def test_a_resumed_run_tells_what_it_does_otherwise(
    project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = f"checkpoint.directory={tmp_path / 'c'}"
    run_rl(RLCase(project, tmp_path, None, ("train.steps=1", kept)))
    assert "not as in the run" not in capfd.readouterr().err
    changed = ("generation.temperature=0.5", "algorithm.kl.coefficient=0.1", "optimizer.learning_rate=0.5")
    changed += ("reward.clip=[-1,1]",)
    run_rl(RLCase(project, tmp_path, None, (kept, *changed)))
    told = re.findall(r"note: not as in the run that saved it: (\S+) \S+ -> .+\n", capfd.readouterr().err)
    keys = ["train.steps", "optimizer.learning_rate", "generation.temperature", "reward.clip"]
    assert told == [*keys, "algorithm.kl.coefficient"]


def test_answers_that_reached_the_limit_leave_the_loss_and_not_the_comparison(tmp_path: Path) -> None:
    path = write_rl(tmp_path)
    whole, masked = tmp_path / "whole", tmp_path / "masked"
    (first,) = run_rl(RLCase(path, whole, overrides=("train.steps=1",)))
    (second,) = run_rl(RLCase(path, masked, overrides=("train.steps=1", "algorithm.mask_truncated=true")))
    assert 0 < first["truncated"] < 1
    assert first["reward"] == second["reward"] and first["grad_norm"] != second["grad_norm"]
    # Without an answer that ends, nothing is learned.
    none = ("train.steps=1", "algorithm.mask_truncated=true", "generation.stop_ids=[]")
    (third,) = run_rl(RLCase(path, tmp_path / "none", overrides=none))
    assert third["truncated"] == 1 and third["optimizer_steps"] == 0 and third["grad_norm"] == 0


def test_the_best_weights_are_kept_and_those_before_the_first_step_measured(tmp_path: Path) -> None:
    path = write_rl(tmp_path)
    measured = (
        f"data.evaluation={tmp_path / 'prompts.jsonl'}",
        "evaluation={every: 1, samples: 4, temperature: 1.0, at_start: true, keep_best: true}",
        f"checkpoint={{directory: {tmp_path / 'c'}, every: 1, keep: 1}}",
        "train.steps=4",
    )
    lines = run_rl(RLCase(path, tmp_path / "log", overrides=measured))
    assert set(lines[0]["evaluation_at_start"]) == set(lines[0]["evaluation"])
    assert all(line.get("evaluation_at_start") is None for line in lines[1:])
    scores = [(line["evaluation"]["pass_1"], line["evaluation"]["mean_reward"]) for line in lines]
    best = 1 + max(range(4), key=lambda n: (scores[n], -n))
    kept = {int(folder.name.removeprefix("step-")) for folder in (tmp_path / "c").glob("step-*")}
    assert kept == {best, 4}


def test_a_simulated_card_keeps_its_pace_and_tells_what_takes_longer(
    project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = single_card_plan(policy_run(load_rl(project)))
    plain = run_rl(RLCase(project, tmp_path / "plain"))
    counts: dict[str, int] = {}
    # A pace that nothing keeps; and one that is measured, which about a half of what follows does not.
    for name, slowdown, pace in (("given", 1.0, 1e-9), ("measured", 1 + 1e-9, None)):
        card = DeviceType(memory=2**32, fp32=1e9, memory_bandwidth=1e9, slowdown=slowdown, piece_seconds=pace)
        ranks = tuple(replace(rank, type="slow") for rank in plan.ranks)
        simulated = replace(plan, ranks=ranks, device_types={"slow": card})
        lines = run_rl(RLCase(project, tmp_path / name, simulated, ("train.steps=20",)))
        assert [line["loss"] for line in lines[:2]] == [line["loss"] for line in plain]
        told = re.findall(r"note: of ([\d,]+) pieces .* work ([\d,]+) took longer", capfd.readouterr().err)
        (counts[name], longer) = (int(number.replace(",", "")) for number in told[0])
        assert len(told) == 1 and (longer == counts[name] if pace else 0 < longer)
    # The first ones of at least forwards, backwards and rounds have no pace.
    assert counts["given"] - counts["measured"] >= 3 * WARM_UP_PIECES


# --- from rewards alone ----------------------------------------------------------------------------------


def test_copying_is_learned_from_random_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`a =` is to be answered by a and the end: 40 steps of 80 answers."""
    overrides = ["train.prompts_per_step=10", "algorithm.group=8", "optimizer.learning_rate=4e-3"]
    first, last = rl_tasks.learn("copy", 0, tmp_path, [*overrides, "train.micro_batch_size=80"])
    assert first < 0.3
    assert last > 0.7
    capsys.readouterr()
    assert main(["show", str(tmp_path), "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("<polyline") == 6 and "<script" not in page
    shown = capsys.readouterr().out
    assert "reinforcement learning (grpo)" in shown and "reward       0." in shown


def test_every_story_of_the_quick_start_can_be_begun(tmp_path: Path) -> None:
    """Its prompts are beginnings of what tools/make_corpus.py tells; the reward is that of rl-story.yaml."""
    told = make_corpus.story(random.Random(0))
    rl_tasks.make("story", tmp_path / "story.jsonl")
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "story.jsonl").read_text().splitlines()]
    assert len(set(prompts)) == 8 and all(prompt.startswith("One day ") for prompt in prompts)
    assert told.split(" walked to the ")[0].split() == ["One", "day", told.split()[2]]
    assert rl_tasks.of_a_fox("There sat a kind fox, who") == 1.0 and rl_tasks.of_a_fox("a cat") == 0.0
