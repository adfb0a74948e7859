"""Die programs, and the memory that each die has.

- `program` waits for a plan, runs it, writes the results; `carried` completes plans made ahead
- `sampler`: from logits to tokens; `drafts`: MTP's passes
- `experts`: the program of an expert die, in steps; `dataflow`: the same as tokens flow
- `die_memory`: what lies in a die's HBM; `shape_memory`: where nothing is computed
- `workspace`: named buffers
- `replicas` of experts: where tokens find them, and the slots that hold them
"""
