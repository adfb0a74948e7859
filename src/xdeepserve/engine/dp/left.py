"""Counts of entries left by requests in an engine's books; all are 0 once every request has ended."""

from __future__ import annotations

from typing import NamedTuple


class Left(NamedTuple):
    """Number of entries held by requests in the books of a DP group, a job executor or an engine, by kind."""

    requests: int = 0  # that the engine has taken and that have not ended
    jobs: int = 0
    given: int = 0  # sequences that TE shells have given to a DP group
    transfers: int = 0  # of KV from prefill to decode, as the job executor sees them
    failures: int = 0  # links that a sequence has tried in vain
    places: int = 0  # sequences in the places of a scheduler
    tickets: int = 0
    handovers: int = 0  # blocks that are kept or reserved for a sequence between prefill and decode
    offers: int = 0  # of KV to sequences that arrive
    layers: int = 0  # of running steps, whose ends are told one by one
    completions: int = 0  # transfers of DistFlow that are open at this end, and requests that came early
    claims: int = 0  # on the memories of dies
