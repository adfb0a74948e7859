"""How many TEs there should be: a pure function of what was wanted, what is seen, and bounds (DeepServe 6).

The paper names what decides, load and violations of the service level, and leaves open how. Here load is a
number for each TE, 1 where it has all that it can have, and the sum over TEs is what counts: it stays when
TEs come and go, so what each would have after a change is known before. Three levels of load, of a TE:

    low <= aim < high    above `high` there come as many as bring it to `aim`; one goes if the others have at
                         most `low` then

Where the service level is missed there come some more, and these stay for `forget_s`, as long as load does
not fall below `low` / `high` of what it was then: else load would undo what the service level has asked for.
So under a load that stays, or moves by less than that, no change is followed by one the other way. Requests
whose first token would be late on an idle TE, too, say nothing: more TEs do not help one request.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from xdeepserve.errors import InputError

PART = 4  # where the service level is missed: one more for each so many that there are


class ScaleBounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of the number of TEs, of their load, and of how soon anything may change."""

    least: int = 1
    most: int = 64
    low: float = 0.4
    aim: float = 0.5
    high: float = 0.8
    within: float = 0.9  # of requests that are to keep their bounds
    every_s: float = 1.0  # between two looks
    up_s: float = 2.0  # load is high, or the level missed, at every look for so long before more come
    down_s: float = 60.0  # and as low as it has to be before one goes
    calm_s: float = 10.0  # after a change, before another
    forget_s: float = 600.0  # after it was missed, before it counts no more that it was

    def wrong(self) -> list[str]:
        """Every contradiction."""
        found = []
        if not 1 <= self.least <= self.most <= 4096:
            found.append(f"scale: 1 <= least <= most <= 4096, found {self.least} and {self.most}")
        if not 0 < self.low <= self.aim < self.high <= 10:
            found.append(f"scale: 0 < low <= aim < high, found {self.low:g}, {self.aim:g}, {self.high:g}")
        if not 0 <= self.within <= 1:
            found.append(f"scale: within must lie in [0, 1], found {self.within:g}")
        if not 1e-6 <= self.every_s <= 1e6:
            found.append(f"scale: every_s must lie in [1e-6, 1e6], found {self.every_s:g}")
        for name in ("up_s", "down_s", "calm_s", "forget_s"):
            if not 0 <= getattr(self, name) <= 1e9:
                found.append(f"scale: {name} must be 0 or more, found {getattr(self, name):g}")
        return found

    def check(self) -> None:
        """InputError with every contradiction."""
        if wrong := self.wrong():
            raise InputError("; ".join(wrong))


class ScaleLook(NamedTuple):
    """What is seen at a time, in seconds.

    load     of all TEs that take requests, in sum
    serving  how many these are
    coming   how many are on their way
    missed   share of the requests since the last look that missed their bounds and that an idle TE would
             have served within them; None if none has ended
    """

    at_s: float
    load: float
    serving: int
    coming: int
    missed: float | None = None


class ScaleState(msgspec.Struct, frozen=True):
    """What is wanted, and what has to be remembered for the next look.

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


def next_wanted(before: ScaleState, look: ScaleLook, bounds: ScaleBounds) -> ScaleState:
    """What is wanted after this look."""
    state = _seen(before, look, bounds)
    there = look.serving + look.coming

    def changed(wanted: int, reason: str) -> ScaleState:
        return msgspec.structs.replace(
            state, wanted=wanted, reason=reason, changed_s=look.at_s,
            high_since=None, missed_since=None, low_since=None,
        )  # fmt: skip

    if there < bounds.least:
        return changed(bounds.least, f"{there} of at least {bounds.least} TEs are there")
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
        return changed(
            state.enough, f"load of a TE {look.load / state.enough:.2f} without {there - state.enough}"
        )
    return state


def _seen(before: ScaleState, look: ScaleLook, bounds: ScaleBounds) -> ScaleState:
    """The state with what this look adds to what is remembered."""
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
    enough = max(bounds.least, needed, math.ceil(look.load / bounds.low))
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
