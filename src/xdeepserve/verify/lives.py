"""Rows in which TEs come and go, or fail, while they serve, and in which another model serves beside them."""

from __future__ import annotations

from collections.abc import Sequence

from xdeepserve.hw.faults import Fault
from xdeepserve.verify.case import Case, TEChange, prefill_and_decode

MS = 1_000_000
ONE_FOR_ANOTHER = (TEChange(1 * MS, "add", "both"), TEChange(4 * MS, "remove", "te"))
BACK_AGAIN = (*ONE_FOR_ANOTHER, TEChange(6 * MS, "add", "both"), TEChange(8 * MS, "drain", "te 1"))
BOTH_SIDES = (
    TEChange(1 * MS, "add", "decode"),
    TEChange(2 * MS, "add", "prefill"),
    TEChange(3 * MS, "remove", "prefill 0"),
    TEChange(6 * MS, "remove", "decode 0"),
)


def _losses(name: str) -> list[Case]:
    """A die of one TE of two fails in the middle of its work; the other goes on with what it had."""
    prefill = ("prefill.count=2", "prefill.dies=2")
    decode = ("decode.count=2", "decode.dies=2") if name == "pd" else ()
    rows = [
        Case(name, "a prefill TE of two is lost", (*prefill, *decode), crowded=True, faults=(_lost(1, 300),)),
        Case(
            name,
            "a prefill TE of two is lost, KV by layer",
            (*prefill, *decode, "transfer=layer"),
            crowded=True,
            faults=(_lost(2, 1000),),
        ),
    ]
    if name == "pd":
        rows += [
            Case(
                name,
                f"a decode TE of two is lost{end}",
                (*prefill, *decode, *more),
                crowded=True,
                faults=lost,
            )
            for end, more, lost in (
                ("", (), (_lost(5, 9000),)),
                (", and a prefill TE", ("transfer=layer",), (_lost(0, 700), _lost(7, 12000))),
            )
        ]
    return rows


def _lost(die: int, at_us: float) -> Fault:
    return Fault(at_us, die, "lost")


def lives(names: Sequence[str], dies: int) -> list[Case]:
    """Every deployment among others; most of them with one TE for another."""
    rows = []
    for name in names:
        if name in ("pd", "transformerless"):
            pair = prefill_and_decode(dies) if name == "pd" else ()
            rows.append(Case(name, "TEs of both roles replaced", pair, crowded=True, life=BOTH_SIDES))
            late = (*pair, "transfer=layer")
            rows.append(Case(name, "TEs replaced, KV by layer", late, crowded=True, life=BOTH_SIDES))
        else:
            rows.append(Case(name, "another TE takes over", crowded=True, life=ONE_FOR_ANOTHER))
            rows.append(Case(name, "another, and another", crowded=True, life=BACK_AGAIN))
        if name in ("pd", "transformerless"):
            rows += _losses(name)
    ahead = ("execution.overlap=true",)
    return [
        *rows,
        Case("monolithic", "another TE, planned ahead", ahead, crowded=True, life=ONE_FOR_ANOTHER),
        Case("colocated", "a second model beside it", crowded=True, beside="monolithic"),
        Case("pd", "a second model beside it", beside="colocated"),
    ]
