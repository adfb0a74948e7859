"""Balancing of requests over TEs and DP groups, and of experts over dies (xDeepServe 4.3, 4.5).

- `dp` and `te_policies` choose DP groups and TEs for requests; `heat_map` and `prompt_tree` inform them
- `auto_scaler` decides how many TEs there are, by `te_load` and `service_level`; `te_scaler` acts on it
- `eplb` chooses replicas of experts; `trigger` decides when, and `reconfigure` carries the change out
- `storage` reads the experts' weights
"""
