"""Faults tried by the hundred, and what came of each: the same bits, an error that they permit, or a bug.

- `case`: a pod, its load and its faults, as data; `draw`: one from a seed; `steps`: every single fault
- `live`: run a case; `atlas`: what its faults permit; `judge`: what came of it
- `campaign`: many cases, counted; `shrink`: the least case that still fails
"""
