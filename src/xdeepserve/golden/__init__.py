"""Golden vectors for other people's implementations of the communication protocols, and of sparse attention.

    xdeepserve golden write DIR     inputs, memory images after each step, outputs
    xdeepserve golden check DIR     compare such a directory, and name the first difference

    cases      what is recorded: small exchanges of a few ranks
    harness    runs a case
    recorder   runs ranks in lockstep, so that an image does not depend on timing
    expected   what the NumPy oracles (`comm.oracles`) say of a case's outputs
    cells      what a byte of an image means
    choices    the cases of sparse attention, which is no protocol
    vectors    the files, and their comparison

See `vectors` for the format.
"""
