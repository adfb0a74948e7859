"""The bit-exactness matrix: one digest per precision, whatever the pod looks like and however it is loaded.

Each row serves the same prompts in another way and digests every token id and every bit of the logits that
chose it. The first row is the NumPy reference, which knows no batch, cache, page, die or thread: it is
teacher-forced with the tokens of the first deployment and samples from its own logits, so a wrong token
anywhere gives it another digest.

Every deployment is there with 0 and 1 MTP drafts, and with steps whole and in 2 microbatches. `monolithic`
has no microbatches: one die that cuts its steps is `colocated` with one die, which has rows of its own.
"""
