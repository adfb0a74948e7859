"""Lockstep: all dies of a step run together, with the same bytes in the same memories as by tasks.

A pod of 768 dies makes some 300,000 kernel launches and 120 million field writes in one step. Here the host's
Python does not see them one by one: a kernel goes over the memories of many dies, by tables of addresses. The
Programs are those of `step`; a kernel stands for a *span* of their stages.

- `gang`: the dies' meeting, and the spans that they have kernels for; `choice`: which gang a TE's dies are
- `colocated`: each die has attention and a share of the experts; or one die has all, whose threads share
- `met_exchanges`: exchanges alone, of dies whose stages are tasks
- `disaggregated`: experts have dies of their own; and the program of such a die
- `tables`, `dimensions`: where everything lies, by die; the numbers that all dies share
- `timetable`: when all this happens, in virtual time; `drawing`: in traces
- `kernels/`: a layer on packed bytes; rows to the exchange (whose bytes are `comm`'s twins) and back
"""
