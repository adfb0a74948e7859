"""Run the bit-exactness matrix: in one precision, every way to serve the same prompts must give the same
digest.

Each row of the matrix serves the prompts in another way: another deployment, another load, or faults
meanwhile. Its digest is taken over every token id and every bit of the logits that chose it. The first row is
the NumPy reference, which has no batch, cache, page, die or thread. The reference is teacher-forced with the
tokens of the first case and samples from its own logits, so one wrong token changes its digest.

Every deployment has rows with 0 and 1 MTP drafts, and with steps whole and in 2 microbatches. `monolithic`
has no microbatches: one die that splits its steps is `colocated` with one die, which has rows of its own.
"""
