"""`yuan-train plan` and `yuan-train simulate` from the command line."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from yuan_train.cli.main import main
from yuan_train.config.plan import StagePlan
from yuan_train.config.plan_constraints import load_plan, save_plan
from yuan_train.planner.report.plan import layer_words

CONFIGS = Path(__file__).parents[3] / "configs"
LAPTOP = str(CONFIGS / "cluster" / "laptop.yaml")
TINY = str(CONFIGS / "model" / "tiny.yaml")
RUN = str(CONFIGS / "run" / "tiny.yaml")


def plan(*more, cluster=LAPTOP):
    return main(["plan", "--cluster", cluster, *more])


@pytest.fixture
def planned(tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    assert plan("--config", RUN, "--out", str(path)) == 0
    capsys.readouterr()
    return path


def test_writes_the_plan_and_the_page(tmp_path, capsys):
    out, page = tmp_path / "plan.yaml", tmp_path / "page.html"
    assert plan("--model", TINY, "--config", RUN, "--out", str(out), "--report", str(page)) == 0
    shown = capsys.readouterr()
    assert "Plan: " in shown.out
    assert load_plan(out).forecast is not None
    assert page.read_text().startswith("<!doctype html>")


def test_json_is_one_object(tmp_path, capsys):
    out = tmp_path / "plan.yaml"
    assert plan("--model", TINY, "--out", str(out), "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["plan"] == str(out)
    assert "no --config: sequence_length 512, global_batch_size 64" in shown.err


def test_sequences_of_a_long_model_are_cut_where_no_run_says(tmp_path, capsys):
    out, words = tmp_path / "plan.yaml", ["--model", TINY, "model.max_sequence_length=131072"]
    assert plan(*words, "--out", str(out)) == 0
    said = capsys.readouterr().err
    assert "sequence_length 8192 (the model allows 131072: data.sequence_length=N), global_batch_size" in said
    assert plan(*words, "data.sequence_length=16384", "--out", str(out)) == 0
    assert "sequence_length 16384, global_batch_size" in capsys.readouterr().err


def test_the_largest_model_fits_and_one_more_layer_does_not(tmp_path, capsys):
    cluster, out = tmp_path / "cluster.yaml", tmp_path / "plan.yaml"
    rates = "fp32: 1 TFLOP/s, bf16: 1 TFLOP/s, memory_bandwidth: 100 GB/s"
    card = f"{{memory: 64 MiB, reserved: 1 MiB, {rates}}}"
    cluster.write_text(f"name: small\nnodes: [{{name: n, device: Small}}]\ndevice_types: {{Small: {card}}}\n")
    words = ["--model", TINY, "train.precision=bf16", "train.global_batch_size=1"]
    assert plan(*words, "--largest", "--out", str(out), cluster=str(cluster)) == 0
    most = load_plan(out).model.num_layers
    assert f"largest model: {most} layers" in capsys.readouterr().err
    # The command that comes next is of this model.
    assert plan("--config", RUN, "train.precision=bf16", "--largest", cluster=str(cluster)) == 0
    shown = capsys.readouterr()
    found = shown.err.partition("train it with ")[2].partition(".")[2].partition(".")[0]
    assert f" model.{found} --out plan.yaml" in shown.out
    assert plan(*words, f"model.num_layers={most}", cluster=str(cluster)) == 0
    assert plan(*words, f"model.num_layers={most + 1}", cluster=str(cluster)) == 3
    assert "with its optimizer state on the host" in capsys.readouterr().err


def test_overrides_reach_the_search(tmp_path):
    out = tmp_path / "plan.yaml"
    words = [
        "search.pipelines=[1]",
        "search.use_all_devices=true",
        "train.global_batch_size=12",
        "model.num_layers=9",
    ]
    assert plan("--model", TINY, *words, "--out", str(out)) == 0
    written = load_plan(out)
    assert (written.global_batch_size, written.model.num_layers, written.world_size) == (12, 9, 3)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--config", RUN, "search.tensr=[1]"], 2, "did you mean 'tensor'"),
        (
            ["--config", RUN, "--model", str(CONFIGS / "model" / "yuan2-2b.yaml")],
            2,
            "name different models (num_layers",
        ),
        (["--model", str(CONFIGS / "model" / "yuan2-51b.yaml")], 3, " on all cards. Nearest: "),
        (["--model", TINY, "--profile", "none.json"], 2, "none.json: no such file"),
    ],
)
def test_wrong_input_is_refused(words, code, message, capsys, tmp_path):
    out = tmp_path / "plan.yaml"
    assert plan(*words, "--out", str(out)) == code
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert not out.exists()


def test_simulate_repeats_the_forecast(planned, tmp_path, ask):
    trace = tmp_path / "trace.json"
    words = ("--cluster", LAPTOP, "--precision", "fp32", "--trace", trace)
    document = ask("simulate", "--plan", planned, *words)
    forecast = load_plan(planned).forecast
    assert forecast is not None
    assert document["step_seconds"] == pytest.approx(forecast.step_seconds)
    assert document["messages"] == "cluster"
    assert 0 <= document["grad_reduce_seconds"] < document["step_seconds"]
    boxes = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert max(box["ts"] + box["dur"] for box in boxes) / 1e6 == pytest.approx(
        document["compute_seconds"], rel=1e-5
    )


def test_plan_and_simulate_price_the_reductions_of_the_run(tmp_path, capsys, ask, refuse):
    """Two pipelines of one stage each: bucket size and dtype change the step, in both commands alike."""
    out, pair, steps = tmp_path / "plan.yaml", tmp_path / "pair.yaml", set()
    pair.write_text(
        "name: pair\n"
        "nodes: [{name: n, count: 2, device: Card, network: {bandwidth: 1 GB/s, latency: 100 us}}]\n"
        "device_types: {Card: {memory: 4 GiB, fp32: 80 GFLOP/s, memory_bandwidth: 10 GB/s}}\n"
    )
    fixed = ["search.pipelines=[2]", "search.optimizer_sharding=[true]", "search.recompute=[none]"]
    for size, dtype in ((10**9, "fp32"), (1, "fp32"), (1, "bf16")):
        words = [f"optimizer.bucket_size={size}", f"optimizer.reduce_dtype={dtype}"]
        assert plan("--config", RUN, *fixed, *words, "--out", str(out), cluster=str(pair)) == 0
        assert "| weight sync " in capsys.readouterr().out
        words = ("--bucket-size", size, "--reduce-dtype", dtype, "--precision", "fp32")
        document = ask("simulate", "--plan", out, "--cluster", pair, *words)
        forecast = load_plan(out).forecast
        assert forecast is not None
        assert document["step_seconds"] == pytest.approx(forecast.step_seconds)
        names = ("compute_seconds", "grad_reduce_seconds", "update_seconds", "weight_sync_seconds")
        assert sum(document[name] for name in names) == pytest.approx(document["step_seconds"])
        assert document["weight_sync_seconds"] > 0
        steps.add(document["step_seconds"])
    assert len(steps) == 3
    said = refuse("simulate", "--plan", out, "--cluster", LAPTOP, "--bucket-size", 0)
    assert "--bucket-size: wanted at least 1 parameter, got 0" in said
    said = refuse("simulate", "--plan", out, "--reduce-dtype", "bf16")
    assert "--reduce-dtype: needs --cluster F too" in said


def test_simulate_names_layers_as_the_plan_does(tmp_path, capsys):
    out, trace = tmp_path / "plan.yaml", tmp_path / "trace.json"
    assert plan("--config", RUN, "--out", str(out), "--json") == 0
    capsys.readouterr()
    assert main(["simulate", "--plan", str(out), "--trace", str(trace)]) == 0
    shown = capsys.readouterr().out
    for stage in load_plan(out).pipelines[0].stages:
        words = f"layers {layer_words(stage)}"
        assert f"  {words}  busy " in shown and words in trace.read_text()


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((0, 3.5), "0 to 3.5"),
        ((3.5, 7), "3.5 to 7"),
        ((3.5, 4), "3.5 to 4"),
        ((0.0, 4.0), "0-3"),
        ((3, 4), "3"),
    ],
)
def test_borders_inside_of_layers_are_named(layers, words):
    assert layer_words(StagePlan(replicas=((0,),), layers=layers, head=True)) == f"{words} +head"


def test_simulate_says_that_a_cut_does_not_fit(capsys, ask):
    words = ["simulate", "--blocks", "2,2,2", "--cluster", LAPTOP, "--config", RUN]
    for fraction in (0.95, 0.12):
        assert main([*words, f"search.memory_fraction={fraction}"]) == 0
        assert ("does not fit the memory" in capsys.readouterr().out) == (fraction < 0.5)
    assert not ask(*words, "search.memory_fraction=0.12")["fits"]


def test_simulate_without_a_cluster_has_free_messages(planned, capsys):
    assert main(["simulate", "--plan", str(planned), "--json"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert document["messages"] == "free"
    assert document["step_seconds"] <= document["forecast_step_seconds"]
    assert "give --cluster F" in shown.err
    rest = "not counted: messages, reductions of gradients, waits for copies, optimizer step and weight sync"
    assert rest in shown.err
    assert main(["simulate", "--plan", str(planned)]) == 0
    assert " stages alone " in capsys.readouterr().out


def test_simulate_without_a_cluster_splits_backwards_as_the_forecast(tmp_path, ask):
    out = tmp_path / "plan.yaml"
    # A backward that recomputes is more than twice its weight gradients.
    words = ["search.schedule=[zero_bubble]", "search.recompute=[full]", "--out", str(out)]
    assert main(["plan", "--cluster", LAPTOP, "--config", RUN, *words]) == 0
    written = load_plan(out)
    forecast = written.forecast
    assert forecast is not None and len(written.pipelines[0].stages) > 1

    def simulate(plan):
        save_plan(out, plan)
        return ask("simulate", "--plan", out)["compute_seconds"]

    def with_weights(share):
        stages = (replace(s, weight_seconds=share and share * s.backward_seconds) for s in forecast.stages)
        return replace(written, forecast=replace(forecast, stages=tuple(stages)))

    # A plan that does not say how a backward divides has halves.
    assert simulate(with_weights(None)) == simulate(with_weights(0.5)) != simulate(with_weights(0.1))
    assert simulate(written) != simulate(with_weights(0.5))


def test_simulate_needs_stage_times(planned, tmp_path, refuse):
    bare = tmp_path / "bare.yaml"
    bare.write_text(planned.read_text().split("forecast:")[0])
    said = refuse("simulate", "--plan", bare)
    assert "forecast: no times for pipeline 0, stage 0; give --cluster F" in said
    assert main(["simulate", "--plan", str(bare), "--cluster", LAPTOP, "--precision", "fp32"]) == 0
    other = CONFIGS / "cluster" / "t4-a100.yaml"
    assert "is not in cluster 't4-a100'" in refuse("simulate", "--plan", bare, "--cluster", other)


def test_the_picture_has_each_card_and_its_row_of_the_timeline(tmp_path: Path) -> None:
    out = tmp_path / "plan.svg"
    words = ["--cluster", "laptop", "--config", "configs/run/tiny.yaml", "search.effort=quick"]
    assert main(["plan", *words, "--report", str(out)]) == 0
    root = ET.parse(out).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0].startswith("Plan for tiny on laptop: ") and texts[0].endswith(" a step")
    for card in ("full/0", "half/0", "quarter/0"):
        assert any(text == card for text in texts) and any(
            text.startswith("p0 s") and card in text for text in texts
        )
