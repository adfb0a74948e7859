"""All dies of a step at once: the same bytes in the same memories, without a task for each kernel.

A pod of 768 dies makes some 300,000 kernel launches and 120 million field writes in one step. Here the host's
Python does not see them one by one: a kernel goes over the memories of many dies, by tables of addresses.

    shapes       the numbers that all dies share
    tables       where everything lies: addresses by die
    attention    attention dies: one layer of one microbatch, up to A2E's field
    exchange     trampolines and expert dies: A2E, E2A
    experts      expert dies: the grouped MLP on what arrived
    timetable    when all this happens, in virtual time
    gang         the dies' meeting, and the order of the stages
"""
