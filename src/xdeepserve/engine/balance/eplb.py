"""EPLB: which experts of a layer get replicas, and where they go (xDeepServe 4.5, step 2). Pure functions.

`token_count` [E, T] is how many tokens went to each logical expert of one layer in each time slice. A load is
split evenly over an expert's replicas, its primary among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Counts: TypeAlias = npt.NDArray[np.int64]
Loads: TypeAlias = npt.NDArray[np.float64]
Holdings: TypeAlias = list[list[int]]  # by die, the experts in its redundant slots


def layer_load(token_count: Counts, num_replicas: Counts) -> float:
    """L_l: tokens of the hottest replica of each time slice, summed over the slices."""
    return float((token_count / num_replicas[:, None]).max(axis=0).sum())


def select(token_count: Counts, budget: int, max_replicas: int) -> list[int]:
    """At most `budget` experts to replicate, in the order in which they are chosen; one may come again.

    Candidates are the hottest experts of the slices; of these the one whose further replica lowers L_l most
    (ties: the lowest number). An expert has at most `max_replicas`, its primary included. Ends early when no
    slice has tokens, or none of the hottest may have more.
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
    token_count: Counts, chosen: Sequence[int], primary: Sequence[int], free: Sequence[int]
) -> Holdings:
    """By die, the experts of `chosen` that go to its redundant slots.

    `primary[e]` is the die of expert e's primary, `free[d]` the redundant slots of die d. Replicas go, the
    one with the highest load first, to the least-loaded die with a free slot, but never beside their primary
    or a sibling: two replicas on one die share its time, so the second is a slot lost. If all free slots are
    on such dies, the replica changes places with one that was placed before; if that does not help either, it
    is left out.
    """
    num_replicas = 1 + np.bincount(np.asarray(chosen, np.int64), minlength=len(token_count))
    share = token_count.sum(axis=1) / num_replicas
    load = np.zeros(len(free))
    np.add.at(load, np.asarray(primary), share)
    placed: Holdings = [[] for _ in free]

    def fits(expert: int, die: int) -> bool:
        return primary[expert] != die and expert not in placed[die]

    for expert in sorted(chosen, key=lambda e: (-share[e], e)):
        roomy = [die for die in range(len(free)) if len(placed[die]) < free[die]]
        fitting = [die for die in roomy if fits(expert, die)]
        if fitting:
            die = min(fitting, key=lambda d: (load[d], d))
        else:
            swaps = [
                (
                    max(load[room] + share[other], load[taken] - share[other] + share[expert]),
                    taken,
                    other,
                    room,
                )
                for room in roomy
                for taken in range(len(free))
                for other in placed[taken]
                if fits(expert, taken) and fits(other, room)
            ]
            if not swaps:
                continue
            _, die, other, room = min(swaps)
            placed[die].remove(other)
            placed[room].append(other)
            load[die] -= share[other]
            load[room] += share[other]
        placed[die].append(expert)
        load[die] += share[expert]
    return placed


def die_loads(token_count: Counts, primary: Sequence[int], holdings: Holdings) -> Loads:
    """[D, T]: tokens of each die in each time slice, if its redundant slots hold `holdings`."""
    num_replicas = np.ones(len(token_count), np.int64)
    for held in holdings:
        num_replicas[held] += 1
    split = token_count / num_replicas[:, None]
    loads = np.zeros((len(holdings), token_count.shape[1]))
    np.add.at(loads, np.asarray(primary), split)
    for die, held in enumerate(holdings):
        loads[die] += split[held].sum(axis=0)
    return loads


def hottest_die(token_count: Counts, primary: Sequence[int], holdings: Holdings) -> float:
    """Tokens of the hottest die of each time slice, summed over the slices: what all others wait for."""
    return float(die_loads(token_count, primary, holdings).max(axis=0).sum())
