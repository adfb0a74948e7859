"""From a model, a load, a latency bound and a list of hardware to a deployment (MegaScale-Infer 4).

- `moe_shape`: what a layer multiplies and reads, by Table 2
- `performance`: equations 1 to 8, in ns
- `search`: Algorithm 1, and exhaustive search beside it
- `fit`: how long things take, by timing-only runs and the one table of prices, never typed in
- `layouts`: the same question for this project's own deployments on so many dies
- `decode_run`: one decode iteration of a timing-only pod, which fits are made from and plans are checked by
"""
