"""Policies as rows: for each kind of decision one table of named pure functions.

The names of a table are the values of a setting; settings, their help, errors and documents read the table.
To add a policy, write a function with the signature of its kind, and a row. A deployment may also name a
function that no table has, as `module:function`; Python has to find the module (PYTHONPATH).

Functions are imported when a deployment chooses them, so that a help text imports none.
"""

from __future__ import annotations

import functools
import pkgutil
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from xdeepserve.errors import meant
from xdeepserve.reading import one_of

OWN = "module:function"
_OWN = r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"

Trait = Literal[
    "asks no TE",  # the route needs nothing but the number of each TE's sequences
    "asks for KV load",  # the route needs the share of KV that each TE has in use or reserved
    "asks for KV positions",  # the route needs the positions of KV that each TE has in use
    "in turn",  # the route sees TEs in the order of their dies, else those with the fewest sequences first
    "reads a heat map",
    "needs a heat map",
    "on arrival",  # requests are dealt out when they come, not at the start of a step
    "books",  # decode reserves KV blocks before the policy is asked
]


class Policy(NamedTuple):
    """A row: the function, as `module:function`, what help says of it, and what its callers must know."""

    function: str
    meaning: str
    traits: tuple[Trait, ...] = ()


class Policies(NamedTuple):
    """Policies of one kind by name, and the question that they answer.

    `signature` is the type of their functions. `own` are the traits of a function that a deployment names as
    `module:function`; None: it may name none.
    """

    question: str
    signature: str
    rows: Mapping[str, Policy]
    own: tuple[Trait, ...] | None = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names that a setting may have; the last one stands for functions that the table lacks."""
        return (*self.rows, *(() if self.own is None else (OWN,)))

    @property
    def meaning(self) -> str:
        """The question and each answer, for help and documents."""
        return "; ".join([self.question, *(f"{name}: {row.meaning}" for name, row in self.rows.items())])

    @property
    def meta(self) -> msgspec.Meta:
        """Constraint on the setting's value, with the names for errors."""
        names = "|".join([*map(re.escape, self.rows), *([] if self.own is None else [_OWN])])
        return msgspec.Meta(pattern=f"^({names})$", extra={"names": self.names})

    def row(self, name: str) -> Policy:
        """Return the row of a name, or one for a function that the table lacks."""
        return self.rows.get(name) or Policy(name, "", self.own or ())

    def has(self, name: str, trait: Trait) -> bool:
        """Whether a policy has a trait."""
        return trait in self.row(name).traits

    def function(self, name: str) -> Any:
        """Import the function of a policy; its type is `signature`."""
        return _resolved(self.row(name).function)

    def wrong(self, name: str) -> str:
        """Say why there is no policy of this name; "" if there is one."""
        if name in self.rows:
            return ""
        if self.own is None or not re.fullmatch(_OWN, name):
            return f"must be {one_of(self.names)}, found '{name}'{meant(name, self.names)}"
        try:
            found = self.function(name)
        except Exception as error:  # a module of a user may raise anything while it is imported
            return f"names no function: {error}"
        return "" if callable(found) else f"names no function, but {found!r}"


_resolved = functools.cache(pkgutil.resolve_name)

_TE, _DP = "xdeepserve.engine.balance.te_policies", "xdeepserve.engine.balance.dp"

ROUTE: Final = Policies(
    "which of several TEs gets a request",
    "engine.balance.te_policies.RoutePolicy",
    {
        "sequences": Policy(f"{_TE}:sequences", "the fewest requests", ("asks no TE",)),
        "round-robin": Policy(f"{_TE}:round_robin", "the next in turn", ("in turn",)),
        "load": Policy(f"{_TE}:load", "the least to prefill"),
        "prefix": Policy(f"{_TE}:prefix", "the longest cached prefix"),
        "cost": Policy(f"{_TE}:cost", "the least waiting and computing, cached prefix counted"),
        "deepserve": Policy(
            f"{_TE}:deepserve",
            "the kind that the heat map names, and of it prefix if load is balanced, else load",
            ("reads a heat map",),
        ),
        "pd-aware": Policy(
            f"{_TE}:pd_aware",
            "the kind that the heat map names, in turn",
            ("in turn", "reads a heat map", "needs a heat map"),
        ),
        "dynamo": Policy(
            f"{_TE}:dynamo",
            "the fewest blocks to prefill and read, as NVIDIA Dynamo counts",
            ("asks for KV positions",),
        ),
        "llm-d": Policy(
            f"{_TE}:llm_d", "the best sum of llm-d's scores for prefix, queue and KV", ("asks for KV load",)
        ),
    },
    own=("reads a heat map", "asks for KV load", "asks for KV positions"),
)
DISPATCH: Final = Policies(
    "which DP group of a TE prefills a request",
    "engine.balance.dp.DispatchPolicy",
    {
        "collaborative": Policy(f"{_DP}:assign_prefill", "one queue; groups' steps become equally long"),
        "two-level": Policy(f"{_DP}:two_level", "the next group in turn, on arrival", ("on arrival",)),
    },
)
DECODE: Final = Policies(
    "which DP group of a decode TE gets a prefilled request",
    "engine.balance.dp.DecodePolicy",
    {
        "kv": Policy(f"{_DP}:pick_decode", "the lowest use of KV blocks among those with room"),
        "next-open": Policy(f"{_DP}:next_open", "the next in turn among those with room"),
        "round-robin": Policy(f"{_DP}:next_of_all", "the next in turn among all"),
    },
)
ADMISSION: Final = Policies(
    "who has room for a request before it is prefilled",
    "engine.job.admission.AdmissionPolicy",
    {
        "prefill": Policy("xdeepserve.engine.job.admission:prefill_first", "the prefill TE"),
        "decode": Policy(
            "xdeepserve.engine.job.admission:decode_first",
            "a decode TE, where its KV is allocated first",
            ("books",),
        ),
    },
    own=None,
)
ORDER: Final = Policies(
    "which waiting request is admitted first",
    "engine.dp.sequence.OrderPolicy",
    {
        "arrival": Policy("xdeepserve.engine.dp.sequence:by_arrival", "by priority, then by arrival"),
        "shortest": Policy(
            "xdeepserve.engine.dp.sequence:shortest_first", "by priority, then the shortest prompt"
        ),
    },
)
VICTIM: Final = Policies(
    "which running sequence gives up its KV blocks when they run out",
    "engine.dp.preemption.VictimPolicy",
    {
        "last": Policy("xdeepserve.engine.dp.preemption:last", "the last in order"),
        "least-computed": Policy(
            "xdeepserve.engine.dp.preemption:least_computed", "the one with the fewest computed positions"
        ),
    },
)
EVICTION: Final = Policies(
    "which cached KV block goes first, from HBM and from host DRAM",
    "engine.dp.prefix_index.EvictionPolicy",
    {
        "lru": Policy("xdeepserve.engine.dp.prefix_index:lru", "the least recently used"),
        "lfu": Policy("xdeepserve.engine.dp.prefix_index:lfu", "the one that the fewest requests have found"),
    },
)
PLACEMENT: Final = Policies(
    "which replicas of experts a layer has, and on which dies (EPLB)",
    "engine.balance.eplb.PlacementPolicy",
    {
        "xdeepserve": Policy(
            "xdeepserve.engine.balance.eplb:by_slices", "by the hottest experts of each time slice"
        ),
        "deepseek": Policy(
            "xdeepserve.engine.balance.eplb:by_totals", "by the experts' totals over the whole interval"
        ),
    },
)

SCALING: Final = Policies(
    "how the wanted number of TEs follows load and missed service levels",
    "engine.balance.auto_scaler.ScalingPolicy",
    {"load": Policy("xdeepserve.engine.balance.auto_scaler:next_wanted", "three levels of load")},
)

BY_SETTING: Final[Mapping[str, Policies]] = {
    "scheduler.route": ROUTE,
    "scheduler.dispatch": DISPATCH,
    "scheduler.decode": DECODE,
    "scheduler.admission": ADMISSION,
    "scheduler.order": ORDER,
    "scheduler.victim": VICTIM,
    "cache.eviction": EVICTION,
    "experts.placement": PLACEMENT,
}

Scaling: TypeAlias = Annotated[str, SCALING.meta]
Route: TypeAlias = Annotated[str, ROUTE.meta]
Dispatch: TypeAlias = Annotated[str, DISPATCH.meta]
Decode: TypeAlias = Annotated[str, DECODE.meta]
Admission: TypeAlias = Annotated[str, ADMISSION.meta]
Order: TypeAlias = Annotated[str, ORDER.meta]
Victim: TypeAlias = Annotated[str, VICTIM.meta]
Eviction: TypeAlias = Annotated[str, EVICTION.meta]
Placement: TypeAlias = Annotated[str, PLACEMENT.meta]
