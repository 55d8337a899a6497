"""What the engine uses of megatron-core, in one place; typed as Any, because it may not be installed.

Importing this module imports megatron-core, which takes seconds and warns of much that it does not find.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import warnings
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


def _find(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"megatron.core{module}"), name)


# It warns of its own defaults, and of what only matters on cards.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    importlib.import_module("megatron.core")
    parallel_state: Any = importlib.import_module("megatron.core.parallel_state")
    seed_all: Any = _find(".tensor_parallel", "model_parallel_cuda_manual_seed")
    ColumnParallelLinear: Any = _find(".tensor_parallel", "ColumnParallelLinear")
    RowParallelLinear: Any = _find(".tensor_parallel", "RowParallelLinear")
    mark_tensor_parallel: Any = _find(".tensor_parallel.layers", "set_tensor_model_parallel_attributes")
    DistributedDataParallel: Any = _find(".distributed", "DistributedDataParallel")
    DistributedDataParallelConfig: Any = _find(".distributed", "DistributedDataParallelConfig")
    finalize_model_grads: Any = _find(".distributed", "finalize_model_grads")
    GPTModel: Any = _find(".models.gpt", "GPTModel")
    OptimizerConfig: Any = _find(".optimizer", "OptimizerConfig")
    get_megatron_optimizer: Any = _find(".optimizer", "get_megatron_optimizer")
    clip_grads: Any = _find(".optimizer.clip_grads", "clip_grad_by_total_norm_fp32")
    get_forward_backward_func: Any = _find(".pipeline_parallel", "get_forward_backward_func")
    TransformerConfig: Any = _find(".transformer", "TransformerConfig")
    MLP: Any = _find(".transformer.mlp", "MLP")
    MLPSubmodules: Any = _find(".transformer.mlp", "MLPSubmodules")
    Float16Module: Any = _find(".transformer.module", "Float16Module")
    MegatronModule: Any = _find(".transformer.module", "MegatronModule")
    ModuleSpec: Any = _find(".transformer.spec_utils", "ModuleSpec")
    TransformerBlockSubmodules: Any = _find(".transformer.transformer_block", "TransformerBlockSubmodules")
    TransformerLayer: Any = _find(".transformer.transformer_layer", "TransformerLayer")
    TransformerLayerSubmodules: Any = _find(".transformer.transformer_layer", "TransformerLayerSubmodules")
    layer_offset: Any = _find(".transformer.transformer_layer", "get_transformer_layer_offset")

VERSION = importlib.metadata.version("megatron-core")
# It logs each optimizer and each module that it does not know by name.
logging.getLogger("megatron").setLevel(logging.ERROR)
