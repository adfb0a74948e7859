"""Three ways to run the Programs of a TE's dies: as tasks, in lockstep, and in virtual time only.

- `net`: memories and ends of exchanges of dies that compute
- `executors`: which Programs a die's layers become, and the schedule
- `clock/`: what stands for these where a run only takes time
- `gang/`: all dies of a step at once
"""
