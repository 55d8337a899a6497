"""Checkpoints to be served, and servers of them on a free port; servers of the tests' own."""

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.support.hf_decoders import save_model, write_tokenizer
from tests.support.models import tiny_model
from tests.support.project import parse_plan
from tests.support.spawn import Command, start_ranks
from yuan_train.config.plan_constraints import save_plan
from yuan_train.config.run import RunConfig
from yuan_train.models.transformer import Transformer, init_weights


class Quiet(BaseHTTPRequestHandler):
    """Answers requests, and logs none."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def answering(handler: type[Quiet]) -> Iterator[str]:
    """The address of a server in a thread of this process."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


START_SECONDS = 90
NAME = "tiny"


def make_checkpoint(folder: Path, variant: str = "yuan", *, endless: bool = False, **changes: Any) -> Path:
    """A model of random weights with a tokenizer of bytes, which has a chat template.

    `endless`: greedy answers never end by themselves; the logits of special tokens are 0.
    """
    model = Transformer(tiny_model(variant, vocab_size=260, name=NAME, **changes))
    init_weights(model, seed=5)
    if endless:
        model.embedding.weight.data[256:] = 0
    save_model(folder, model, scale=3.0)
    tokenizer = folder / "step-00000001" / "tokenizer"
    tokenizer.mkdir()
    write_tokenizer(tokenizer)
    return folder


def write_plan(folder: Path, text: str, variant: str = "yuan", **changes: Any) -> Path:
    """A plan of such a model, in the short form of `parse_plan`."""
    run = SimpleNamespace(
        model=tiny_model(variant, vocab_size=260, name=NAME, **changes),
        data=SimpleNamespace(sequence_length=64),
        train=SimpleNamespace(global_batch_size=sum(_sequences(part) for part in text.split("/"))),
    )
    path = folder / "plan.yaml"
    save_plan(path, parse_plan(cast(RunConfig, run), text))
    return path


def _sequences(pipeline: str) -> int:
    size, _, number = pipeline.partition(":")[0].partition("x")
    return int(size) * int(number)


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    ranks: Sequence[Command]

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])


@contextmanager
def serving(
    checkpoint: Path, folder: Path, *options: str, plan: Path | None = None, num_ranks: int = 1
) -> Iterator[Server]:
    """A server, with all its ranks; killed at the end if it still runs."""
    words = ["serve", "--checkpoint", checkpoint, "--port", "0", "--device", "cpu", *options]
    words += [] if plan is None else ["--plan", plan]
    with start_ranks(words, folder, num_ranks) as ranks:
        yield Server(wait_for_url(ranks[0]), ranks)


def wait_for_url(rank: Command) -> str:
    """Where a server that starts says that it listens."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        found = re.search(r"at (http://\S+)", rank.stderr.read_text() if rank.stderr.exists() else "")
        if found:
            return found[1]
        assert rank.process.is_alive(), rank.stderr.read_text()
        time.sleep(0.05)
    raise AssertionError(f"no server after {START_SECONDS} s:\n{rank.stderr.read_text()}")
