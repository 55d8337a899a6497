"""The real `openai` client gets what `yuan-train generate` writes, token by token, under any plan."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Ask, command
from tests.support.serving import NAME, Server, make_checkpoint, serving, write_plan
from yuan_train.checkpoint.load import find_checkpoint
from yuan_train.data.tokenizer import render_chat
from yuan_train.models.generate import DocumentRules, Sampling, generate, generate_batch
from yuan_train.train.evaluate import TrainedModel, load_trained

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

PLANS = {
    "one process": (None, 1),
    "two unlike stages": ("1x4: 1@0 | 3@1,2", 3),
    "two pipelines": ("1x3: 4@0 / 1x1: 1@1 | 3@2", 3),
}
EOD = 257
PROMPTS = [[65, 66, 67], [100], [1, 2, EOD, 3, 4, 5], [*range(10, 90)], [EOD, 7, 7], [30] * 20]
"""Of unlike lengths; some hold the end of a document, after which positions begin anew."""
GENERATED: dict[tuple[Any, ...], list[int]] = {}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served") / "ck")


@pytest.fixture(scope="module")
def trained(checkpoint: Path) -> TrainedModel:
    return load_trained(find_checkpoint(checkpoint))


@pytest.fixture(scope="module", params=PLANS)
def server(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server under a plan, with few slots: answers wait for each other, and join and leave."""
    folder = tmp_path_factory.mktemp("server")
    text, num_ranks = PLANS[request.param]
    plan = write_plan(folder, text) if text else None
    with serving(checkpoint, folder, "--slots", "4", plan=plan, num_ranks=num_ranks) as found:
        yield found
        assert found.ranks[0].process.pid is not None
        os.kill(found.ranks[0].process.pid, signal.SIGTERM)
        for rank in found.ranks:
            code, said = rank.wait(within_seconds=30)
            assert code == 0, said
            assert "Traceback" not in said


ALONE = pytest.mark.parametrize("server", ["one process"], indirect=True, scope="module")
"""What does not depend on the ranks behind a server: how it is asked, and how it answers."""


@pytest.fixture
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}v1", api_key="none", max_retries=0)


def complete(client: Any, prompt: Any, max_tokens: int, **options: Any) -> Any:
    """What the server answers to a prompt, with the ids of its tokens."""
    more = {"return_token_ids": True} | {key: options.pop(key) for key in ("top_k",) if key in options}
    return client.completions.create(
        model=NAME, prompt=prompt, max_tokens=max_tokens, extra_body=more, **options
    )


def documents_of(trained: TrainedModel) -> DocumentRules:
    return DocumentRules(eod_id=trained.eod_id, **trained.resets)


def expected(trained: TrainedModel, prompt: list[int], **options: Any) -> list[int]:
    """What `generate` gives: the same for the servers of all plans, and so made once."""
    key = (tuple(prompt), *sorted(options.items()))
    if key not in GENERATED:
        given: dict[str, Any] = {"stop_ids": trained.stop_ids, "documents": documents_of(trained)}
        given |= {name: options.pop(name) for name in ("max_new_tokens", "seed") if name in options}
        GENERATED[key] = list(generate(trained.model, prompt, sampling=Sampling(**options), **given))
    return GENERATED[key]


def test_completions(client: Any, trained: TrainedModel) -> None:
    """Greedy and sampled, all at once."""

    def ask(case: tuple[list[int], dict[str, Any]]) -> tuple[list[int], str]:
        found = complete(client, case[0], 16, **case[1]).choices[0]
        return found.token_ids, found.text

    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.5, "top_p": 0.7, "seed": 11},
        {"temperature": 1.0, "top_k": 5, "seed": 4},
    ]
    cases = [(prompt, kind) for prompt in PROMPTS for kind in kinds]
    with ThreadPoolExecutor(len(cases)) as pool:
        for (prompt, kind), (ids, text) in zip(cases, pool.map(ask, cases), strict=True):
            assert ids == expected(trained, prompt, max_new_tokens=16, **kind), (prompt, kind)
            assert trained.tokenizer is not None
            assert text == trained.tokenizer.decode(ids)


@ALONE
def test_a_stream_is_the_whole_in_pieces(client: Any, trained: TrainedModel) -> None:
    options = {"temperature": 1.0, "seed": 5}
    ids = expected(trained, PROMPTS[0], max_new_tokens=40, **options)
    more = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(complete(client, PROMPTS[0], 40, **more, **options))
    told = [choice for chunk in chunks for choice in chunk.choices]
    assert trained.tokenizer is not None
    assert "".join(choice.text for choice in told) == trained.tokenizer.decode(ids)
    assert [one for choice in told for one in choice.token_ids] == ids
    assert len(told) > 5
    assert told[-1].finish_reason == ("stop" if ids[-1] in trained.stop_ids else "length")
    assert chunks[-1].usage.completion_tokens == len(ids)


@ALONE
def test_chats(client: Any, trained: TrainedModel) -> None:
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "grüße, 世界"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "text", "text": "now?"}]},
    ]
    plain = [*messages[:3], {"role": "user", "content": "and now?"}]
    tokenizer = trained.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode(render_chat(tokenizer, plain), special=True)  # type: ignore[arg-type]
    for options in ({"temperature": 0}, {"temperature": 0.9, "seed": 8}):
        ids = expected(trained, prompt, max_new_tokens=20, **options)
        more = {"max_completion_tokens": 20, "extra_body": {"return_token_ids": True}} | options
        whole = client.chat.completions.create(model=NAME, messages=messages, **more)
        choice = whole.choices[0]
        assert (choice.token_ids, choice.prompt_token_ids) == (ids, prompt)
        assert (choice.message.content, choice.message.role) == (tokenizer.decode(ids), "assistant")
        assert whole.usage.prompt_tokens == len(prompt)
        stream = client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=20, stream=True, **options
        )
        pieces = [chunk.choices[0].delta for chunk in stream]
        assert pieces[0].role == "assistant"
        assert "".join(piece.content for piece in pieces) == tokenizer.decode(ids)


@ALONE
def test_the_command_writes_the_same(client: Any, checkpoint: Path, ask: Ask) -> None:
    """`generate` itself, with text and as a chat."""
    for kind in ([], ["--chat"]):
        words = ["--prompt", "say it", "--max-new-tokens", "12", "--temperature", "0.7", "--seed", "2"]
        told = ask("generate", "--checkpoint", checkpoint, *words, *kind)
        options = {"temperature": 0.7, "seed": 2}
        if kind:
            more = {"max_tokens": 12, "extra_body": {"return_token_ids": True}} | options
            asked = [{"role": "user", "content": "say it"}]
            choice = client.chat.completions.create(model=NAME, messages=asked, **more).choices[0]
            text = choice.message.content
        else:
            choice = complete(client, "say it", 12, **options).choices[0]
            text = choice.text
        found = {"prompt_ids": choice.prompt_token_ids, "new_ids": choice.token_ids, "text": text}
        assert found == {key: told[key] for key in found}


def test_what_is_printed_as_it_comes_is_the_whole_text(
    checkpoint: Path, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it ends within a character."""
    words = ["generate", "--checkpoint", checkpoint, "--prompt", "say it", "--seed", 2]
    ends: set[bool] = set()
    for length in range(1, 7):
        text = ask(*words, "--max-new-tokens", length)["text"]
        assert command(*words, "--max-new-tokens", length) == 0
        assert capsys.readouterr().out == f"say it{text}\n"
        ends.add(text.endswith("\N{REPLACEMENT CHARACTER}"))
    assert ends == {True, False}


def test_several_answers_have_seeds_of_their_own(client: Any, trained: TrainedModel) -> None:
    """As the rows of `generate_batch`: a prompt's answers after each other."""
    found = complete(client, [PROMPTS[0], PROMPTS[3]], 10, n=3, seed=20)
    assert [choice.index for choice in found.choices] == [*range(6)]
    for place, prompt in enumerate((PROMPTS[0], PROMPTS[3])):
        rows: list[list[int]] = [[], [], []]
        options = {"documents": documents_of(trained), "stop_ids": trained.stop_ids}
        seed = 20 + 3 * place
        for tokens in generate_batch(trained.model, [prompt] * 3, max_new_tokens=10, seed=seed, **options):
            for row, token in zip(rows, tokens, strict=True):
                row += [] if token is None else [token]
        assert [choice.token_ids for choice in found.choices[3 * place : 3 * place + 3]] == rows


@ALONE
def test_a_stop_string_ends_an_answer_and_is_not_in_it(client: Any, trained: TrainedModel) -> None:
    tokenizer = trained.tokenizer
    assert tokenizer is not None
    text = tokenizer.decode(expected(trained, PROMPTS[0], max_new_tokens=60, temperature=0))
    stop = text[20:23]
    options = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 60, "temperature": 0, "stop": [stop, "no!"]}
    whole = client.completions.create(**options).choices[0]
    assert (whole.text, whole.finish_reason) == (text[: text.index(stop)], "stop")
    pieces = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True)]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].finish_reason == "stop"


def test_log_probabilities(client: Any, trained: TrainedModel) -> None:
    import torch

    found = complete(client, PROMPTS[0], 6, temperature=0, logprobs=3).choices[0]
    with torch.no_grad():
        hidden = trained.model(torch.tensor([[*PROMPTS[0], *found.token_ids]]))
        wanted = trained.model.logits(hidden)[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    for place, one in enumerate(found.token_ids):
        assert found.logprobs.token_logprobs[place] == pytest.approx(float(wanted[place, one]), abs=1e-4)
        best = max(found.logprobs.top_logprobs[place].values())
        assert best == pytest.approx(float(wanted[place].max()), abs=1e-4)
    options = {"max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    asked = [{"role": "user", "content": "a"}]
    chat = client.chat.completions.create(model=NAME, messages=asked, **options).choices[0]
    assert len(chat.logprobs.content) == 6
    for entry in chat.logprobs.content:
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


@pytest.mark.parametrize("server", ["two pipelines"], indirect=True, scope="module")
def test_64_streams_at_once_lose_nothing(client: Any, trained: TrainedModel) -> None:
    """Each is the same as if it were alone; many times as many as there are slots, of a pipeline of one stage
    and of one of two, which `test_completions` fills under every plan."""
    prompts = [[number + 1, *range(number % 7 + 1)] for number in range(64)]
    together = threading.Barrier(64)

    def ask(number: int) -> list[int]:
        together.wait()
        options = {"temperature": 0.8, "seed": number, "stream": True}
        stream = complete(client, prompts[number], 6 + number % 12, **options)
        return [one for chunk in stream for choice in chunk.choices for one in choice.token_ids]

    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(ask, range(64)))
    for number, ids in enumerate(found):
        wanted = expected(
            trained, prompts[number], max_new_tokens=6 + number % 12, temperature=0.8, seed=number
        )
        assert ids == wanted, number
    health = client.get("/../health", cast_to=object)
    assert health["running"] == health["waiting"] == 0


@ALONE
def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="other"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="a")
