"""The serverless platform over many TEs (DeepServe 3, 5 and 6): traffic, who serves it, and what comes out.

- `traces`: requests of public traces, and `made_traffic`, a seeded generator with statistics that can be set
- `step_price`: what a TE's step costs for its counts, from timing-only runs
- `step_te`, `fleet`: TEs at the grain of a step, and requests on their way to them
- `auto_scaler`, `scale_up`, `fleet_scaling`: how many TEs a load needs, what each costs, and bringing them
- `role_ratio`, `fleet_roles`: how many TEs prefill and how many decode, and changing it
- `token_replay`: the same requests, with tokens, through the engine
"""
