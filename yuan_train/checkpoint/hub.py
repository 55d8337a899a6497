"""Models of the Hugging Face Hub by name: fetched for an import, put there after an export.

`huggingface_hub` comes with `tokenizers`; it is imported, and asks the network, only when a name is given.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from yuan_train.config.errors import CheckpointError

NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""ORG/NAME, as models are called there."""
_NO_CONNECTION = {"ConnectionError", "ConnectError", "Timeout", "TimeoutException"}
"""Errors of requests, httpx and Python that say no server was met; their texts are of objects and ids."""
_TEXT = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
"""What is fetched beside the weights; no code."""


def fetch_model(name: str) -> Path:
    """The folder of a model of the Hub, fetched if it is not in huggingface_hub's cache yet.

    Weights are safetensors where there are any, else PyTorch's. Raises CheckpointError if it cannot be had.
    """
    hub = _hub()
    try:
        found = hub.HfApi().model_info(name)
        files = [entry.rfilename for entry in found.siblings or ()]
        weights = "*.safetensors" if any(file.endswith(".safetensors") for file in files) else "*.bin"
        return Path(hub.snapshot_download(name, revision=found.sha, allow_patterns=[*_TEXT, weights]))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        folder = name.rpartition("/")[2]
        raise CheckpointError(
            f"{name}: no such folder here, and the Hub does not give it: {_first_line(error)}. Check the "
            "name; a model behind a licence wants `hf auth login`; without a network, where there is one: "
            f"hf download {name} --local-dir {folder}; then give {folder}"
        ) from None


def push_model(folder: Path, name: str, *, private: bool = True) -> str:
    """Put a folder on the Hub as the model ORG/NAME, made if it is not there; return its address.

    Raises CheckpointError if the Hub refuses it.
    """
    hub = _hub()
    try:
        api = hub.HfApi()
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Export by yuan_train")
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        raise CheckpointError(
            f"--push: {name}: {_first_line(error)}. {folder} is written; log in with `hf auth login`, then "
            f"hf upload {name} {folder}"
        ) from None
    return str(address)


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError("names of the Hub need the package huggingface_hub: pip install it") from None
    return huggingface_hub


def _first_line(error: Exception) -> str:
    if _NO_CONNECTION & {kind.__name__ for kind in type(error).__mro__}:
        return f"{_hub().constants.ENDPOINT} is not reached from here ({type(error).__name__})"
    return str(error).strip().partition("\n")[0].rstrip(". ") or type(error).__name__
