"""A tiny Llama in Hugging Face format with a byte-level tokenizer.json and a chat template."""

import json
from pathlib import Path
from typing import Any

from tests.support.models import tiny_model
from yuan_train.checkpoint.hf import export_hf, weights_state
from yuan_train.checkpoint.load import find_checkpoint
from yuan_train.checkpoint.save import save_checkpoint
from yuan_train.models.transformer import Transformer, init_weights

SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start|>")
TEMPLATE = (
    "{{- bos_token }}\n"
    "{%- if messages[0].role != 'system' %}<|start|>system\nbe brief<|eot_id|>{% endif %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role not in ('system', 'user', 'assistant') %}\n"
    "        {{- raise_exception('unknown role ' + message.role) }}\n"
    "    {%- endif %}\n"
    "    {{- '<|start|>' + message.role + '\n' + message.content | trim + eos_token }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|start|>assistant\n' }}\n"
    "{%- endif %}\n"
)
"""As Llama 3's and Qwen's are built: whitespace control, a default system message, `raise_exception`."""


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of 256 bytes and four special tokens, in the files that Llama 3 has."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer: Any = tokenizers.Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    begin = (SPECIALS[0], tokenizer.token_to_id(SPECIALS[0]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIALS[0]} $A", pair=f"{SPECIALS[0]} $A $B", special_tokens=[begin]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": SPECIALS[0], "special": True, "__type": "AddedToken"},
        "eos_token": SPECIALS[2],
        "clean_up_tokenization_spaces": False,
        "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]},
    }
    generation = {"bos_token_id": begin[1], "eos_token_id": [begin[1] + 1, begin[1] + 2], "do_sample": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def save_model(folder: Path, model: Transformer, *, scale: float = 1.0) -> Path:
    """Save so many times the weights of a model, and its buffers, as the checkpoint of step 1."""
    tensors = {f"weights.{name}": scale * weight.detach() for name, weight in model.named_parameters()}
    tensors |= {f"weights.{name}": buffer for name, buffer in model.named_buffers()}
    save_checkpoint(folder, step=1, tensors=tensors, state=weights_state(model.config) | {"step": 1})
    return folder


def write_llama(folder: Path, **changes: Any) -> Path:
    """Write a tiny Llama of 260 tokens, with its tokenizer, as a publisher would; return its folder."""
    model = Transformer(tiny_model("llama", vocab_size=260, num_layers=2, **changes))
    init_weights(model, seed=5)
    made = save_model(folder / "made", model, scale=3.0)
    published = Path(export_hf(find_checkpoint(made), folder / "hf", dtype="bfloat16").path)
    write_tokenizer(published)
    return published
