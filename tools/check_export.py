"""python tools/check_export.py EXPORT EXPECTED.safetensors: an exported model in the real transformers.

Loads the folder as any user would (`AutoModelForCausalLM`, `trust_remote_code`). Compares logits and greedy
tokens with EXPECTED (`input_ids`, `logits`, `prompt`, `greedy`), beam search with and without cache, and a
left-padded batch with its prompts alone. Needs transformers; tools/check_transformers.sh installs it.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TOLERANCE = 2e-5


def main(arguments: list[str] | None = None) -> int:
    """Check and print one JSON object; return 1 and print the reason if something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("export", type=Path, metavar="EXPORT")
    parser.add_argument("expected", type=Path, metavar="EXPECTED")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of logits; %(default)g")
    parser.add_argument("--ids", type=Path, metavar="FILE", help="texts and their token ids (JSON)")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(options.export, trust_remote_code=True)
    model.eval()
    facts = {"transformers": transformers.__version__, "torch": torch.__version__}
    try:
        facts |= check(model, load_file(options.expected), options.tolerance)
        if options.ids is not None:
            facts |= check_tokenizer(options.export, options.ids)
    except AssertionError as error:
        print(f"error: transformers {transformers.__version__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(facts))
    return 0


@torch.no_grad()
def check(model: Any, expected: dict[str, torch.Tensor], tolerance: float) -> dict[str, Any]:
    """Compare with EXPECTED; return the differences. Raises AssertionError if one is too large."""
    logits = model(expected["input_ids"]).logits
    difference = float((logits - expected["logits"]).abs().max())
    assert difference <= tolerance, f"logits differ by {difference}"
    prompt, greedy = expected["prompt"], expected["greedy"].tolist()
    length = prompt.shape[1]
    for use_cache in (True, False):
        # Without an end token: the stored tokens do not stop either.
        options = {"do_sample": False, "use_cache": use_cache, "eos_token_id": None, "pad_token_id": 0}
        ids = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=len(greedy), **options
        )
        assert ids[0, length:].tolist() == greedy, f"greedy tokens (cache: {use_cache}) {ids[0, length:]}"
    return {"logits_difference": difference, "greedy": greedy, **check_batches(model, prompt, len(greedy))}


def check_batches(model: Any, prompt: torch.Tensor, count: int) -> dict[str, Any]:
    """Check that beams agree with and without cache, and a left-padded batch with its prompts alone."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": count}
    mask = torch.ones_like(prompt)
    beams = [
        model.generate(prompt, attention_mask=mask, num_beams=3, use_cache=cached, **options)
        for cached in (True, False)
    ]
    assert torch.equal(*beams), "beam search differs between cache and no cache"
    short = prompt[:, :3]
    padding = torch.zeros(1, prompt.shape[1] - 3, dtype=prompt.dtype)
    batch = torch.cat((torch.cat((padding, short), dim=1), prompt))
    masks = torch.cat((torch.cat((padding, torch.ones_like(short)), dim=1), mask))
    together = model.generate(batch, attention_mask=masks, **options)[:, prompt.shape[1] :]
    for row, ids in ((0, short), (1, prompt)):
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :]
        assert torch.equal(together[row], alone), f"row {row} of a padded batch differs from the same alone"
    return {"beams": "equal", "padded": "equal"}


def check_tokenizer(export: Path, samples: Path) -> dict[str, Any]:
    """Check the ids that the exported tokenizer gives to texts, and that they decode to the texts."""
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(export, trust_remote_code=True)
    expected = json.loads(samples.read_text(encoding="utf-8"))["samples"]
    for sample in expected:
        ids = tokenizer(sample["text"])["input_ids"]
        assert ids == sample["ids"], f"{sample['text']!r} gives {ids}, expected {sample['ids']}"
        text = tokenizer.decode(ids)
        assert text == sample["text"], f"{sample['text']!r} decodes to {text!r}"
    return {"tokenizer_samples": len(expected)}


if __name__ == "__main__":
    sys.exit(main())
