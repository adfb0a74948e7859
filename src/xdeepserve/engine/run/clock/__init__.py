"""Timing-only runs: the same Programs and the same virtual times, without the arithmetic.

- `wiring` has stand-ins for memory, exchanges and sampling
- `timeline` counts the time that a die has spent and not yet waited for
- `meeting` is a barrier in virtual time
- `exchange_hub`, `trampoline_hub`, `group_hub` make exchanges as meetings, by the formulas of `comm`
- `away` chooses the way of tokens to experts on dies of their own
- `flow_hub`, `flow_ends`, `flow_costs` are ways without barriers: hub, ends and costs
- `routing` draws how many tokens each expert receives, by seed
"""
