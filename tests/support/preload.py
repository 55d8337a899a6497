"""What the server that ranks are forked from has in memory, so that no rank imports or makes it anew.

Of a small run's first seconds half went into imports of TensorBoard and into pydantic's validators.
"""

import gc
import importlib
import importlib.util

from yuan_train.config.cluster import Cluster
from yuan_train.config.load import adapter
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import Plan
from yuan_train.config.rl import RLConfig
from yuan_train.config.rl_plan import RlPlan
from yuan_train.config.run import RunConfig

NAMES = (
    *("tests.support.ranks", "tests.support.rl", "yuan_train.cli.main", "pytest"),
    *("yuan_train.models.architectures.qwen", "yuan_train.models.architectures.yuan"),
    *("torch._dynamo", "torch.distributed.checkpoint._fsspec_filesystem", "torch.utils.tensorboard"),
)
"""torch's optimizers import torch._dynamo, and every log of a run TensorBoard."""
for name in NAMES:
    if name != "torch.utils.tensorboard" or importlib.util.find_spec("tensorboard"):
        importlib.import_module(name)
for kind in (Cluster, ModelConfig, Plan, RLConfig, RlPlan, RunConfig):
    adapter(kind)
# A rank that collects garbage would else look through all of it, and copy every page on the way.
gc.collect()
gc.freeze()
