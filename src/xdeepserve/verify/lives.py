"""Rows with TEs added, removed or lost while they serve, and with another model on the same pod."""

from __future__ import annotations

from collections.abc import Sequence

from xdeepserve.engine.deploy.deployment import Kind
from xdeepserve.engine.deploy.roles import has_prefill
from xdeepserve.history import TEChange
from xdeepserve.hw.faults import Fault
from xdeepserve.model.config import ModelConfig
from xdeepserve.verify.case import Case, few_tes, prefill_and_decode

MS = 1000.0  # us
ONE_FOR_ANOTHER = (TEChange(1 * MS, "add", "both"), TEChange(4 * MS, "remove", "te"))
BACK_AGAIN = (*ONE_FOR_ANOTHER, TEChange(6 * MS, "add", "both"), TEChange(8 * MS, "drain", "te 1"))
BOTH_SIDES = (
    TEChange(1 * MS, "add", "decode"),
    TEChange(2 * MS, "add", "prefill"),
    TEChange(3 * MS, "remove", "prefill 0"),
    TEChange(6 * MS, "remove", "decode 0"),
)


def _losses(name: Kind, dies: int) -> list[Case]:
    """List the rows with two TEs of a role: a die of one TE fails amid its work, and the other TE goes on."""
    each = min(2, dies)  # of a TE: the first two are prefill's, then decode's
    two: tuple[str, ...] = ("prefill.count=2", f"prefill.dies={each}")
    if has_both := bool(few_tes(name, dies)):
        two = (*two, "decode.count=2", f"decode.dies={each}")
    ways: list[tuple[str, tuple[str, ...], tuple[Fault, ...]]] = [
        ("a prefill TE of two is lost", (), (_lost(0, 300),)),
        ("a prefill TE of two is lost, KV by layer", ("transfer=layer",), (_lost(each, 1000),)),
    ]
    if has_both:
        both = (_lost(each - 1, 700), _lost(4 * each - 1, 12000))
        ways += [
            ("a decode TE of two is lost", (), (_lost(2 * each, 9000),)),
            ("a TE of two is lost on both sides", ("transfer=layer",), both),
        ]
    return [Case(name, variant, (*two, *more), crowded=True, faults=faults) for variant, more, faults in ways]


def _lost(die: int, at_us: float) -> Fault:
    return Fault(at_us, die, "lost")


def _glitches(names: Sequence[Kind], dies: int, config: ModelConfig) -> list[Case]:
    """List the rows with kernels and transfers ending in error codes: all dies of the TE run the step again
    (xDeepServe 6.2)."""
    ahead = ("execution.overlap=true",)
    drafts = ("mtp=2", *ahead) if config.num_nextn_predict_layers else ahead
    called = "2 drafts, planned ahead" if drafts != ahead else "planned ahead"
    ways: list[tuple[str, str, tuple[str, ...]]] = [
        *((name, "glitches", few_tes(name, dies)) for name in names),
        *((name, f"{called}, and glitches", drafts) for name in ("monolithic", "colocated")),
        ("pd", "KV by layer, planned ahead, and glitches", ("transfer=layer", *drafts)),
        ("colocated", "in lockstep, and glitches", (f"dies={min(2, dies)}", "lockstep=true")),
        ("moe-attention", "dataflow, and glitches", ("dataflow=true",)),
        ("moe-attention", "in lockstep, and glitches", ("lockstep=true",)),
    ]
    faults = tuple(
        Fault(at_us, 0, "glitch", code=code)
        for at_us, code in ((900.0, "aicore-exception"), (2100.0, "mte-error"), (5300.0, "link-error"))
    )
    return [Case(*way, crowded=True, faults=faults, rollbacks=1) for way in ways if way[0] in names]


def _failovers(names: Sequence[Kind], dies: int) -> list[Case]:
    """List the rows with failover: a TE that is given up comes back on spare dies or on fewer (xDeepServe
    6.2)."""
    rows: list[tuple[str, str, tuple[str, ...], int]] = [  # with the die that is lost
        ("monolithic", "a spare die takes over", ("recovery.spare_dies=1",), 0),
        ("pd", "prefill makes room for decode", ("prefill.count=2", "prefill.dies=1", "decode.dies=1"), 2),
    ]
    if dies > 1:
        apart = ("attention.domains=1", "attention.dies=2", "experts.routed_dies=2")
        rows += [
            ("colocated", "a die is lost, fewer go on", (f"dies={min(3, dies)}",), 1),
            ("pd", "all TEs start anew", ("prefill.dies=2", "prefill.tp=1", "decode.dies=1"), 2),
            ("moe-attention", "an attention die is lost, fewer go on", apart, 0),
            ("moe-attention", "an expert die is lost, fewer go on", apart, 3),
        ]
    return [
        Case(name, variant, (*more, "recovery.failover=true"), crowded=True, faults=(_lost(die, 900),))
        for name, variant, more, die in rows
        if name in names
    ]


def _bad_pages(names: Sequence[Kind], dies: int) -> list[Case]:
    """List the rows with lost HBM pages: the data on them is restored, and the TE runs the step again."""
    pair = prefill_and_decode(dies)
    ways: list[tuple[str, str, tuple[str, ...]]] = [
        *((name, "", few_tes(name, dies)) for name in names),
        ("colocated", ", in lockstep", (f"dies={min(2, dies)}", "lockstep=true")),
        ("pd", ", KV by layer, planned ahead", (*pair, "transfer=layer", "execution.overlap=true")),
    ]
    lost = {"KV": ("kv/0/latent", "kv/1/k_pe"), "weights": ("weights/layers.0.wo", "weights/norm")}
    return [
        Case(name, f"HBM page of {what}{how}", more, crowded=True, faults=_pages(*pages), rollbacks=1)
        for name, how, more in ways
        if name in names
        for what, pages in lost.items()
    ]


def _pages(first: str, second: str) -> tuple[Fault, ...]:
    return Fault(900.0, 0, "bad-page", page=first), Fault(5300.0, 0, "bad-page", page=second)


def lives(names: Sequence[Kind], dies: int, config: ModelConfig) -> list[Case]:
    """List all rows of the module: TEs replaced while they serve, faults, failovers, and a second model on
    the pod."""
    rows = []
    for name in names:
        if has_prefill(name):
            pair = few_tes(name, dies)
            rows.append(Case(name, "TEs of both roles replaced", pair, crowded=True, life=BOTH_SIDES))
            late = (*pair, "transfer=layer")
            rows.append(Case(name, "TEs replaced, KV by layer", late, crowded=True, life=BOTH_SIDES))
            rows += _losses(name, dies)
        else:
            rows.append(Case(name, "another TE takes over", crowded=True, life=ONE_FOR_ANOTHER))
            rows.append(Case(name, "another, and another", crowded=True, life=BACK_AGAIN))
    rows += _glitches(names, dies, config) + _failovers(names, dies) + _bad_pages(names, dies)
    ahead = ("execution.overlap=true",)
    return [
        *rows,
        Case("monolithic", "another TE, planned ahead", ahead, crowded=True, life=ONE_FOR_ANOTHER),
        Case("colocated", "a second model beside it", crowded=True, beside="monolithic"),
        Case("pd", "a second model beside it", beside="colocated"),
    ]
