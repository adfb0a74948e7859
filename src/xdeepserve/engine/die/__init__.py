"""Die programs, and the memory that each die has.

- `program` runs a DP group's plans and writes the results; `carried` completes plans made ahead
- `sampler` turns logits into tokens; `drafts` runs MTP's passes
- `experts` is an expert die's program, step by step; `dataflow` and `expert_server` serve tokens as they come
- `die_memory` and `expert_memory` lay out a die's HBM; `shape_memory` does so for timing-only runs
- `workspace` has named buffers; `kv_memory` lays out KV blocks, `stage_buffers` a layer's buffers
- `replicas` maps tokens to replicas of experts, and fills redundant slots
"""
