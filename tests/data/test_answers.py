"""Chats as training data: which tokens are answers, in preprocessing, in batches and in preference pairs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.hf_decoders import write_tokenizer
from tests.support.project import write_lines
from yuan_train.config.errors import DataError
from yuan_train.data.indexed import DocumentFormat, IndexedDataset, IndexedWriter, preprocess
from yuan_train.data.loader import IGNORED, SampleSpec, open_corpora
from yuan_train.data.prompts import Prompt, read_pairs, read_prompts
from yuan_train.data.tokenizer import Tokenizer, encode_chat

BEGIN, END, EOT, START = range(256, 260)
CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": " two "},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "three"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def marked(tokenizer: Tokenizer, tokens: list[int], is_answer: list[bool]) -> str:
    """The tokens that are answers, as text."""
    chosen = [token for token, answer in zip(tokens, is_answer, strict=True) if answer]
    return tokenizer.decode(chosen, special=True)


def test_answers_end_with_the_token_that_ends_a_text(tokenizer: Tokenizer) -> None:
    tokens, is_answer = encode_chat(tokenizer, CHAT, "here")
    assert marked(tokenizer, tokens, is_answer) == "two<|eot_id|>three<|eot_id|>"
    assert tokens[0] == BEGIN and tokens[-1] == END and tokens.count(END) == 1
    # The whole chat, as the template writes it, is what is read.
    assert tokenizer.decode(tokens, special=True).startswith(
        "<|begin_of_text|><|start|>system\nbe brief<|eot_id|>"
    )


def test_a_template_without_an_end_of_turn_learns_the_end_of_document(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}>{% endif %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(tmp_path)
    tokens, is_answer = encode_chat(tokenizer, CHAT[:2], "here")
    assert marked(tokenizer, tokens, is_answer) == " two <|end_of_text|>"


def test_templates_that_rewrite_earlier_answers_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    template = "{% for m in messages %}{{ loop.last and 'last ' or '' }}{{ m.content }};{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(DataError, match="message 2 the chat template writes what came before it otherwise"):
        encode_chat(Tokenizer.load(tmp_path), CHAT, "chats.jsonl:3")


def test_roles_that_a_template_refuses_are_named_by_their_line(folder: Path, tmp_path: Path) -> None:
    chats = [{"messages": CHAT}, {"messages": [{"role": "tool", "content": "2"}, *CHAT]}]
    path, form = write_lines(tmp_path / "chats.jsonl", chats), DocumentFormat(messages_key="messages")
    with pytest.raises(DataError, match="chats.jsonl:2: .* the chat template cannot .*: unknown role tool"):
        preprocess([path], folder, tmp_path / "chats", form, workers=1)


def test_only_answers_have_a_loss(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    chats = write_lines(tmp_path / "chats.jsonl", [{"messages": CHAT}] * 4)
    chats.write_text(chats.read_text() + "\n")
    done = preprocess([chats], folder, tmp_path / "chats", DocumentFormat(messages_key="messages"), workers=1)
    assert (done.documents, done.empty, done.answer_tokens) == (4, 1, 4 * 10)
    tokens, is_answer = encode_chat(tokenizer, CHAT, "here")
    assert IndexedDataset(tmp_path / "chats").document(3).tolist() == tokens
    assert IndexedDataset(f"{tmp_path / 'chats'}.answers").document(3).tolist() == is_answer

    def blend(**options: Any) -> Any:
        spec = SampleSpec(sequence_length=37, seed=1, vocab_size=260, **options)
        return open_corpora([(str(tmp_path / "chats"), 1.0)], spec)

    masked, plain = blend(loss_on_answers=True), blend()
    assert masked.masks and not plain.masks and masked.fingerprints != plain.fingerprints
    found, every = masked.batch(0, 4), plain.batch(0, 4)
    stream, answers = np.tile(tokens, 4), np.tile(is_answer, 4)
    for inputs, targets, all_targets in zip(found.inputs, found.targets, every.targets, strict=True):
        # All documents are alike, so a sample is a piece of their repetition.
        first = next(i for i in range(len(tokens)) if (stream[i : i + 37] == inputs).all())
        assert (targets == np.where(answers[first + 1 : first + 38], all_targets, IGNORED)).all()
    assert (found.targets != IGNORED).any() and (found.targets == IGNORED).any()


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    texts = write_lines(tmp_path / "texts.jsonl", [{"text": "a" * 50}])
    preprocess([texts], folder, tmp_path / "texts")
    spec = SampleSpec(sequence_length=8, seed=1, vocab_size=260, loss_on_answers=True)
    with pytest.raises(DataError, match=r"texts.answers.idx: missing.*--messages-key"):
        open_corpora([(str(tmp_path / "texts"), 1.0)], spec)
    with IndexedWriter(tmp_path / "texts.answers", dtype=np.dtype(np.uint8)) as marks:
        length = int(IndexedDataset(tmp_path / "texts").sequence_lengths()[0])
        marks.add_many(np.zeros(length, dtype=np.uint8), [length])
    with pytest.raises(DataError, match="texts.answers: marks no token as part of an answer"):
        open_corpora([(str(tmp_path / "texts"), 1.0)], spec)
    for bad, message in (
        ({"messages": "hi"}, "bad.jsonl:1: not a list of messages"),
        ({"messages": CHAT[:1]}, "no message of the assistant"),
        ({"chat": CHAT}, "no key 'messages'.*--messages-key"),
    ):
        with pytest.raises(DataError, match=message):
            chats = write_lines(tmp_path / "bad.jsonl", [bad])
            preprocess([chats], folder, tmp_path / "bad", DocumentFormat(messages_key="messages"))
        assert not list(tmp_path.glob("bad.*idx")), "nothing half-written"


def rows_of(path: Path, tokenizer: Tokenizer | None, **options: Any) -> Any:
    given = {"sequence_length": 64, "seed": 1, "vocab_size": 260, "trained": "answer"}
    return read_pairs(path, tokenizer, **given | options)


def test_pairs_of_text_and_of_chats(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Text ends with the end of a document, an answer of a chat with its turn."""
    text = {"prompt": "1+1<|start|>", "chosen": "2", "rejected": "<|start|>"}
    chat = {"prompt": CHAT[:1], "chosen": CHAT[:2], "rejected": "no"}
    pairs = rows_of(write_lines(tmp_path / "pairs.jsonl", [text, chat]), tokenizer)
    batch = pairs.in_file_order(0, 4)
    answers = [
        tokenizer.decode([token for token in row if token != IGNORED], special=True) for row in batch.targets
    ]
    assert answers == ["2<|end_of_text|>", "<|start|><|end_of_text|>", "two<|eot_id|>", "no<|eot_id|>"]
    assert batch.inputs[0, :6].tolist() == [BEGIN, *tokenizer.encode("1+1"), START, *tokenizer.encode("2")]
    # The rejected answer's special string is text: it has more than one token.
    assert (batch.targets[1] != IGNORED).sum() == len("<|start|>") + 1
    ends = rows_of(tmp_path / "pairs.jsonl", tokenizer, trained="end").in_file_order(0, 4).targets
    assert ((ends != IGNORED).sum(1) == 1).all()
    assert [row[row != IGNORED].item() for row in ends] == [END, END, EOT, EOT]


def test_the_order_of_pairs(tmp_path: Path) -> None:
    """Each once an epoch, in another order in each; a batch does not depend on how it is divided."""
    records = [{"prompt_ids": [n], "chosen_ids": [n, 1], "rejected_ids": [n]} for n in range(2, 9)]
    pairs = rows_of(write_lines(tmp_path / "pairs.jsonl", records), None, sequence_length=4)
    whole = pairs.batch(0, 28)
    epochs = whole.inputs[::2, 0].reshape(2, 7)
    assert all(sorted(epoch) == list(range(2, 9)) for epoch in epochs.tolist())
    assert epochs[0].tolist() != epochs[1].tolist() != list(range(2, 9))
    assert (pairs.batch(6, 4).inputs == whole.inputs[6:10]).all()
    assert (whole.places[::2] == 2 * (whole.inputs[::2, 0] - 2)).all()
    assert whole.targets[:2].tolist() == [
        [epochs[0, 0], 1, IGNORED, IGNORED],
        [epochs[0, 0], IGNORED, IGNORED, IGNORED],
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("[1]", r"pairs.jsonl:1: list; wanted a JSON object"),
        ("{", r"pairs.jsonl:1: not JSON"),
        ({"prompt": "a", "chosen": "b"}, "no key 'rejected'; wanted text"),
        ({"prompt": "a" * 70, "chosen": "b", "rejected": "c"}, r"lines 1 \(73 tokens\); raise it"),
        ({"prompt_ids": [1], "chosen_ids": [260], "rejected_ids": [1]}, "beyond the model's vocabulary"),
        ({"prompt_ids": [1], "chosen_ids": [], "rejected_ids": [1]}, "an empty chosen"),
        ({"prompt_ids": [1], "chosen_ids": ["a"], "rejected_ids": [1]}, "not a list of token ids"),
        ({"prompt": CHAT[:1], "chosen": CHAT[:1], "rejected": "x"}, "no message of the assistant"),
        ("", "no pairs"),
    ],
)
def test_pairs_that_cannot_be_read(tokenizer: Tokenizer, tmp_path: Path, record: Any, message: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    with pytest.raises(DataError, match=message):
        rows_of(path, tokenizer)


# --- prompts of reinforcement learning ------------------------------------------------------------------


def prompts_of(path: Path, tokenizer: Tokenizer) -> list[Prompt]:
    return read_prompts(path, tokenizer, template="{prompt}", max_tokens=200, vocab_size=260)


def test_prompts_that_are_chats(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The tokens up to where the answer begins are those that the same chat with an answer is trained on."""
    system = {"role": "system", "content": "add"}
    chats = [[CHAT[0]], [system, CHAT[0]], CHAT[:3]]
    path = write_lines(tmp_path / "p.jsonl", ({"prompt": chat, "answer": 2} for chat in chats))
    for prompt, chat in zip(prompts_of(path, tokenizer), chats, strict=True):
        tokens, is_answer = encode_chat(tokenizer, [*chat, CHAT[1]], "here")
        last = len(is_answer) - is_answer[::-1].index(True) - len("two") - 1
        assert list(prompt.ids) == tokens[:last] and prompt.answer == 2
        assert prompt.text.endswith("<|start|>assistant\n")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "p.jsonl:1: no messages, so there is nothing to answer"),
        (CHAT, "p.jsonl:1: the last message is the assistant's, so there is nothing to answer"),
        ([{"role": "tool", "content": "2"}], "p.jsonl:1: .* the chat template cannot .*: unknown role tool"),
        (["1+1?"], r"p.jsonl:1: not a list of messages; wanted \[..., \{\"role\": \"user\""),
    ],
)
def test_prompts_that_are_no_questions(
    tokenizer: Tokenizer, tmp_path: Path, prompt: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        prompts_of(write_lines(tmp_path / "p.jsonl", [{"prompt": prompt}]), tokenizer)
