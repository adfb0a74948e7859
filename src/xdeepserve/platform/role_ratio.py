"""The numbers of prefill and decode TEs: a pure function of the workload (CloudMatrix 4.1).

The paper says that the ratio follows the workload's statistics, longer prompts more prefill and longer
answers more decode, and leaves the rule open. Here the split of TEs maximises the rate of requests that both
halves can serve. The split changes only if another serves more of the demand, by a margin, for a while. The
change must also pay: requests won until the horizon exceed those lost while TEs change.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from xdeepserve.platform.patience import Followed, still_waits
from xdeepserve.platform.step_te import StepLimits
from xdeepserve.prices.step_price import StepCounts, StepPrice


class RoleBounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of the readiness to change roles."""

    margin: float = 0.1  # of what is served now, that has to be won
    headroom: float = 1.5  # times the rate of requests: what is worth being able to serve
    horizon_s: float = 120.0  # for which the workload is taken to stay
    patience_s: float = 10.0  # a split is the better one at every look for so long
    calm_s: float = 30.0  # after a change, before another
    every_s: float = 2.0  # between two looks
    while_s: float = 30.0  # over which the workload is taken

    def wrong(self) -> list[str]:
        """List every contradiction in the bounds."""
        least = {"headroom": 1.0, "every_s": 1e-6, "while_s": 1e-6}
        return [
            f"roles: {name} must lie in [{least.get(name, 0.0):g}, 1e+06], found {getattr(self, name):g}"
            for name in self.__struct_fields__
            if not least.get(name, 0.0) <= getattr(self, name) <= 1e6
        ]


class Workload(NamedTuple):
    """Statistics of a workload: requests per second, and tokens of prompts and answers.

    Tokens are those of a mean prompt, of a long prompt (19 of 20 are shorter), of the uncached part, and of a
    mean answer.
    """

    rate: float
    prompt: float
    long: float
    computed: float
    output: float


class RoleRates(NamedTuple):
    """Requests per second of a prefill TE and of a decode TE, at most."""

    prefill: float
    decode: float

    def capacity(self, num_prefill: int, num_decode: int) -> float:
        """Return the requests per second of so many prefill and decode TEs."""
        return min(num_prefill * self.prefill, num_decode * self.decode)

    def best_split(self, total: int) -> int:
        """Choose how many of `total` TEs should prefill; at least one prefills, and at least one decodes."""
        return max(range(1, total), key=lambda count: (self.capacity(count, total - count), -count))


class RoleState(Followed, frozen=True):
    """State of the split: the wanted number of prefill TEs."""

    num_prefill: int


def role_rates(
    price: StepPrice, limits: tuple[StepLimits, StepLimits], work: Workload, tpot_ns: float
) -> RoleRates:
    """Compute a TE's rates for a workload. Prefill runs full steps, in which all DP groups wait for the group
    at the end of a long prompt. Decode runs the fullest batch that keeps `tpot_ns` and has KV. `limits` are
    those of prefill and of decode."""
    groups, (first, second) = price.num_groups, limits
    rows = first.num_rows
    step = price(StepCounts(rows, rows * groups, rows * work.long, work.long))
    prefill = rows * groups / step * 1e9 / max(1.0, work.computed)
    context = work.prompt + work.output / 2
    fits = int(second.num_positions // (work.prompt + work.output))
    each = second.rows_each

    def decode_ns(batch: int) -> float:
        return price(StepCounts(each * batch, each * batch * groups, each * batch * context, batch * context))

    low, high = 1, max(1, min(second.num_seqs, fits))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if decode_ns(middle) <= tpot_ns * second.tokens_each else (low, middle - 1)
    decode = low * groups * second.tokens_each / decode_ns(low) * 1e9 / max(1.0, work.output)
    return RoleRates(prefill, decode)


def next_roles(
    before: RoleState, now_s: float, work: Workload, rates: RoleRates, total: int, change_s: float,
    bounds: RoleBounds,
) -> RoleState:  # fmt: skip
    """Compute the split of `total` TEs after a look; a TE takes `change_s` to change its role. Where a role
    has no TE, the change is made at once."""
    count = before.num_prefill
    best, asked = rates.best_split(total), bounds.headroom * work.rate
    now, then = (min(asked, rates.capacity(each, total - each)) for each in (count, best))
    both = min(count, best), min(total - count, total - best)  # while the others change
    lost = (now - min(asked, rates.capacity(*both))) * change_s
    won = (then - now) * (bounds.horizon_s - change_s)
    if best == count or then < now * (1 + bounds.margin) or won <= lost:
        return msgspec.structs.replace(before, since=None, better=count)
    waits = still_waits(before, now_s, count, best, bounds.patience_s, bounds.calm_s)
    if waits is not None and 0 < count < total:
        return waits
    here, there = (rates.capacity(each, total - each) for each in (count, best))
    reason = (
        f"{work.rate:.1f} requests/s of {work.prompt:.0f} + {work.output:.0f} tokens: {here:.1f}/s as it is, "
        f"{there:.1f}/s then; {won:.0f} won, {lost:.0f} lost meanwhile"
    )
    return RoleState(best, reason=reason, changed_s=now_s, better=best)
