"""Ways in which dies meet: a room for each, with a half of real bytes and a half of virtual time alone.

- `among`: dispatch and combine between all dies with DP groups (XDS 3.2, CM 4.2.1)
- `trampolines`: A2E and E2A with barriers, to experts on dies of their own (XDS 3.3, 5.2)
- `flow`: the same without barriers (XDS 5.3); its clock serves expert services, too
- `services`: slots on expert servers, which clients write and read (EaaS 3)
- `group`: collectives of dies that share projections

M2N over network cards is a way of a wing (`m2n/way.py`). A way plans buffers on all dies and makes the ends
of each (`walk/ends.py`): records of what a die calls.

- `to_experts` is the table of ways to experts on dies of their own
- `meeting` is a barrier in virtual time, `routing` draws where tokens go
- `arithmetic` quantises what crosses
"""
