"""All dies of a step at once: the same bytes in the same memories, without a task for each kernel.

A pod of 768 dies makes some 300,000 kernel launches and 120 million field writes in one step. Here the host's
Python does not see them one by one: a kernel goes over the memories of many dies, by tables of addresses.

    gang         the dies' meeting, and the order of the stages
    programs     the die programs, which meet there
    tables       where everything lies: addresses by die
    shapes       the numbers that all dies share
    timetable    when all this happens, in virtual time
    kernels      attention: one layer of one microbatch up to A2E's field; exchange: A2E and E2A among the
                 expert dies; experts: the grouped MLP on what arrived
"""
