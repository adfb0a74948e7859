"""Recovery of a TE after a failure of some part, stage by stage (xDeepServe 6.2).

- `rollback`: the host's part of stage 3, token recomputation: all dies back to the iteration before
- `rollback_field`: how the host tells the dies, also busy ones; `rollback_watch`: how they hear of it
- `retry`: transfers beside steps, which are made again
"""
