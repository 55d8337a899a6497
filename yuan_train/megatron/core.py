"""What the engine uses of megatron-core, in one place; typed as Any, because it may not be installed.

Importing this module imports megatron-core, which takes seconds and warns of much that it does not find.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import warnings
from typing import Any


def _find(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"megatron.core{module}"), name)


def _version() -> str:
    return importlib.metadata.version("megatron-core")


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

VERSION = _version()
# It logs each optimizer and each module that it does not know by name.
logging.getLogger("megatron").setLevel(logging.ERROR)
