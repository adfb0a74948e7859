"""Golden vectors for other people's implementations of the communication protocols, and of sparse attention.

    xdeepserve golden write DIR     inputs, memory images after each step, outputs
    xdeepserve golden check DIR     compare such a directory, and name the first difference

    cases      the recorded cases: small exchanges of a few ranks
    transfers  the cases of send and receive, and of DistFlow
    choices    the cases of sparse attention, which is no protocol
    harness    runs a case
    recorder   runs ranks in lockstep, so that an image does not depend on timing
    expected   a case's outputs by the NumPy oracles (`comm.oracles`)
    cells      the meaning of each byte of an image
    vectors    the files, and their comparison

See `vectors` for the format.
"""
