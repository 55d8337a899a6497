"""python tools/lm_eval_yuan.py --checkpoint CKPT --tasks NAME [--include DIR]: lm-evaluation-harness.

The harness requests log-likelihoods and greedy text; this script computes them from a checkpoint of ours with
its tokenizer. `lm_eval` is large and not among this package's extras: tools/check_lm_eval.sh creates an
environment with it and runs local tasks without network access.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from yuan_train.checkpoint.load import find_checkpoint
from yuan_train.config.errors import YuanError
from yuan_train.models.generate import DocumentRules, Sampling, generate
from yuan_train.train.evaluate import TrainedModel, hidden_states, load_trained


class Scorer:
    """Log-likelihoods and continuations of a trained model, independent of the harness.

    A text's first token is predicted from the end-of-document token, as in training. Texts longer than the
    model's sequence are scored in windows: each token once, and each window begins with the last token of
    the window before. Raises YuanError if there is no tokenizer.
    """

    def __init__(self, trained: TrainedModel, *, special: bool = False) -> None:
        if trained.tokenizer is None:
            raise YuanError("the checkpoint holds no tokenizer; give --tokenizer DIR")
        self.trained = trained
        self.tokenizer = trained.tokenizer
        self.special = special
        # What a text begins with in training: the tokenizer's own prefix, or the end of the text before.
        self.start = self.tokenizer.prefix_ids or [self.tokenizer.eod_id]
        self.max_length = trained.model.config.max_sequence_length

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self.tokenizer.encode(text, special=self.special)

    def continuation(self, context: str, text: str) -> tuple[float, bool]:
        """Return (log-likelihood of `text` after `context` in nats, whether greedy decoding gives `text`)."""
        whole = self.encode(context + text)
        # `text` begins where the tokens of `context` alone end; a token across the border belongs to `text`.
        first = len(self.encode(context)) if context else 0
        while first and self.encode(context)[:first] != whole[:first]:
            first -= 1
        ids = [*self.start, *whole][-self.max_length - 1 :]
        logprobs, greedy = self._scores(ids)
        count = min(len(whole) - first, len(ids) - 1)
        return float(logprobs[len(logprobs) - count :].sum()), bool(greedy[len(greedy) - count :].all())

    def rolling(self, text: str) -> float:
        """Return the log-likelihood of a whole text, in nats."""
        ids = [*self.start, *self.encode(text)]
        total = 0.0
        for first in range(0, len(ids) - 1, self.max_length):
            logprobs, _ = self._scores(ids[first : first + self.max_length + 1])
            total += float(logprobs.sum())
        return total

    def generate(self, context: str, until: Sequence[str], max_new_tokens: int) -> str:
        """Return greedy text up to the first of `until`, the end of a document, or `max_new_tokens`."""
        room = self.max_length - max_new_tokens
        prompt = [*self.start, *self.encode(context)][-max(room, 1) :]
        ids: list[int] = []
        stops = [stop for stop in until if stop]
        stream = generate(
            self.trained.model,
            prompt,
            max_new_tokens=min(max_new_tokens, self.max_length - len(prompt)),
            sampling=Sampling(temperature=0),
            documents=DocumentRules(eod_id=self.trained.eod_id, **self.trained.resets),
            stop_ids=self.trained.stop_ids,
        )
        text = ""
        before = self.tokenizer.decode(prompt)
        for token in stream:
            ids.append(token)
            text = self.tokenizer.decode([*prompt, *ids])[len(before) :]
            ends = [text.index(stop) for stop in stops if stop in text]
            if ends:
                return text[: min(ends)]
        return text

    @torch.no_grad()
    def _scores(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability in nats of each of ids[1:], and whether it is the most probable; both [len - 1]."""
        tokens = torch.tensor([ids])
        hidden_BSH = hidden_states(self.trained, tokens[:, :-1])
        logits_SV = self.trained.model.logits(hidden_BSH)[0].double()
        targets = tokens[0, 1:].to(logits_SV.device)
        chosen = logits_SV.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        return chosen.cpu(), (logits_SV.argmax(-1) == targets).cpu()


def harness_model(scorer: Scorer) -> Any:
    """Return the scorer as the harness's model class."""
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

    class YuanLM(LM):
        def loglikelihood(self, requests: Any, **_: Any) -> Any:
            return [scorer.continuation(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> Any:
            return [scorer.rolling(request.args[0]) for request in requests]

        def generate_until(self, requests: Any, **_: Any) -> Any:
            texts = []
            for request in requests:
                context, options = request.args
                until = options.get("until") or []
                until = [until] if isinstance(until, str) else until
                texts.append(scorer.generate(context, until, int(options.get("max_gen_toks", 256))))
            return texts

    return YuanLM()


def main(arguments: list[str] | None = None) -> int:
    """Evaluate, and print one JSON object with the harness's results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True, metavar="CKPT")
    parser.add_argument("--tasks", nargs="+", required=True, metavar="NAME")
    parser.add_argument("--include", metavar="DIR", help="folder with your own task files")
    parser.add_argument("--tokenizer", metavar="DIR", help="tokenizer to use instead of the checkpoint's")
    parser.add_argument("--limit", type=int, metavar="N", help="maximum number of documents per task")
    parser.add_argument("--special", action="store_true", help="parse special tokens such as <sep>")
    options = parser.parse_args(arguments)
    try:
        trained = load_trained(find_checkpoint(options.checkpoint), tokenizer=options.tokenizer)
        scorer = Scorer(trained, special=options.special)
    except YuanError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    evaluated = lm_eval.simple_evaluate(
        model=harness_model(scorer),
        tasks=options.tasks,
        task_manager=TaskManager(include_path=options.include),
        limit=options.limit,
        bootstrap_iters=0,
    )
    assert evaluated is not None, "only ranks other than 0 get None"
    print(json.dumps({"lm_eval": lm_eval.__version__, "results": evaluated["results"]}, default=str))
    return 0


def write_local_task(folder: Path, texts: Sequence[str]) -> list[str]:
    """Write three tasks over `texts` for the harness and return their names.

    Rolling likelihood, likelihood of a continuation, and generation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "texts.jsonl"
    with data.open("w", encoding="utf-8") as file:
        for text in texts:
            half = len(text) // 2
            file.write(json.dumps({"text": text, "start": text[:half], "end": text[half : half + 40]}) + "\n")
    common = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data.resolve()}}}}}\ntest_split: test\n"
    )
    (folder / "yuan_texts.yaml").write_text(
        f"task: yuan_texts\n{common}output_type: loglikelihood_rolling\ndoc_to_text: ''\n"
        "doc_to_target: '{{text}}'\nmetric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n"
    )
    (folder / "yuan_ends.yaml").write_text(
        f"task: yuan_ends\n{common}output_type: loglikelihood\ndoc_to_text: '{{{{start}}}}'\n"
        "doc_to_target: '{{end}}'\ntarget_delimiter: ''\nmetric_list: [{metric: acc}, {metric: perplexity}]\n"
    )
    (folder / "yuan_writes.yaml").write_text(
        f"task: yuan_writes\n{common}output_type: generate_until\ndoc_to_text: '{{{{start}}}}'\n"
        "doc_to_target: '{{end}}'\ngeneration_kwargs: {until: [\"\\n\"], max_gen_toks: 8}\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    return ["yuan_texts", "yuan_ends", "yuan_writes"]


if __name__ == "__main__":
    sys.exit(main())
