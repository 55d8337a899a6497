"""A trainer's requests: other weights for all ranks of a server, and tokens as a trainer needs them."""

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import tiny_model
from tests.support.serving import NAME, Server, make_checkpoint, serving, write_plan
from yuan_train.checkpoint.hf import write_model
from yuan_train.checkpoint.load import find_checkpoint
from yuan_train.models.generate import DocumentRules, Sampling, generate
from yuan_train.models.transformer import Transformer
from yuan_train.rl.generator import Token
from yuan_train.serve.ranks import Order, WeightsRefused
from yuan_train.serve.scheduler import Scheduler
from yuan_train.train.evaluate import TrainedModel, load_trained

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

PROMPT = [65, 66, 67, 68]
GREEDY = Sampling(temperature=0)


class Module:
    """Reads weights out of a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._weights = dict(module.named_parameters())

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._weights[name].detach()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served") / "ck", endless=True)


@pytest.fixture(scope="module")
def before(checkpoint: Path) -> TrainedModel:
    return load_trained(find_checkpoint(checkpoint))


@pytest.fixture(scope="module")
def after(checkpoint: Path) -> TrainedModel:
    """A model of other weights."""
    found = load_trained(find_checkpoint(checkpoint))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in found.model.parameters():
            weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=generator)
    return found


def write(model: Transformer, folder: Path, dtype: str = "float32") -> Path:
    write_model(model.config, Module(model), folder, dtype=dtype, resets={})
    return folder


def expected(trained: TrainedModel, count: int) -> list[int]:
    documents = DocumentRules(eod_id=trained.eod_id, **trained.resets)
    options: dict[str, Any] = {"sampling": GREEDY, "max_new_tokens": count, "documents": documents}
    return list(generate(trained.model, PROMPT, stop_ids=(), **options))


def ask(server: Server, count: int = 12, **more: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": count, "temperature": 0, "return_token_ids": True} | more
    reply = httpx.post(f"{server.url}v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def push(server: Server, folder: Path | str) -> Any:
    return httpx.post(f"{server.url}update_weights_from_disk", json={"model_path": str(folder)}, timeout=60)


def listed(server: Server) -> Any:
    return httpx.get(f"{server.url}v1/models").json()["data"][0]


def test_without_the_option_no_request_changes_anything(
    checkpoint: Path, tmp_path: Path, before: TrainedModel, after: TrainedModel
) -> None:
    folder = write(after.model, tmp_path / "new")
    with serving(checkpoint, tmp_path) as server:
        assert ask(server)[0]["token_ids"] == expected(before, 12)
        refused = push(server, folder)
        assert refused.status_code == 403
        error = refused.json()["error"]
        assert error["message"].endswith("nothing has changed; start it with --allow-weights")
        assert (error["code"], error["type"]) == ("weights_not_allowed", "permission_error")
        assert ask(server)[0]["token_ids"] == expected(before, 12)
        assert not listed(server)["takes_weights"]


def test_documents_end_as_with_the_weights_in_use(
    checkpoint: Path, tmp_path: Path, after: TrainedModel
) -> None:
    """A policy resets nothing, whatever the weights before it were trained with."""
    assert after.eod_id is not None and after.resets["reset_position_ids"]
    none = dict.fromkeys(after.resets, False)
    prompt = [65, 66, after.eod_id, 67, 68]
    write_model(after.model.config, Module(after.model), tmp_path / "new", dtype="float32", resets=none)
    wanted, others = (
        list(generate(after.model, prompt, documents=rules, stop_ids=(), sampling=GREEDY, max_new_tokens=24))
        for rules in (DocumentRules(eod_id=after.eod_id, **own) for own in (none, after.resets))
    )
    with serving(checkpoint, tmp_path, "--allow-weights") as server:
        assert push(server, tmp_path / "new").status_code == 200
        assert ask(server, 24, prompt=prompt)[0]["token_ids"] == wanted != others


@pytest.mark.parametrize(
    ("plan", "num_ranks"), [(None, 1), ("1x3: 4@0 / 1x1: 1@1 | 3@2,3", 4)], ids=["alone", "unlike pipelines"]
)
def test_all_ranks_take_weights_between_two_answers(
    checkpoint: Path,
    tmp_path: Path,
    before: TrainedModel,
    after: TrainedModel,
    plan: str | None,
    num_ranks: int,
) -> None:
    """Answers under way keep the weights that began them; those that wait, and later ones, have the new."""
    new, old = write(after.model, tmp_path / "new"), write(before.model, tmp_path / "old")
    made = write_plan(tmp_path, plan) if plan else None
    options = ("--allow-weights", "--slots", "2")
    with serving(checkpoint, tmp_path, *options, plan=made, num_ranks=num_ranks) as server:
        assert listed(server)["takes_weights"]
        told: list[Any] = []
        asking = [threading.Thread(target=lambda: told.extend(ask(server, 300))) for _ in range(2)]
        for thread in asking:
            thread.start()
        while httpx.get(f"{server.url}health").json()["running"] < 2:
            pass
        assert push(server, new).json() == {"success": True, "message": f"the weights are those of {new}"}
        for thread in asking:
            thread.join(60)
        assert [choice["token_ids"] for choice in told] == [expected(before, 300)] * 2
        # Of as many at once as pipelines have slots, each has the new weights.
        assert [one["token_ids"] for one in ask(server, n=6)] == [expected(after, 12)] * 6
        assert push(server, old).status_code == 200
        assert ask(server)[0]["token_ids"] == expected(before, 12)


def test_weights_that_are_refused_change_nothing(
    checkpoint: Path, tmp_path: Path, before: TrainedModel, after: TrainedModel
) -> None:
    """Also where one pipeline of two could take them: a rank of the other finds them not finite."""
    other = write(Transformer(tiny_model("yuan", vocab_size=260, ffn_hidden_size=64)), tmp_path / "other")
    torn = write(after.model, tmp_path / "torn")
    file = torn / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    broken = load_trained(find_checkpoint(checkpoint)).model
    with torch.no_grad():
        next(broken.parameters())[0, 0] = math.nan
    cases = {
        str(tmp_path / "none"): "no such directory",
        str(other): "has shape",
        str(torn): "torn, or no safetensors file",
        str(write(broken, tmp_path / "nan")): "not finite",
        "new": "wanted an absolute path",
        "/a\x00b": "wanted an absolute path",
    }
    plan = write_plan(tmp_path, "1x3: 4@0 / 1x1: 1@1 | 3@2")
    with serving(checkpoint, tmp_path, "--allow-weights", plan=plan, num_ranks=3) as server:
        for folder, why in cases.items():
            refused = push(server, folder)
            assert refused.status_code == 400 and why in refused.json()["error"]["message"], refused.text
            assert [one["token_ids"] for one in ask(server, n=4)] == [expected(before, 12)] * 4
        url = f"{server.url}update_weights_from_disk"
        assert httpx.post(url, json={"model_path": 3}).status_code == 400
        assert httpx.post(url, json={"model_path": "/a", "load_format": "b"}).status_code == 400


def test_tokens_as_a_trainer_needs_them(checkpoint: Path, tmp_path: Path, before: TrainedModel) -> None:
    """The log-probability of softmax(logits / temperature), ids with the token that ended, its own stops."""
    options = {"temperature": 0.7, "seed": 3, "logprobs": 0, "logprobs_mode": "processed_logprobs"}
    with serving(checkpoint, tmp_path) as server:
        choices = ask(server, 40, **options, n=3, ignore_eos=True, stop_token_ids=[*range(0, 260, 12)])
        assert {choice["finish_reason"] for choice in choices} == {"stop"}
        for choice in choices:
            ids, found = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            assert len(ids) == len(found)
            assert ids[-1] % 12 == 0 and all(one % 12 for one in ids[:-1])
            with torch.no_grad():
                hidden = before.model(torch.tensor([[*PROMPT, *ids]]))
                logits = before.model.logits(hidden)[0, len(PROMPT) - 1 : -1].double()
            wanted = (logits / 0.7).log_softmax(-1)
            for place, one in enumerate(ids):
                assert found[place] == pytest.approx(float(wanted[place, one]), abs=1e-4)
        body = {"prompt": PROMPT, "max_tokens": 2, "model": NAME} | options
        for more in ({"top_k": 3}, {"top_p": 0.5}):
            refused = httpx.post(f"{server.url}v1/completions", json=body | more)
            assert refused.status_code == 400 and "processed_logprobs" in refused.text


class Refusing:
    """A pipeline without answers, which refuses what it reads."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = list(faults)
        self.orders: list[Order] = []

    def __call__(self, order: Order) -> list[Token]:
        self.orders.append(order)
        if order.read is not None and self.faults:
            raise WeightsRefused(self.faults.pop())
        return []


def test_pipelines_take_weights_together_or_not_at_all() -> None:
    scheduler, stop = Scheduler([1, 1], queue=4), [False]
    pipelines = [Refusing([]), Refusing(["no such folder"])]
    running = threading.Thread(target=scheduler.run, args=(pipelines, 0, stop))
    running.start()
    with pytest.raises(WeightsRefused, match="no such folder"):
        scheduler.change_weights("/new")
    scheduler.change_weights("/new")
    stop[0] = True
    running.join(30)
    for pipeline in pipelines:
        wanted = [Order(read="/new"), Order(take=False), Order(read="/new"), Order(take=True)]
        assert pipeline.orders == [*wanted, Order(stop=True)]
