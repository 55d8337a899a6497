"""How each module's parameters are sharded over a tensor-parallel group, by module name. Data only.

column      weight [out, in] by rows: each rank computes a part of the output
row         weight [out, in] by columns: each rank reads a part of the input, and the outputs are all-reduced
filter      the C = H/2 channels between both convolutions: conv1.weight [C, H, 2] and conv1.bias [C] by
            dim 0, conv2.weight [H, C, 2] by dim 1; conv2.bias is replicated, and added once, after the
            all-reduce
vocabulary  weight [V, H] by rows
whole       replicated on every rank

The module of each parameter matches exactly one pattern (`fnmatch`; `*` is the number of a layer).
"""

SHARDING = {
    "embedding": "vocabulary",
    "layers.*.attention_norm": "whole",
    "layers.*.filter.conv1": "filter",
    "layers.*.filter.conv2": "filter",
    "layers.*.filter.norm": "whole",
    "layers.*.attention.value": "column",
    "layers.*.attention.query_key": "column",
    "layers.*.attention.out": "row",
    "layers.*.feed_forward_norm": "whole",
    "layers.*.feed_forward.up": "column",
    "layers.*.feed_forward.down": "row",
    "final_norm": "whole",
    "head": "vocabulary",
}

ROW_BLOCKS = {"layers.*.feed_forward.up": 2}
"""Number of matrices stacked in a column-sharded weight; each of them is sharded by itself.

`up` stacks z0 and z1, and a rank needs the same rows of both. (`query_key` is interleaved per head instead,
so that contiguous rows hold whole heads.)
"""
