"""The number of the memory pool's servers: a pure function of the workload (CloudMatrix 4.1, the C of P:D:C).

The paper says that the cache's servers scale with the cached data and its use, and leaves the rule open. Here
a server costs a share of a TE's time, because its memory could serve something else. It saves the time in
which TEs would compute prompts whose KV is cached. The number changes if another is better by a margin, for a
while, and if the change pays until the horizon.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from xdeepserve.platform.patience import Followed, still_waits


class PoolBounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of the number of servers, and of the readiness to change it."""

    least: int = 1
    most: int = 32
    worth: float = 0.01  # of a TE's time, that a server has to save
    margin: float = 0.5  # of a server's worth, that has to be won
    horizon_s: float = 120.0  # for which the workload is taken to stay
    patience_s: float = 10.0  # a number is the better one at every look for so long
    calm_s: float = 30.0  # after a change, before another
    every_s: float = 2.0  # between two looks
    while_s: float = 60.0  # over which the workload is taken

    def wrong(self) -> list[str]:
        """List every contradiction in the bounds."""
        bounds = {"least": (1, 384), "most": (1, 384), "every_s": (1e-6, 1e6), "while_s": (1e-6, 1e6)}
        found = [
            f"pool: {name} must lie in [{low:g}, {high:g}], found {value:g}"
            for name in PoolBounds.__struct_fields__
            for (low, high), value in [(bounds.get(name, (0.0, 1e6)), getattr(self, name))]
            if not low <= value <= high
        ]
        if self.least > self.most:
            found.append(f"pool: least={self.least} is more than most={self.most}")
        return found


class PoolState(Followed, frozen=True):
    """State of the pool's size: the wanted number of servers."""

    servers: int


def next_servers(
    before: PoolState, now_s: float, saved: Sequence[float], change_s: float, bounds: PoolBounds
) -> PoolState:
    """Compute the number of servers after a look. `saved[n - 1]` is what n servers save, in TEs. A server
    needs `change_s` to come, or to give its data away."""

    def value(servers: int) -> float:
        return saved[servers - 1] - bounds.worth * servers

    count = before.servers
    best = max(range(bounds.least, bounds.most + 1), key=lambda n: (value(n), -n))
    gain = value(best) - value(count)
    won, lost = gain * (bounds.horizon_s - change_s), bounds.worth * abs(best - count) * change_s
    if best == count or gain < bounds.margin * bounds.worth or won <= lost:
        return msgspec.structs.replace(before, since=None, better=count)
    waits = still_waits(before, now_s, count, best, bounds.patience_s, bounds.calm_s)
    if waits is not None:
        return waits
    reason = (
        f"{saved[count - 1]:.2f} TEs' time is saved by {count}, {saved[best - 1]:.2f} would be by {best}; "
        f"a server is worth {bounds.worth:g}"
    )
    return PoolState(best, reason=reason, changed_s=now_s, better=best)
