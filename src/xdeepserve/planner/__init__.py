"""The planner: from a model, a load, a latency bound and a list of hardware to a deployment (MegaScale-Infer
4).

- `moe_shape`: multiplications and bytes of a layer, by Table 2
- `performance`: equations 1 to 8, in ns
- `search`: Algorithm 1, and exhaustive search beside it
- `fit`: times from timing-only runs and the one table of prices, never typed in
- `layouts`: the same question for this project's own deployments on a number of dies
- `sweep`: such an iteration for each combination of settings, batch and context
"""
