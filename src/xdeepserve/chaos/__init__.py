"""Faults tried by the hundred, and what came of each: the same bits, an error that they permit, or a bug.

- `fault_schedule`: a pod, its load and its faults, as data
- `draw`: one from a seed; `single_faults`: every one with a single fault
- `aftermath`: run a schedule; `permitted`: what its faults permit; `judge`: the verdict
- `campaign`: many schedules, counted, and the least that still fails
"""
