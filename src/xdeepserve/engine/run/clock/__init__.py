"""Timing-only runs: the same Programs and the same virtual times, without the arithmetic.

- `net`: what stands for memory, exchanges and sampling
- `timeline`: the time that a die has spent and not yet waited for
- `meeting`: a barrier in virtual time
- `exchange_hub`, `trampoline_hub`, `group_hub`: exchanges as meetings, by the formulas of `comm`
- `away`: which way tokens take to experts on dies of their own
- `flow_hub`, `flow_ends`, `flow_costs`: ways without barriers, their ends, and what these take
- `routing`: who would receive how many tokens, by seed
"""
