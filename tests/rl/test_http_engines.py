"""Servers over HTTP as engines: with our own a run loses nothing; others may be odd."""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.rl.test_apart import roles_of
from tests.rl.test_environments import changes
from tests.support.commands import Refuse
from tests.support.hf_decoders import save_model
from tests.support.project import parse_plan
from tests.support.rl import RLCase, read_lines, run_rl, run_rl_cases, write_rl
from tests.support.serving import Quiet, answering, serving
from tests.support.spawn import free_port, start_command, start_ranks, wait_until
from yuan_train.checkpoint.hf import export_hf
from yuan_train.checkpoint.load import find_checkpoint
from yuan_train.cli.main import main
from yuan_train.config.errors import ConfigError, TrainingError
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan_constraints import save_plan
from yuan_train.config.rl import load_rl, policy_run
from yuan_train.models.transformer import Transformer, init_weights
from yuan_train.rl.experience import Ticket
from yuan_train.rl.generator import SamplingParams
from yuan_train.rl.job import check_supported
from yuan_train.rl.servers import InferenceServer, LostServer, read_sample

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


@contextmanager
def served(model: ModelConfig, folder: Path, count: int, *options: str) -> Iterator[list[Any]]:
    """So many servers of a model, of other weights than the policy's and without a tokenizer."""
    made = Transformer(model)
    init_weights(made, seed=77)
    checkpoint = save_model(folder / "served", made)
    with ExitStack() as stack:
        servers: list[Any] = []
        for number in range(count):
            (own := folder / f"server-{number}").mkdir()
            words = ("--allow-weights", *options)
            servers.append(stack.enter_context(serving(checkpoint, own, *words)))
        yield servers


def roles(urls: list[str], name: str, **more: Any) -> str:
    """The override that has servers draw."""
    return f"roles.generation={json.dumps({'http': urls, 'model': name} | more)}"


FP32 = ("train.precision=fp32",)


def test_sync_and_async_runs_beside_two_servers(tmp_path: Path) -> None:
    """Answers are of the weights that they say: the mismatch is rounding in sync mode. What a server has at
    last is what the checkpoint exports, to the bit, under one process and under an uneven plan."""
    path = write_rl(tmp_path)
    run = load_rl(path, FP32)
    with served(run.model, tmp_path, 2, "--slots", "4") as servers:
        urls = [server.url.rstrip("/") for server in servers]
        measured = (f"data.evaluation={tmp_path / 'prompts.jsonl'}", "evaluation.every=1")
        common = (*FP32, roles(urls, run.model.name, tokens_per_second=[3, 1]), "train.steps=3", *measured)
        uneven = parse_plan(policy_run(run), "2x2: 1@0,1 | 3@2 / 2x2: 4@3")
        for name, plan, ages, more in (
            ("sync", None, [0, 0, 0], ()),
            ("async", None, [0, 1, 2], ("schedule={mode: async, staleness: 2}",)),
            ("planned", uneven, [0, 1, 1], ("schedule={mode: async}",)),
        ):
            folder = tmp_path / name
            overrides = (*common, f"checkpoint.directory={folder / 'ck'}", *more)
            run_rl_cases([RLCase(path, folder, plan, overrides)])
            check(folder, ages, urls, run.model.name)
    curve = read_lines(tmp_path / "sync")
    assert max(line["log_prob_gap"]["max"] for line in curve) < 1e-4
    assert [line["clipped"] for line in curve] == [0.0] * 3
    assert max(line["log_prob_gap"]["max"] for line in read_lines(tmp_path / "async")) > 1e-4


def check(folder: Path, ages: list[int], urls: list[str], name: str) -> None:
    """The metrics of a run, what is left in its folder of weights, and what the servers answer with it."""
    curve = read_lines(folder)
    assert [line["staleness_max"] for line in curve] == ages
    written = {line["sync_bytes"] for line in curve}
    assert len(written) == 1 and min(written) > 0
    for line in curve:
        assert line["generation_seconds"] > 0 and line["scoring_seconds"] > 0 and line["sync_seconds"] > 0
        assert line["groups_failed"] == 0
    left = sorted(path.name for path in (folder / "weights").iterdir())
    assert left[-1] == "weights-00000003" and len(left) <= 3
    exported = Path(export_hf(find_checkpoint(folder / "ck"), folder / "hf").path)
    wanted = load_file(exported / "model.safetensors")
    found = load_file(folder / "weights" / left[-1] / "model.safetensors")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)
    # As a server that has read that folder now: the last evaluation has had both take these weights.
    body = {"model": name, "prompt": [7, 8], "max_tokens": 5, "logprobs": 0, "seed": 3, "temperature": 1.0}
    ask = post(urls[0], "/v1/completions", body), post(urls[1], "/v1/completions", body)
    before = [told["choices"][0]["logprobs"]["token_logprobs"] for told in ask]
    for url in urls:
        assert post(url, "/update_weights_from_disk", {"model_path": str(exported)})["success"]
        told = post(url, "/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"]
        assert [told, told] == before


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    import httpx

    reply = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_server_that_is_killed_in_mid_batch_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its prompts are answered by the other, so that each batch has all of its groups, with the same answers
    as a run of the one that is left; when that is lost too, the run ends naming it."""
    path = write_rl(tmp_path, generation={"max_new_tokens": 40, "stop_ids": [1]})
    run = load_rl(path, FP32)
    few = (*FP32, "train.steps=2", "train.prompts_per_step=4", "train.micro_batch_size=4")
    with served(run.model, tmp_path, 2, "--slots", "2") as servers:
        urls = [server.url.rstrip("/") for server in servers]
        killer = threading.Thread(target=kill_at_work, args=(servers[0],))
        killer.start()
        case = RLCase(path, tmp_path / "killed", None, (*few, roles(urls, run.model.name)))
        curve = run_rl(case)
        killer.join(30)
        assert not servers[0].ranks[0].process.is_alive()
        assert f"{urls[0]}/" in caplog.text and "going on with 1 of 2 servers" in caplog.text
        assert [line["next_ticket"] for line in curve] == [4, 8]
        run_rl(RLCase(path, tmp_path / "other", None, (*few, roles(urls[1:], run.model.name))))
        same = (read_lines(tmp_path / name, "samples.jsonl") for name in ("killed", "other"))
        assert next(same) == next(same)
        with pytest.raises(ConfigError, match="cannot be reached") as refused:
            run_rl(case)
        assert urls[0] in str(refused.value) and urls[1] not in str(refused.value)
        killer = threading.Thread(target=kill_at_work, args=(servers[1],))
        killer.start()
        with pytest.raises(TrainingError, match="no server is left") as lost:
            run_rl(RLCase(path, tmp_path / "none", None, (*few, roles(urls[1:], run.model.name))))
        killer.join(30)
        assert urls[1] in str(lost.value)


def test_environments_talk_with_servers(tmp_path: Path) -> None:
    """A turn is a request, and still the log-probabilities of a whole answer are the trainer's; where an
    environment is at fault its group fails, as in one process. In async mode nothing is too old."""
    path = write_rl(tmp_path)
    model = load_rl(path).model
    with served(model, tmp_path, 2, "--slots", "4", "--max-length", "64", "--queue", "100") as servers:
        urls = [server.url for server in servers]
        for kind, more in (("Echo", ()), ("Echo", ("schedule={mode: async}",)), ("Bad", ())):
            words = (*FP32, *changes(tmp_path, kind), *more)
            folder = tmp_path / f"{kind}-{len(more)}"
            curve = run_rl(RLCase(path, folder, None, (*words, roles(urls, model.name))))
            alone = [0] * len(curve)
            if kind == "Bad":
                lines = run_rl(RLCase(path, tmp_path / "alone", None, words))
                alone = [line["groups_failed"] for line in lines]
                assert sum(alone) > 0
                kept = read_lines(folder, "samples.jsonl")
                assert kept and all(line["answer"] % 2 == 0 for line in kept)
            assert [line["groups_failed"] for line in curve] == alone
            for line, age in zip(curve, (0, len(more)), strict=True):
                assert line["turns"] > 1.5 and line["environment_tokens"] > 20
                assert line["staleness_max"] == age
                assert age or line["log_prob_gap"]["max"] < 1e-4


def kill_at_work(server: Any) -> None:
    """Kill a server once it writes answers."""
    import httpx

    end = time.monotonic() + 60
    while time.monotonic() < end and not httpx.get(f"{server.url}health").json()["running"]:
        time.sleep(0.005)
    server.ranks[0].kill()


# --- servers that are not as they should be ---------------------------------------------------------------


@dataclass
class Fake:
    """A server that answers as it is told."""

    url: str
    asked: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    models: Any = field(default_factory=lambda: {"data": [{"id": "test", "owned_by": "vllm"}]})
    answers: Callable[[dict[str, Any]], Any] = lambda body: good(body)
    status: int = 200


def good(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What vLLM says: answers of 8 or 9, and the stop token."""
    told = {"logprobs": {"token_logprobs": [-0.5, 0.0]}}
    return {"choices": [{"index": i, "token_ids": [8 + i % 2, 1]} | told | changes for i in range(body["n"])]}


@contextmanager
def faking() -> Iterator[Fake]:
    class Handler(Quiet):
        def reply(self, status: int, value: Any) -> None:
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with suppress(BrokenPipeError):
                self.wfile.write(content)

        def do_GET(self) -> None:
            self.reply(200, fake.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.asked.append((self.path, body))
            if self.path in ("/v1/completions", "/generate"):
                self.reply(fake.status, fake.answers(body))
            else:
                self.reply(200, b"")

    with answering(Handler) as url:
        fake = Fake(url)
        yield fake


def test_what_vllm_is_asked(tmp_path: Path) -> None:
    path = write_rl(tmp_path)
    with faking() as fake:
        curve = run_rl(RLCase(path, tmp_path / "log", None, (roles([fake.url], "test"),)))
    assert [line["answer_tokens"]["mean"] for line in curve] == [2.0, 2.0]
    kinds = [path for path, _ in fake.asked]
    step = ["/collective_rpc", "/reset_prefix_cache", "/v1/completions", "/v1/completions"]
    assert kinds == step * 2
    reload = fake.asked[0][1]
    folder = str(tmp_path / "log" / "weights" / "weights-00000000")
    assert reload == {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    bodies = [body for path, body in fake.asked if path == "/v1/completions"]
    assert len({body["seed"] for body in bodies}) == 4
    wanted = {"n": 4, "max_tokens": 5, "temperature": 1.0, "ignore_eos": True, "top_p": 1.0, "logprobs": 0}
    for body in bodies:
        assert wanted.items() <= body.items() and body["stop_token_ids"] == [1, 2, 3, 4, 5, 6]
        assert body["return_token_ids"] is True and "logprobs_mode" not in body


@pytest.mark.parametrize(
    ("architecture", "precision", "more"),
    [
        ("yuan", "fp32", ("lora={rank: 2, alpha: 4}",)),
        ("llama", "fp32", ()),
        ("qwen", "bf16", ("model.qkv_bias=true",)),
    ],
)
def test_the_weights_are_those_that_an_export_writes(
    tmp_path: Path, architecture: str, precision: str, more: tuple[str, ...]
) -> None:
    """Adapters merged; in bf16 those that the cards have, which are the masters' rounded."""
    path = write_rl(tmp_path)
    with faking() as fake:
        overrides = (
            *(*more, roles([fake.url], "test"), f"checkpoint.directory={tmp_path / 'ck'}"),
            *(f"train.precision={precision}", f"model.architecture={architecture}", "evaluation.every=1"),
            f"data.evaluation={tmp_path / 'prompts.jsonl'}",
        )
        run_rl(RLCase(path, tmp_path / "log", None, overrides))
    found = load_file(tmp_path / "log" / "weights" / "weights-00000002" / "model.safetensors")
    exported = export_hf(find_checkpoint(tmp_path / "ck"), tmp_path / "hf")
    wanted = load_file(Path(exported.path) / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype == wanted[name].dtype for name in wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    first = load_file(tmp_path / "log" / "weights" / "weights-00000001" / "model.safetensors")
    assert not all(torch.equal(found[name], first[name]) for name in wanted)


def test_a_stop_does_not_wait_for_servers(tmp_path: Path) -> None:
    """SIGTERM in the middle of a run whose servers draw ahead: saved, and 0."""
    path, log = write_rl(tmp_path), tmp_path / "log"
    with faking() as fake:
        more = ("train.steps=1000", "schedule={mode: async}", f"checkpoint.directory={tmp_path / 'ck'}")
        words = ["rl", "--config", path, roles([fake.url], "test"), f"log.directory={log}", *more]
        command = start_command(words, tmp_path / "stderr", environment={"OMP_NUM_THREADS": "1"})
        try:
            wait_until(lambda: len(fake.asked) >= 20, command.process.is_alive)
            assert command.process.pid is not None
            os.kill(command.process.pid, signal.SIGTERM)
            code, said = command.wait(within_seconds=40)
        finally:
            command.kill()
    assert (code, "Traceback" in said) == (0, False), said
    assert find_checkpoint(tmp_path / "ck").step == len(read_lines(log))


def asking(fake: Fake, folder: Path, kind: str, **more: Any) -> InferenceServer:
    """What asks a fake server in a run."""
    servers = roles(["http://127.0.0.1:1"], "test", kind=kind, folder="a", **more)
    run = load_rl(write_rl(folder), (servers,))
    assert run.roles.generation is not None
    return InferenceServer(fake.url, run.roles.generation, run)


def test_what_sglang_is_asked(tmp_path: Path) -> None:
    told = [{"meta_info": {"output_token_logprobs": [[-0.5, 9, None], [-0.1, 1, None]]}}] * 2
    with faking() as fake:
        fake.answers = lambda body: told
        found = asking(fake, tmp_path, "sglang").answer(
            Ticket(3, (7, 8), 2), SamplingParams(seed=0, max_new_tokens=5, stop_ids=frozenset([1]))
        )
    assert [(one.ids, one.log_probs, one.ended) for one in found] == [((9, 1), (-0.5, -0.1), "stop")] * 2
    path, body = fake.asked[0]
    assert path == "/generate" and body["input_ids"] == [[7, 8]] * 2 and body["return_logprob"] is True
    seeds = [params["sampling_seed"] for params in body["sampling_params"]]
    assert seeds[1] == seeds[0] + 1
    assert [params["stop_token_ids"] for params in body["sampling_params"]] == [[1]] * 2


ODD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no ids": (lambda body: good(body, token_ids=None), "wanted token ids"),
    "texts as ids": (lambda body: good(body, token_ids=["9", "1"]), "wanted token ids"),
    "no log-probabilities": (lambda body: good(body, logprobs=None), "wanted a log-probability"),
    "nan": (lambda body: good(body, logprobs={"token_logprobs": [math.nan, -1]}), "wanted finite log-prob"),
    "above 0": (lambda body: good(body, logprobs={"token_logprobs": [0.1, -1]}), "and one is 0.1"),
    "too few": (
        lambda body: good(body, logprobs={"token_logprobs": [-1]}),
        "as tokens, and these are 1 and 2",
    ),
    "no such id": (lambda body: good(body, token_ids=[64, 1]), "of a vocabulary of 64, and one is 64"),
    "below 0": (lambda body: good(body, token_ids=[-1, 1]), "and one is -1"),
    "nothing": (
        lambda body: good(body, token_ids=[], logprobs={"token_logprobs": []}),
        "wanted 1 to 5 tokens",
    ),
    "no stop": (lambda body: good(body, token_ids=[9, 9]), "and one ends with 9"),
    "goes on": (lambda body: good(body, token_ids=[2, 1]), "and one goes on behind 2"),
    "an answer less": (lambda body: {"choices": good(body)["choices"][:3]}, "wanted 4 answers"),
    "no choices": (lambda body: {"text": "9"}, "wanted choices; got {'text': '9'}"),
    "indices": (lambda body: {"choices": [{"index": 1}]}, "index 0, 1 and so on"),
    "no JSON": (lambda body: b"<html>", "wanted JSON; got '<html>'"),
}


def test_an_odd_reply_is_refused(tmp_path: Path) -> None:
    """And ends the run, as below."""
    params = SamplingParams(seed=0, max_new_tokens=5, stop_ids=frozenset(range(1, 7)))
    with faking() as fake:
        server = asking(fake, tmp_path, "vllm")
        assert len(server.answer(Ticket(3, (7, 8), 4), params)) == 4
        for name, (answers, why) in ODD.items():
            fake.answers = answers
            with pytest.raises(TrainingError) as ended:
                server.answer(Ticket(3, (7, 8), 4), params)
            assert f"{fake.url}/v1/completions: wanted" in str(ended.value), name
            assert why in str(ended.value), name


def test_all_ranks_end_with_what_a_server_did(tmp_path: Path) -> None:
    """2 where it cannot be reached at the start, 1 where its reply is odd; rank 0 alone asks."""
    path, plan = write_rl(tmp_path), tmp_path / "plan.yaml"
    save_plan(plan, parse_plan(policy_run(load_rl(path)), "2x4: 1@0 | 3@1"))
    gone = f"http://127.0.0.1:{free_port()}"
    with faking() as fake:
        fake.answers = ODD["nan"][0]
        for url, wanted, why in (
            (gone, 2, f"roles.generation.http: {gone}/v1/models: cannot be reached"),
            (fake.url, 1, f"{fake.url}/v1/completions: wanted finite log-probabilities"),
        ):
            words = ["rl", "--config", path, "--plan", plan]
            words += [roles([url], "test"), f"log.directory={tmp_path}"]
            with start_ranks(words, tmp_path, 2) as ranks:
                for rank in ranks:
                    code, said = rank.wait(within_seconds=60)
                    assert (code, "Traceback" in said) == (wanted, False), said
                assert why in ranks[0].stderr.read_text()


def test_a_server_in_trouble_is_lost_or_ends_the_run(tmp_path: Path) -> None:
    ticket, params = Ticket(3, (7, 8), 2), SamplingParams(seed=0, max_new_tokens=5, stop_ids=frozenset([1]))
    with faking() as fake:
        server = asking(fake, tmp_path, "vllm", timeout="2 s")
        fake.status = 503
        with pytest.raises(LostServer, match="status 503"):
            server.answer(ticket, params)
        fake.status = 400
        with pytest.raises(TrainingError, match="/v1/completions: status 400"):
            server.answer(ticket, params)
        # A full queue is waited for.
        fake.status = 429
        threading.Timer(0.5, lambda: setattr(fake, "status", 200)).start()
        assert len(server.answer(ticket, params)) == 2
        fake.answers = lambda body: time.sleep(4)
        with pytest.raises(LostServer, match="timed out"):
            server.answer(ticket, params)
    with pytest.raises(LostServer, match="cannot be reached"):
        server.answer(ticket, params)


def test_rounding_above_0_is_none() -> None:
    params = SamplingParams(seed=0, max_new_tokens=2, stop_ids=frozenset())
    found = read_sample(Ticket(0, (1,), 1), 0, [5, 6], [1e-7, -1], params, vocab_size=7)
    assert found.log_probs == (0.0, -1.0) and found.ended == "limit"


# --- at the start -----------------------------------------------------------------------------------------


def test_servers_that_cannot_draw_are_refused_at_the_start(tmp_path: Path, refuse: Refuse) -> None:
    given = ("rl", "--config", write_rl(tmp_path), f"log.directory={tmp_path / 'log'}")
    gone = f"http://127.0.0.1:{free_port()}"
    with faking() as fake:
        urls = [fake.url, gone]
        told = refuse(*given, roles(urls, "test"))
        assert f"roles.generation.http: {gone}/v1/models: cannot be reached" in told and fake.url not in told
        told = refuse(*given, roles([fake.url], "other"))
        assert "has no model 'other' (roles.generation.model), but 'test'" in told
        model = {"id": "test", "owned_by": "vllm"}
        for change, why in (
            ({"max_model_len": 10}, "holds 10 tokens of a prompt and its answer, but they may have 11"),
            ({"takes_weights": False}, "takes no weights; start it with --allow-weights"),
            ({"owned_by": "me"}, "give roles.generation.kind"),
        ):
            fake.models = {"data": [model | change]}
            assert why in refuse(*given, roles([fake.url], "test"))
        fake.models = [1]
        assert "wanted a list of models; got [1]" in refuse(*given, roles([fake.url], "test"))


def test_keys_that_do_not_go_together(tmp_path: Path) -> None:
    path = write_rl(tmp_path)
    url = "http://127.0.0.1:8000"
    cases = {
        (roles(["127.0.0.1:8000"], "m"),): "wanted an address such as http://10.0.0.5:8000",
        (roles(["http://a:99999"], "m"),): "wanted an address such as http://10.0.0.5:8000",
        (roles([f"{url}/v1"], "m"),): "wanted the address before /v1",
        (roles([url, f"{url}/"], "m"),): "is there twice",
        (roles([url], "m", tokens_per_second=[1, 2]),): "2 of 1 servers",
        (roles([url], "m"), "generation.weights=in_flight"): "take weights between two batches",
        (roles([], "m"),): "roles.generation.http",
    }
    for overrides, why in cases.items():
        with pytest.raises(ConfigError, match=why):
            load_rl(path, (*overrides, "log.directory=a"))
    with pytest.raises(ConfigError, match="nothing says where weights are put"):
        load_rl(path, (roles([url], "m"),))
    run = load_rl(path, (roles([url, "http://b"], "m", tokens_per_second=[3, 1]), "log.directory=a"))
    assert run.roles.generation is not None and run.roles.generation.parts == (0.75, 0.25)
    assert run.correction("sync") == "aipo"


def test_a_plan_counts_on_the_tokens_of_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without them it is as if the policy drew. Either is run beside servers, async too; one with cards for
    generation is refused, and so is one for other servers."""
    path, cluster, plan = write_rl(tmp_path), tmp_path / "cluster.yaml", tmp_path / "plan.yaml"
    cluster.write_text("name: one\nnodes:\n  - {name: a, device: A10, devices: 1}\n")
    search = "search.policy={schedule: [1f1b], tensor: [1], recompute: [none], micro_batch_size: [1]}"
    given = ["--config", str(path), *FP32, search, "schedule={mode: async}"]
    given += [f"log.directory={tmp_path / 'log'}"]
    with faking() as fake, faking() as other:
        urls = [fake.url, other.url]
        servers = roles(urls, "test"), roles(urls, "test", tokens_per_second=[0.6, 0.2])
        out = ("--cluster", str(cluster), "--out", str(plan))
        found = [_planned(capsys, *given, one, *out) for one in servers]
        wanted = [("sync", "shared"), ("async", "servers")]
        assert [(one["mode"], one["placement"]) for one in found] == wanted
        # 2 prompts of 4 answers of up to 5 tokens, of which the first server gets both.
        assert found[1]["engines"] == [
            {"tokens_per_second": 0.6, "share": pytest.approx(0.75)},
            {"tokens_per_second": 0.2, "share": pytest.approx(0.25)},
        ]
        forecast = found[1]["forecast"]
        assert forecast["generation_seconds"] == pytest.approx(8 * 5 / 0.8)
        assert forecast["step_seconds"] == pytest.approx(8 * 5 / 0.6, rel=0.01)
        assert found[0]["forecast"]["step_seconds"] < 1
        assert main(["rl", *given, servers[1], "--plan", str(plan)]) == 0
        lines = read_lines(tmp_path / "log")
        assert [line["staleness_max"] for line in lines] == [0, 1]
        assert all(len(line["engine_tokens_per_second"]) == 2 for line in lines)
        assert main(["inspect", str(plan)]) == 0
        assert main(["simulate", "--plan", str(plan)]) == 0
        capsys.readouterr()
        assert main(["rl", *given, roles([fake.url], "test"), "--plan", str(plan)]) == 2
        assert (
            "planned for 2 servers, and roles.generation.http of the run names 1" in capsys.readouterr().err
        )
    run = load_rl(path, (roles([fake.url], "test", folder="a"),))
    with pytest.raises(ConfigError, match="the plan has cards for that"):
        check_supported(run, None, roles_of(path, staleness=0))


def _planned(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plan", *words]) == 0
    capsys.readouterr()
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)
