"""Lockstep: all dies of a step run together, with the same bytes in the same memories as by tasks.

A pod of 768 dies makes some 300,000 kernel launches and 120 million field writes in one step. In lockstep the
host's Python does not handle them one by one: a kernel goes over the memories of many dies, by tables of
addresses. The Programs are those of `step`; a kernel replaces a *span* of their stages.

- `lockstep` is the dies' meeting, with the spans that it has kernels for; `choice` chooses the kind for a TE
- `colocated`: each die has attention and a share of the experts; or one die has all, and threads share it.
  Exchanges are twins of `comm`'s, by pull or by push
- `met_exchanges` makes exchanges alone, of dies whose stages are tasks
- `disaggregated`: experts have dies of their own; it has the program of such a die, too
- `staged` runs attention without lockstep kernels
- `shares` are the dies' rows of a run; `tables` has addresses by die; `dimensions` has the numbers that all
  dies share
- `timetable` leads all dies through the schedules of `walk`, in virtual time, by `expert_prices`; `drawing`
  draws traces
- `kernels/` has a layer on packed bytes, and exchanges whose bytes are those of `comm`'s twins
"""
