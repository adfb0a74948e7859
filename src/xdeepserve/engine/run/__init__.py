"""The three ways in which a TE's dies run their Programs: as tasks, in lockstep, and in time only.

net     memories and ends of exchanges of dies that compute       clock/  the same of runs that only take time
route   which Programs a die's layers become, and the schedule    gang/   all dies of a step at once
"""
