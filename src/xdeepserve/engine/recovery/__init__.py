"""Recovery of a TE after a failure of some part, stage by stage (xDeepServe 6.2).

- `rollback` is the host's part of stage 3, token recomputation: all dies go back to the iteration before
- `rollback_field` is how the host tells the dies, even busy ones; `rollback_watch` is how dies hear of it
- `retry` repeats transfers beside steps
"""
