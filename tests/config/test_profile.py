"""Profiles: read, and refused."""

import json
import re
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import table
from yuan_train.config.errors import ConfigError
from yuan_train.config.load import as_plain
from yuan_train.config.profile import Profile, load_profile

UNIT = {
    "forward_seconds": 0.01, "backward_seconds": 0.02, "state_bytes": 1, "activation_bytes": 1,
    "output_bytes": 1,
}  # fmt: skip


def example() -> dict[str, Any]:
    """The documented form."""
    return {
        "version": 1, "source": "measured", "sequence_length": 4096,
        "entries": [{"device_type": "A100-80G", "tensor_parallel": 1, "micro_batch_size": 1,
                     "recompute": "none", "embedding": UNIT, "layers": [UNIT],
                     "head": UNIT | {"output_bytes": 0}}],
        "links": [{"from": "a100-0/0", "to": "t4-0/0", "message_bytes": [65536, 67108864],
                   "seconds": [0.0001, 0.006]}],
    }  # fmt: skip


def load(folder: Path, value: dict[str, Any]) -> Profile:
    path = folder / "profile.json"
    path.write_text(json.dumps(value, indent=1))
    return load_profile(path)


def test_the_example(tmp_path: Path) -> None:
    profile = load(tmp_path, example())
    entry = profile.entries[0]
    assert entry.layer(7) is entry.layers[0]
    assert profile.links[0].from_ == "a100-0/0"
    assert profile.links[0].seconds == (0.0001, 0.006)


GENERATION = {
    "device_type": "A100-80G", "group": 8, "prompt_tokens": 256, "slots": [8, 64],
    "contexts": [300.0, 900.0], "layer_seconds": [[0.001, 0.002], [0.003, 0.004]],
    "engine_seconds": [0.001, 0.002], "head_seconds": [0.001, 0.002], "prompts": [1, 8],
    "prompt_layer_seconds": [0.001, 0.002], "prompt_engine_seconds": [0.001, 0.002],
}  # fmt: skip


def test_generation_comes_back(tmp_path: Path) -> None:
    batch = {"samples": 64, "scoring_seconds": 0.5, "packing_seconds": 0.1}
    found = load(tmp_path, example() | {"generation": [GENERATION], "batch": batch})
    own = found.generation[0]
    assert (own.tensor_parallel, own.layer_seconds[1][0]) == (1, 0.003)
    path = tmp_path / "again.json"
    path.write_text(json.dumps(as_plain(found)))
    assert load_profile(path) == found
    # Those written before have none.
    assert load(tmp_path, example()).generation == () and load(tmp_path, example()).batch is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": [64, 8]}, "generation[0].slots: numbers must increase"),
        ({"head_seconds": [0.1]}, "generation[0].head_seconds: 1, but 2 slots; give one for each"),
        ({"prompts": [1]}, "generation[0].prompt_layer_seconds: 2, but 1 prompts"),
        ({"layer_seconds": [[0.1], [0.1, 0.2]]}, "layer_seconds[0]: 1 times, but 2 contexts; give one"),
    ],
)
def test_generation_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, example() | {"generation": [GENERATION | change]})
    with pytest.raises(ConfigError, match="measured twice: A100-80G, 1; keep one"):
        load(tmp_path, example() | {"generation": [GENERATION, GENERATION]})


@table(r"""
path => value | message
version => 2 | profile.json:2: version: wanted 1, got 2; measure again with this release
entries.0.layers => [] | entries[0].layers: wanted at least one, got none
entries.0.head.forward_seconds => -1 | entries[0].head.forward_seconds: wanted greater than or equal
entries.0.head.forward_seconds => "fast" | entries[0].head.forward_seconds: wanted a number
entries.0.head.forward_secs => 1 | unknown key 'forward_secs'; did you mean 'forward_seconds'?
links.0.seconds => [1.0] | links[0]: 2 message sizes but 1 times; give one per size
links.0.message_bytes => [2, 1] | links[0].message_bytes: sizes must increase
sequence_length => null | sequence_length: wanted an integer, got null
""")
def test_messages(tmp_path: Path, path: str, value: str, message: str) -> None:
    broken = example()
    section: Any = broken
    *outer, last = (int(key) if key.isdigit() else key for key in path.split("."))
    for key in outer:
        section[key] = copy(section[key])
        section = section[key]
    section[last] = json.loads(value)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, broken)


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [("forward_seconds", 1e300, "1000000000000000"), ("state_bytes", 1e19, "1000000000000000000")],
)
def test_what_no_card_takes_is_refused(tmp_path: Path, name: str, value: float, most: str) -> None:
    large = example()
    large["entries"][0]["head"] = UNIT | {name: value}
    with pytest.raises(ConfigError, match=rf"head\.{name}: wanted less than or equal to {most}"):
        load(tmp_path, large)


def test_what_is_measured_twice_is_refused(tmp_path: Path) -> None:
    twice = example() | {"entries": example()["entries"] * 2}
    with pytest.raises(ConfigError, match=r"entries\[1\]: measured twice: A100-80G, 1, 1, none; keep one"):
        load(tmp_path, twice)
