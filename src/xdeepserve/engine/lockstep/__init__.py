"""All dies of a step at once: the same bytes in the same memories, without a task for each kernel.

A pod of 768 dies makes some 300,000 kernel launches and 120 million field writes in one step. Here the host's
Python does not see them one by one: a kernel goes over the memories of many dies, by tables of addresses.

    gang            the dies' meeting
    colocated       a run where each die has attention and a share of the experts: the order of its stages
    disaggregated   the same where experts have dies of their own
    programs        the die programs, which meet there
    tables          where everything lies: addresses by die
    shapes          the numbers that all dies share
    timetable       when all this happens, in virtual time
    kernels         attention: one layer of one microbatch up to the gate; experts: the grouped MLP on what
                    arrived; colocated_stages, disaggregated_stages: what attention's dies send and get back

What crosses dies is written by the protocols' twins (`comm/exchange/twin.py`, `comm/trampoline/twin.py`).
"""
