"""EPLB: chooses experts of a layer for replication, and the dies for them (xDeepServe 4.5, step 2).

All functions here are pure. `token_count` [E, T] is how many tokens went to each logical expert of one layer
in each time slice. A load is split evenly over an expert's replicas, its primary among them. Dies may have
other work, such as a copy of the shared expert. `base[d]` says how many tokens come to die d for each token
that comes to a routed expert anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Counts: TypeAlias = npt.NDArray[np.int64]
Loads: TypeAlias = npt.NDArray[np.float64]
Holdings: TypeAlias = list[list[int]]  # by die, the experts in its redundant slots


def costs(token_count: Counts, cold: int) -> Counts:
    """Return each expert's cost in tokens, [E, T]: its tokens, but at least `cold`.

    An expert's weights are read for a few tokens as well (max(a_i, K) of MegaScale-Infer 6). With 0, tokens
    alone count.
    """
    return np.maximum(token_count, cold)


class Slots(NamedTuple):
    """Redundant slots of a layer's dies, and what the dies have to do without replicas.

    primary         die of each expert's primary
    free            redundant slots of each die
    base            other work of each die, see above
    max_replicas    of an expert at most, its primary included
    """

    primary: Sequence[int]
    free: Sequence[int]
    base: Sequence[float]
    max_replicas: int


# A policy of the table PLACEMENT: from a layer's token counts [E, T] to the experts in redundant slots.
PlacementPolicy: TypeAlias = Callable[[Counts, Slots], Holdings]


def by_slices(token_count: Counts, slots: Slots) -> Holdings:
    """Replicate the experts whose replicas lower the sum of each slice's hottest expert most (xDeepServe
    4.5)."""
    chosen = select(token_count, sum(slots.free), slots.max_replicas)
    return place(token_count, chosen, slots.primary, slots.free, slots.base)


def by_totals(token_count: Counts, slots: Slots) -> Holdings:
    """Replicate the experts with the most tokens for each replica in the whole interval, as DeepSeek's EPLB
    does."""
    return by_slices(token_count.sum(axis=1, keepdims=True), slots)


def layer_load(token_count: Counts, num_replicas: Counts) -> float:
    """Sum the tokens of the hottest replica over all time slices (L_l)."""
    return float((token_count / num_replicas[:, None]).max(axis=0).sum())


def select(token_count: Counts, budget: int, max_replicas: int) -> list[int]:
    """Choose at most `budget` experts to replicate, in the order of choice; an expert may be chosen again.

    Candidates are the hottest experts of the slices. The choice is the one whose further replica lowers L_l
    most (ties: the lowest number). An expert has at most `max_replicas`, its primary included. The search
    ends early when no slice has tokens, or none of the hottest experts may have more.
    """
    num_replicas = np.ones(len(token_count), np.int64)
    chosen: list[int] = []
    while len(chosen) < budget:
        split = token_count / num_replicas[:, None]
        hottest = {
            int(e) for e, load in zip(split.argmax(axis=0), split.max(axis=0), strict=True) if load > 0
        }
        candidates = sorted(e for e in hottest if num_replicas[e] < max_replicas)
        if not candidates:
            break

        def load_with(expert: int) -> float:
            more = num_replicas.copy()
            more[expert] += 1
            return layer_load(token_count, more)

        best = min(candidates, key=load_with)
        num_replicas[best] += 1
        chosen.append(best)
    return chosen


def place(
    token_count: Counts,
    chosen: Sequence[int],
    primary: Sequence[int],
    free: Sequence[int],
    base: Sequence[float] = (),
) -> Holdings:
    """Place the replicas `chosen` in the dies' redundant slots; return the experts by die.

    `primary[e]` is the die of expert e's primary, `free[d]` the number of redundant slots of die d. The
    replica with the highest load is placed first, on the least-loaded die with a free slot. It is never
    placed beside its primary or a sibling: two replicas on one die share its time, so the second would waste
    a slot. If all free slots are on such dies, the replica changes places with one that was placed before. If
    that does not help either, it is left out.
    """
    num_replicas = 1 + np.bincount(np.asarray(chosen, np.int64), minlength=len(token_count))
    share = token_count.sum(axis=1) / num_replicas
    load = _base(base, len(free)) * float(token_count.sum())
    np.add.at(load, np.asarray(primary), share)
    placed: Holdings = [[] for _ in free]
    has_room, is_on = np.asarray(free) > 0, np.zeros((len(token_count), len(free)), bool)
    is_on[np.arange(len(primary)), np.asarray(primary)] = True

    def put(expert: int, die: int) -> None:
        placed[die].append(expert)
        is_on[expert, die] = True
        has_room[die] = len(placed[die]) < free[die]
        load[die] += share[expert]

    def take_away(expert: int, die: int) -> None:
        placed[die].remove(expert)
        is_on[expert, die], has_room[die] = False, True
        load[die] -= share[expert]

    for expert in sorted(chosen, key=lambda e: (-share[e], e)):
        fitting = has_room & ~is_on[expert]
        if fitting.any():
            die = int(np.where(fitting, load, np.inf).argmin())
        else:
            swaps = [
                (
                    max(load[room] + share[other], load[taken] - share[other] + share[expert]),
                    taken,
                    other,
                    room,
                )
                for room in np.flatnonzero(has_room).tolist()
                for taken in range(len(free))
                for other in placed[taken]
                if not is_on[expert, taken] and not is_on[other, room]
            ]
            if not swaps:
                continue
            _, die, other, room = min(swaps)
            take_away(other, die)
            put(other, room)
        put(expert, die)
    return placed


def _base(base: Sequence[float], num_dies: int) -> Loads:
    return np.array(base) if len(base) else np.zeros(num_dies)


def die_loads(
    token_count: Counts, primary: Sequence[int], holdings: Holdings, base: Sequence[float] = ()
) -> Loads:
    """Return each die's tokens in each time slice, [D, T], if the redundant slots hold `holdings`."""
    num_replicas = np.ones(len(token_count), np.int64)
    for held in holdings:
        num_replicas[held] += 1
    split = token_count / num_replicas[:, None]
    loads = np.outer(_base(base, len(holdings)), token_count.sum(axis=0))
    np.add.at(loads, np.asarray(primary), split)
    for die, held in enumerate(holdings):
        loads[die] += split[held].sum(axis=0)
    return loads


def hottest_die(
    token_count: Counts, primary: Sequence[int], holdings: Holdings, base: Sequence[float] = ()
) -> float:
    """Sum the tokens of the hottest die over all time slices: all other dies wait for it."""
    return float(die_loads(token_count, primary, holdings, base).max(axis=0).sum())
