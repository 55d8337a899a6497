"""megatron-core on a CPU: five patches of torch stand between its code and gloo. None where a card is.

They are global to the process; only `engine.build` installs them, in the process of a rank. Each has a name,
so that a test can leave it out and see what breaks: one without which nothing breaks is to be deleted.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

import torch

PATCHES = ("current_device", "literal_device", "type_string", "generator", "synchronize")
"""Buffers are made on `torch.cuda.current_device()`; others on the literal device "cuda" (optimizer,
clipping, schedules); optimizers compare `Tensor.type()` with "torch.cuda.FloatTensor"; the seed is set, and
the state of the generator read, on the card; point-to-point messages end with a synchronisation."""

_CPU = torch.device("cpu")
_installed: list[CudaMeansCpu] = []


def install(*, without: Collection[str] = ()) -> bool:
    """Install the patches, once in a process. False where there is a card, and nothing was done."""
    if torch.cuda.is_available():
        return False
    if _installed:
        return True
    # Before the patches: its rules refuse two names for one object.
    importlib.import_module("torch._dynamo")
    cuda: Any = torch.cuda
    if "current_device" not in without:
        cuda.current_device = lambda: _CPU
    if "generator" not in without:
        cuda.manual_seed = torch.random.default_generator.manual_seed
        cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    if "synchronize" not in without:
        cuda.synchronize = lambda *arguments, **options: None
    mode = CudaMeansCpu(without)
    mode.__enter__()
    _installed.append(mode)
    return True


class CudaMeansCpu(torch.overrides.TorchFunctionMode):
    """Takes the device "cuda" as the CPU, and names the types of tensors as if they were on a card."""

    def __init__(self, without: Collection[str]) -> None:
        super().__init__()
        self._devices = "literal_device" not in without
        self._types = "type_string" not in without

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._devices:
            if func is torch.Tensor.cuda:
                return args[0]
            if _is_card(kwargs.get("device")):
                kwargs = {**kwargs, "device": _CPU}
        if self._types and func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _is_card(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"
