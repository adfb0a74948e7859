"""Chaos: faults tried by the hundred, with a verdict on each: equal bits, a permitted error, or a bug.

- `fault_schedule`: a pod, its load and its faults, as data
- `draw`: a schedule from a seed; `single_faults`: every schedule with a single fault
- `aftermath`: run a schedule; `permitted`: the errors that its faults permit; `judge`: the verdict
- `campaign`: many schedules, counted, and the smallest schedule that still fails
"""
