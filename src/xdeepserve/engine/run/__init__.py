"""Three ways to run the Programs of a TE's dies: as tasks, in lockstep, and in virtual time only.

- `wiring` has the memories and the ends of exchanges of dies that compute
- `executors` builds the Programs of a die's layers, and chooses the schedule
- `clock/` has their stand-ins for timing-only runs
- `lockstep/` runs all dies of a step at once
"""
