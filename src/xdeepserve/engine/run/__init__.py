"""The three ways in which a TE's dies run their Programs: as tasks, in lockstep, and in time only.

- `net`: memories and ends of exchanges of dies that compute
- `executors`: which Programs a die's layers become, and the schedule
- `clock/`: what stands for these where a run only takes time
- `gang/`: all dies of a step at once
"""
