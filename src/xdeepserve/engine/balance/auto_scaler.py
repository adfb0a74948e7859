"""The AutoScaler decides the number of TEs: a pure function of the previous state, the present look, and
bounds (DeepServe 6).

The paper names the criteria, load and violations of the service level, and leaves the rule open. Here load is
a number for each TE, 1 at full capacity, and the sum over TEs is what counts. The sum stays when TEs come and
go, so each TE's load after a change is known in advance. A TE has three levels of load:

    low <= aim < high    above `high`, TEs are added until load is `aim`; a TE goes if the others then have at
                         most `low`

If the service level is missed, a quarter more TEs are added. They stay for `forget_s`, as long as load does
not fall below `low` / `high` of its value then. Otherwise load would undo what the service level asked for.
So under constant load, or with smaller changes, no change is followed by the opposite change. Requests whose
first token would be late even on an idle TE do not count: more TEs do not help a single request.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import msgspec

from xdeepserve.engine.deploy.scale_bounds import ScaleBounds

PART = 4  # where the service level is missed: one more for each so many that there are


class ScaleLook(NamedTuple):
    """Observation of a fleet at a time, in seconds.

    load     of all TEs that take requests, in sum
    serving  how many these are
    coming   how many are on their way
    missed   share of the requests since the last look that missed their bounds and that an idle TE would
             have served within them; None if none has ended
    waiting  requests at none of these TEs that will need one: while there are some, one TE stays
    """

    at_s: float
    load: float
    serving: int
    coming: int
    missed: float | None = None
    waiting: int = 0


class ScaleState(msgspec.Struct, frozen=True):
    """State of the AutoScaler: the wanted number of TEs, and memory for the next look.

    needed      so many were wanted when the level was missed last, at `missed_s` under `missed_load` in sum
    high_since, missed_since, low_since   since when it has been so; None: it has not
    enough      how many would have done at each look since `low_since`
    """

    wanted: int
    reason: str = ""  # of the last change
    changed_s: float = -math.inf
    needed: int = 0
    missed_s: float = -math.inf
    missed_load: float = 0.0
    high_since: float | None = None
    missed_since: float | None = None
    low_since: float | None = None
    enough: int = 0


# A policy of the table SCALING, from the state before, the present look, and bounds: the state after.
ScalingPolicy: TypeAlias = Callable[[ScaleState, ScaleLook, ScaleBounds], ScaleState]


def next_wanted(before: ScaleState, look: ScaleLook, bounds: ScaleBounds) -> ScaleState:
    """Compute the wanted number of TEs after a look."""
    state = _seen(before, look, bounds)
    there = look.serving + look.coming

    def changed(wanted: int, reason: str) -> ScaleState:
        return msgspec.structs.replace(
            state, wanted=wanted, reason=reason, changed_s=look.at_s,
            high_since=None, missed_since=None, low_since=None,
        )  # fmt: skip

    if there < bounds.least:
        return changed(bounds.least, f"{there} of at least {bounds.least} TEs are there")
    if not there:
        return changed(1, "requests wait, and no TE is there") if look.load else state
    if look.at_s - state.changed_s < bounds.calm_s:
        return state
    each = look.load / there
    if look.coming == 0 and there < bounds.most:  # what comes is not there to be seen yet
        if _is_old(state.high_since, look, bounds.up_s):
            wanted = min(bounds.most, max(there + 1, math.ceil(look.load / bounds.aim)))
            return changed(wanted, f"load of a TE {each:.2f}, above {bounds.high:g}")
        if _is_old(state.missed_since, look, bounds.up_s):
            wanted = min(bounds.most, there + -(-there // PART))
            state = msgspec.structs.replace(state, needed=wanted, missed_s=look.at_s, missed_load=look.load)
            return changed(wanted, f"requests are late, load of a TE {each:.2f}")
    if state.enough < there and _is_old(state.low_since, look, bounds.down_s):
        load = f"load of a TE {look.load / state.enough:.2f}" if state.enough else "no load"
        return changed(state.enough, f"{load} without {there - state.enough}")
    return state


def _seen(before: ScaleState, look: ScaleLook, bounds: ScaleBounds) -> ScaleState:
    """Update the state's memory by a look."""
    there = look.serving + look.coming
    is_high, missed_since = look.load > bounds.high * there, before.missed_since
    is_missed = look.missed is not None and look.missed > 1 - bounds.within
    if look.coming:  # of what is seen now, part is due to there being too few still
        is_high, missed_since = False, None
    elif look.missed is not None:  # who hears nothing keeps what was heard
        missed_since = (look.at_s if missed_since is None else missed_since) if is_missed else None
    needed, missed_load = before.needed, before.missed_load
    if look.at_s - before.missed_s > bounds.forget_s or look.load * bounds.high < missed_load * bounds.low:
        needed, missed_load = 0, 0.0
    enough = max(bounds.least, needed, math.ceil(look.load / bounds.low), min(1, look.waiting))
    low_since: float | None = None
    if enough < there and not is_missed:
        low_since = look.at_s if before.low_since is None else before.low_since
        enough = enough if before.low_since is None else max(enough, before.enough)
    high_since = (look.at_s if before.high_since is None else before.high_since) if is_high else None
    return msgspec.structs.replace(
        before, needed=needed, missed_load=missed_load, high_since=high_since, missed_since=missed_since,
        low_since=low_since, enough=enough,
    )  # fmt: skip


def _is_old(since: float | None, look: ScaleLook, seconds: float) -> bool:
    return since is not None and look.at_s - since >= seconds
