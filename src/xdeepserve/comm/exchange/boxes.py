"""The boxes of one rank of an exchange, for both ways, and what combine needs of the dispatch before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from xdeepserve.comm.channel import Inbox, Outbox
from xdeepserve.comm.exchange.layout import Layout
from xdeepserve.comm.exchange.rows import Int64, Received, SentRows


class Direction(NamedTuple):
    """Dispatch or combine at one rank: its name in traces and errors, and where rows go and come from."""

    op: str
    outbox: Outbox
    inbox: Inbox


@dataclass
class Boxes:
    """What the steps of dispatch and combine work on, beside the die."""

    layout: Layout
    expert_rank: Int64  # of each physical expert
    own_experts: Int64
    num_ranks: int
    dispatch: Direction
    combine: Direction
    sent: SentRows  # by the last dispatch
    received: Received | None = None  # by the last dispatch
