"""The search for how many TEs a load needs, in few replays, most of which end early."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from xdeepserve.platform.cluster import MAX_TES, Cluster
from xdeepserve.platform.service_report import ServiceReport, StoppedReplay

FAR, FAR_STEP = 0.05, 4  # with a lesser share within bounds, four times as many TEs are tried next
FAR_BY_THEN = 0.5  # that share, of the requests that had arrived when a replay was stopped
PLATEAU = 2  # such steps without a gain, in a row: more TEs do not help
GAIN = 0.99  # of the mean time that requests wait: less is a gain

# Serves the requests on a cluster, or stops when fewer than a share of them can keep their bounds.
Try = Callable[[Cluster, float], ServiceReport | StoppedReplay]


def least_count(cluster: Cluster, tried: Try, enough: float) -> Cluster:
    """Find the cluster with the fewest TEs, of its single kind, which serves `enough` of the requests within
    their bounds. Where no number does, find the fewest TEs that serve requests as well as any number.

    The number is doubled, or quadrupled while few requests keep their bounds, then bisected. Under a load
    far above what TEs can serve, more TEs may keep no more requests within bounds. But requests wait for less
    time then, so the search for a bound ends only where neither improves, twice in a row, or where a TE gets
    no request.

    A replay stops when its number is certainly too small. That is no measure of a gain, so where more TEs do
    not seem to help, the search begins again with whole replays.
    """

    def sized(count: int) -> Cluster:
        return msgspec.structs.replace(cluster, te=(msgspec.structs.replace(cluster.te[0], count=count),))

    known, reports, stopped = (
        dict[int, ServiceReport](),
        dict[int, ServiceReport](),
        dict[int, StoppedReplay](),
    )
    count, num_idle, before, sought = 1, 0, None, enough
    while True:
        found = known.get(count) or tried(sized(count), sought)
        more = count * (FAR_STEP if _is_far(found) else 2)
        if isinstance(found, StoppedReplay):
            last = next(reversed(stopped.values()), None)
            stopped[count] = found
            is_doubtful = more > MAX_TES or (last is not None and not _has_ended_more(found, last))
        else:
            reports[count] = known[count] = found
            num_idle = num_idle + 1 if before is not None and not _is_better(found, before) else 0
            has_idle_te = not all(te.num_requests for te in found.tes)
            if found.within >= enough:
                break
            is_doubtful = num_idle == PLATEAU or more > MAX_TES or has_idle_te
            # A TE that is passed over shows that more do not help, unless requests are fewer than TEs.
            if is_doubtful and (not stopped or (has_idle_te and count <= found.num_requests)):
                break
            before = found
        count = more
        if is_doubtful:
            count, num_idle, before, sought = 1, 0, None, 0.0
            reports.clear()
            stopped.clear()
    best = max(reports.values(), key=lambda each: (each.within, -each.ttft_ms["mean"]))
    sought = min(enough, best.within)

    def is_good(found: ServiceReport | StoppedReplay) -> bool:
        if isinstance(found, StoppedReplay):
            return False
        return found.within >= enough if best.within >= enough else not _is_better(best, found)

    high = min(count for count, found in reports.items() if is_good(found))
    too_few = [count for count, found in stopped.items() if found.within < sought]
    low = max((count for count in (*reports, *too_few) if count < high), default=0)
    # A TE is not used where others serve a request as well. So as many as are used serve as well as all, and
    # the last one was wanted: both are tried before halves.
    used = sum(te.num_requests > 0 for te in reports[high].tes)
    guesses = [used - 1, used] if best.within < enough else []
    while high - low > 1:
        middle = guesses.pop() if guesses else (low + high) // 2
        if low < middle < high:
            low, high = (
                (low, middle)
                if is_good(known.get(middle) or tried(sized(middle), sought))
                else (middle, high)
            )
    return sized(high)


def _is_far(found: ServiceReport | StoppedReplay) -> bool:
    """Whether so few requests keep their bounds that far more TEs are needed."""
    if isinstance(found, StoppedReplay):
        return found.num_arrived - found.num_missed < FAR_BY_THEN * found.num_arrived
    return found.within < FAR


def _has_ended_more(found: StoppedReplay, before: StoppedReplay) -> bool:
    """Whether a replay on more TEs went on for longer, or more of the requests had ended when it was
    stopped."""
    if GAIN * found.num_arrived > before.num_arrived:
        return True
    return GAIN * found.num_ended * before.num_arrived > before.num_ended * found.num_arrived


def _is_better(found: ServiceReport, before: ServiceReport) -> bool:
    """Whether more requests keep their bounds, or requests wait for less time on average."""
    waits = [(each.ttft_ms["mean"], each.tpot_ms.get("mean", 0.0)) for each in (found, before)]
    return found.within > before.within or any(now < GAIN * then for now, then in zip(*waits, strict=True))
