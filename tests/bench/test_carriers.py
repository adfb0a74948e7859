"""URMA beside MTE as the carrier of A2E and E2A: what xDeepServe 3.3 says of them holds here."""

from xdeepserve.bench.papers.carriers import rows, simulate
from xdeepserve.hw.spec import Spec


def test_urma_starts_later_and_leaves_mte2_alone() -> None:
    mte, urma, spec = simulate("mte"), simulate("urma"), Spec()
    starts = 2 * (spec.startup_ns("urma") + spec.pieces_ns(18, spec.num_cores("aiv")))
    assert mte.a2e < urma.a2e < mte.a2e + starts
    assert urma.e2a < mte.e2a + starts
    # What is left is to load the own tokens and answers; all that is pulled is the DMA engine's.
    assert urma.attention_mte2 < 0.6 * mte.attention_mte2
    assert urma.trampoline_mte2 < 0.2 * mte.trampoline_mte2
    assert {row.name for row in rows()} >= {"carrier/mte/a2e", "carrier/urma/attention_mte2"}
