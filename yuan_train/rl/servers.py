"""A server over HTTP that draws answers and takes weights: what it is asked, and how its replies are checked.

vLLM, SGLang, and `yuan-train serve`. Prompts go as token ids, and ids come back with the log-probabilities of
softmax(logits / temperature). A server that cannot be reached, or ends while it is asked, is lost; one that
replies with anything but what was asked for ends the run.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, cast
from urllib.parse import urlsplit

from yuan_train.config.errors import ConfigError, TrainingError
from yuan_train.config.rl import HttpGeneration, RLConfig, ServerKind
from yuan_train.rl.experience import Sample, Ticket
from yuan_train.rl.generator import SamplingParams

START_SECONDS = 10.0
"""In which a server says, at the start of a run, what it has."""
MOST_WAIT_SECONDS = 10.0
"""Before a server that has no room is asked again, whatever it says."""
SHOWN = 300
"""Characters of a reply that a message repeats."""
ROUNDING = 1e-5
"""How far above 0 the log-probability of a sure token may come by rounding; it is taken as 0."""
ENDING = (408, 502, 503, 504)
"""Statuses of a server that has ended or hangs, or of a proxy before it."""
SEEDS = 1 << 31


class LostServer(Exception):
    """A server cannot be reached, or ended while it was asked."""


def check_servers(servers: HttpGeneration, run: RLConfig) -> None:
    """Ask each server what it has. Raises ConfigError, with every fault, for those that cannot draw."""
    faults: list[str] = []
    for url in servers.http:
        try:
            InferenceServer(url, servers, run).find_kind()
        except (LostServer, TrainingError) as error:
            faults.append(f"roles.generation.http: {error}")
    if faults:
        raise ConfigError("\n".join(faults))


class InferenceServer:
    """One server; its methods may be called by several threads."""

    def __init__(self, url: str, servers: HttpGeneration, run: RLConfig) -> None:
        self.url = url.rstrip("/")
        self._servers = servers
        self._vocab_size = run.model.vocab_size
        self._length = run.sequence_length
        self._kind: ServerKind = servers.kind

    def find_kind(self) -> None:
        """Find out which program it is, and that it has the model. Raises LostServer, and TrainingError if it
        has not."""
        listed = self._ask("GET", "/v1/models", None, START_SECONDS)
        models: Any = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(models, list) or not all(isinstance(one, dict) for one in models):
            raise self._odd("/v1/models", listed, "a list of models")
        names = [one.get("id") for one in models]
        if self._servers.model not in names:
            have = ", ".join(map(repr, names)) or "none"
            raise TrainingError(
                f"{self.url}: has no model {self._servers.model!r} (roles.generation.model), but {have}"
            )
        model = cast(dict[str, Any], models[names.index(self._servers.model)])
        length = model.get("max_model_len")
        if isinstance(length, int) and length < self._length:
            raise TrainingError(
                f"{self.url}: holds {length} tokens of a prompt and its answer, but they may have "
                f"{self._length} (data.max_prompt_tokens, generation.max_new_tokens); start it with more"
            )
        if model.get("takes_weights") is False:
            raise TrainingError(f"{self.url}: takes no weights; start it with --allow-weights")
        if self._kind == "auto":
            owner = model.get("owned_by")
            if owner not in ("yuan_train", "vllm", "sglang"):
                raise TrainingError(
                    f"{self.url}: does not say which program it is (owned_by: {owner!r}); give "
                    "roles.generation.kind"
                )
            self._kind = owner

    def take_weights(self, folder: str) -> None:
        """Have it use the weights of a folder. Raises LostServer, and TrainingError if it does not."""
        timeout = self._servers.timeout
        if self._kind == "vllm":
            body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            try:
                self._send("POST", "/collective_rpc", body, timeout)
            except TrainingError as error:
                raise TrainingError(f"{error}; wanted vLLM started with VLLM_SERVER_DEV_MODE=1") from None
            # Keys and values of the old weights.
            self._send("POST", "/reset_prefix_cache", {}, timeout)
            return
        path = "/update_weights_from_disk"
        told = self._ask("POST", path, {"model_path": folder}, timeout)
        if not isinstance(told, dict) or told.get("success") is not True:
            raise self._odd(path, told, '"success": true')

    def answer(self, ticket: Ticket, params: SamplingParams) -> list[Sample]:
        """All answers to a prompt. Raises LostServer, and TrainingError for a reply that is none."""
        # That of the first answer follows from the run's seed and the ticket.
        digest = hashlib.sha256(f"{params.seed}:{ticket.number}".encode()).digest()
        seed = int.from_bytes(digest[:8]) % (SEEDS - ticket.count)
        path = "/generate" if self._kind == "sglang" else "/v1/completions"
        body = self._sglang_body(ticket, params, seed) if self._kind == "sglang" else None
        reply = self._ask("POST", path, body or self._body(ticket, params, seed), self._servers.timeout)
        try:
            read = _read_sglang(reply) if self._kind == "sglang" else _read_choices(reply)
            if len(read) != ticket.count:
                raise ValueError(f"{ticket.count} answers, and these are {len(read)}")
            return [
                read_sample(ticket, number, ids, log_probs, params, vocab_size=self._vocab_size)
                for number, (ids, log_probs) in enumerate(read)
            ]
        except ValueError as error:
            raise self._odd(path, reply, str(error)) from None

    def _body(self, ticket: Ticket, params: SamplingParams, seed: int) -> dict[str, Any]:
        """A completion in OpenAI's form: answer i has the seed + i."""
        # What a server's own defaults would cut off is drawn too.
        whole: dict[str, Any] = {"min_p": 0.0, "repetition_penalty": 1.0}
        if self._kind == "yuan_train":
            whole = {"logprobs_mode": "processed_logprobs"}
        return whole | {
            "model": self._servers.model,
            "prompt": list(ticket.prompt_ids),
            "n": ticket.count,
            "max_tokens": params.max_new_tokens,
            "temperature": 0.0 if params.greedy else params.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": sorted(params.stop_ids),
            "ignore_eos": True,
        }

    def _sglang_body(self, ticket: Ticket, params: SamplingParams, seed: int) -> dict[str, Any]:
        """A request of SGLang's own form, whose answers have a seed each. `ignore_eos` would ignore
        `stop_token_ids` too."""
        whole: dict[str, Any] = {
            "max_new_tokens": params.max_new_tokens,
            "temperature": 0.0 if params.greedy else params.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(params.stop_ids),
        }
        return {
            "input_ids": [list(ticket.prompt_ids)] * ticket.count,
            "sampling_params": [whole | {"sampling_seed": seed + i} for i in range(ticket.count)],
            "return_logprob": True,
        }

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> Any:
        """`_send`, of which the reply is JSON."""
        text = self._send(method, path, body, timeout)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self._odd(path, text, "JSON") from None

    def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> str:
        """The text of a reply of status 200; while the server has no room, it is asked again. Raises
        LostServer, and TrainingError for another status."""
        end = time.monotonic() + timeout
        while True:
            status, text, wait = self._exchange(method, path, body, max(end - time.monotonic(), 0.1))
            if status == 200:
                return text
            if status in ENDING:
                raise LostServer(f"{self.url}{path}: status {status}: {text[:SHOWN]}")
            if status != 429:
                raise TrainingError(f"{self.url}{path}: status {status}: {text[:SHOWN]}")
            if time.monotonic() + wait > end:
                raise LostServer(f"{self.url}{path}: had no room within {timeout:g} s")
            time.sleep(wait)

    def _exchange(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float
    ) -> tuple[int, str, float]:
        """Status, text, and the seconds after which to ask again. Raises LostServer."""
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(cast(str, parts.hostname), parts.port, timeout=timeout)
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, parts.path + path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            given = response.getheader("Retry-After") or ""
            wait = min(float(given), MOST_WAIT_SECONDS) if given.isdecimal() else 1.0
            return response.status, response.read().decode("utf-8", "replace"), wait
        except (OSError, HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise LostServer(f"{self.url}{path}: cannot be reached, or has ended: {reason}") from None
        finally:
            connection.close()

    def _odd(self, path: str, reply: Any, wanted: str) -> TrainingError:
        return TrainingError(f"{self.url}{path}: wanted {wanted}; got {repr(reply)[:SHOWN]}")


def _read_choices(reply: Any) -> list[tuple[Any, Any]]:
    """Ids and log-probabilities of a completion's choices, by their index. Raises ValueError."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
        raise ValueError("choices")
    if sorted(one.get("index", -1) for one in choices) != list(range(len(choices))):
        raise ValueError("choices of index 0, 1 and so on")
    found: list[tuple[Any, Any]] = []
    for one in sorted(choices, key=lambda one: one["index"]):
        told = one.get("logprobs")
        found.append((one.get("token_ids"), told.get("token_logprobs") if isinstance(told, dict) else None))
    return found


def _read_sglang(reply: Any) -> list[tuple[Any, Any]]:
    """Ids and log-probabilities of SGLang's answers, in their order. Raises ValueError."""
    if not isinstance(reply, list):
        raise ValueError("a list of answers")
    found: list[tuple[Any, Any]] = []
    for one in reply:
        about = one.get("meta_info") if isinstance(one, dict) else None
        told = about.get("output_token_logprobs") if isinstance(about, dict) else None
        if not isinstance(told, list) or not all(isinstance(t, list) and len(t) >= 2 for t in told):
            raise ValueError("meta_info.output_token_logprobs of each answer")
        found.append(([t[1] for t in told], [t[0] for t in told]))
    return found


def read_sample(
    ticket: Ticket, number: int, ids: Any, log_probs: Any, params: SamplingParams, *, vocab_size: int
) -> Sample:
    """An answer of what a server gave. Raises ValueError, saying what was wanted."""
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise ValueError("token ids (token_ids) of each answer")
    if not isinstance(log_probs, list) or not all(type(one) in (int, float) for one in log_probs):
        raise ValueError("a log-probability (token_logprobs) of each token")
    if len(ids) != len(log_probs):
        raise ValueError(
            f"as many log-probabilities as tokens, and these are {len(log_probs)} and {len(ids)}"
        )
    if not 0 < len(ids) <= params.max_new_tokens:
        raise ValueError(f"1 to {params.max_new_tokens} tokens of an answer, and these are {len(ids)}")
    for one in ids:
        if not 0 <= one < vocab_size:
            raise ValueError(f"ids of a vocabulary of {vocab_size}, and one is {one}")
    for one in log_probs:
        if not math.isfinite(one) or one > ROUNDING:
            raise ValueError(f"finite log-probabilities of at most 0, and one is {one}")
    early = next((one for one in ids[:-1] if one in params.stop_ids), None)
    if early is not None:
        raise ValueError(f"answers that end with their first stop token, and one goes on behind {early}")
    is_ended = ids[-1] in params.stop_ids
    if not is_ended and len(ids) < params.max_new_tokens:
        raise ValueError(
            f"answers with the stop token that ended them (generation.stop_ids: {sorted(params.stop_ids)}), "
            f"and one ends with {ids[-1]}"
        )
    drawn = tuple(min(float(one), 0.0) for one in log_probs)
    return Sample(ticket.number, number, tuple(ids), drawn, "stop" if is_ended else "limit")
