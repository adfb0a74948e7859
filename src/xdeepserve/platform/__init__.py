"""The serverless platform over many TEs (DeepServe 3, 5 and 6): traffic, the TEs that serve it, and results.

- `traces`: requests of public traces, and `made_traffic`, a seeded generator with adjustable statistics
- `step_te`, `step_group`, `fleet`: TEs at the grain of a step, by the engine's TE-shell and schedulers on DP
  groups without dies, and requests on their way to them
- `scale_up`, `fleet_scaling`: the cost of a new TE, and growth and shrinking by the engine's AutoScaler
- `role_ratio`, `fleet_roles`: the numbers of prefill and decode TEs, and changes of roles
- `token_replay`: the same requests, with tokens, through the engine
"""
