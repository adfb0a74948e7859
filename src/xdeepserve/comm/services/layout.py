"""Memory shared by clients and expert servers: slots on servers, and the clients' own regions (EaaS 3.2).

With C clients, N servers and S slots for each pair, one for each microbatch that is under way, on a server:

    metadata   card                 what it is, and which generation: read by clients when they connect (4.4)
    metadata   bell | slots [C][S]  64 bytes each
    managed    requests [C][S]      token rows, written by the client
    managed    answers  [C][S]      a row for each of them, read by the client

and on a client:

    metadata   mask [N]             a byte for each server: whether to ask it (`Presence`)
    metadata   seats [N]            8 bytes each: where it is, and how many have been there, it included
    managed    outbox [S]           token rows, grouped by server
    managed    words [S][N]         states and headers on their way
    app        returned [S]         headers and answers, as they come
    app        cards [N]            the same

A slot (little endian):   state u8 | 31 spare | header
    header                generation u32 | attempt u32 | event ID u64 | layer u32 | batch size u32 | 8 spare
A bell:                   asked u64 | answered u64 | 48 spare
A card:                   generation u32 | hidden u32 | request row u32 | answer row u32 | rows u32 | 12 spare
A seat:                   die u32 | epoch u32

Only the monitor writes seats and, behind them, the mask. The epoch of a seat counts the servers that have
registered for it. A client's knowledge of a server, and its requests, belong to one epoch.

The payload of a request is the rows of dispatch (`exchange.layout`): expert, token, slot and scale with each
token copy. Router scores stay with the client: a server returns a row for each (token, expert), and the
client weighs and sums them in the order of the token's experts, so that no bit depends on which server had
which expert. The paper's servers return sums over the experts that they have, which do depend on that.

Why one slot for each microbatch is enough: a client writes to a slot only after reading its answer, or when
the server has registered anew (`rules`). Requests resent after a failure go to slots whose answers have been
read in the same exchange.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import msgspec

from xdeepserve.comm.checks import check_count
from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.comm.wire import padded
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.memory import MemoryPlan

SLOT_NBYTES = 64
HEADER_AT = 32  # within a slot
HEADER = struct.Struct("<IIQII8x")
BELL = struct.Struct("<QQ48x")
CARD = struct.Struct("<IIIII12x")
SEAT = struct.Struct("<II")


class Presence(enum.IntEnum):
    """Values of a byte of the mask."""

    THERE = 0
    LOST = 1  # the monitor has not heard of it for too long
    LEAVING = 2  # it answers what it has been asked, and nobody asks it more
    ABSENT = 3  # nobody is at this seat


class SlotHeader(NamedTuple):
    """Header of a request in a slot, repeated in its answer."""

    generation: int
    attempt: int
    event_id: int
    layer: int  # among those with experts
    batch_size: int  # rows; 0: the client has nothing for this server

    def pack(self) -> bytes:
        return HEADER.pack(*self)


class Card(NamedTuple):
    """Identity of a server for connecting clients."""

    generation: int
    hidden: int
    request_row: int
    answer_row: int
    rows: int


class ServiceLayout(msgspec.Struct, frozen=True):
    """Layout of expert services: clients and servers with their dies, and all sizes in bytes.

    Both sides must use equal layouts.

    `servers.dies` are the dies of the servers at first, `servers.expert_rank[e]` is the server of physical
    expert e. `num_slots` is the number of slots of each client on each server, `max_tokens` the most tokens
    of a request. With `announces`, clients also tell servers when they have nothing for them. The servers
    have slots for `num_tes` task executors (TEs) with as many clients each; `clients` are those of one.
    """

    clients: tuple[int, ...]
    servers: Group
    max_tokens: int
    top_k: int
    hidden: int
    quantize: bool = True
    num_slots: int = 2
    name: str = "services"
    int8_answers: bool = False  # of layouts that quantise
    announces: bool = False
    num_tes: int = 1

    def __post_init__(self) -> None:
        check_count("service layout", "num_slots", self.num_slots)
        dies = self.clients + self.servers.dies
        if not self.clients or len(set(dies)) != len(dies):
            raise DeploymentError(
                f"clients and expert servers need different dies, one or more each, not {list(self.clients)} "
                f"and {list(self.servers.dies)}"
            )
        if not self.servers.expert_rank:
            raise DeploymentError("expert servers need one or more experts")

    @property
    def rows(self) -> Layout:
        """Layout of the rows in requests and answers: those of dispatch and combine. It checks the other
        sizes."""
        most = self.servers.max_experts_per_rank
        return Layout(
            len(self.clients),
            self.max_tokens,
            self.top_k,
            self.hidden,
            most,
            self.quantize,
            self.name,
            self.int8_answers,
        )

    @property
    def rows_per_slot(self) -> int:
        """Largest number of rows in a request: a token has at most one copy for each expert of a server."""
        return self.rows.rows_per_block

    @property
    def max_rows(self) -> int:
        """Largest number of rows from a client in an exchange, to all servers."""
        return self.max_tokens * self.top_k

    def number(self, client: int, slot: int) -> int:
        """Return the number of a client's slot among all slots of a server."""
        return client * self.num_slots + slot

    @property
    def num_clients(self) -> int:
        """Number of clients of all TEs."""
        return len(self.clients) * self.num_tes

    @property
    def num_all_slots(self) -> int:
        return self.num_clients * self.num_slots

    def state_at(self, number: int) -> int:
        """Return the offset of a slot's state in the region of slots, behind the bell."""
        return BELL.size + number * SLOT_NBYTES

    def header_at(self, number: int) -> int:
        return self.state_at(number) + HEADER_AT

    def request_at(self, number: int) -> int:
        """Return the offset of a slot's token rows in the region of requests."""
        return number * self.rows_per_slot * self.rows.dispatch_row

    def answer_at(self, number: int) -> int:
        """Return the offset of a slot's answers in their region."""
        return number * self.rows_per_slot * self.rows.combine_row

    def card(self, generation: int) -> Card:
        """Make the card for a server of this layout."""
        rows = self.rows
        return Card(generation, self.hidden, rows.dispatch_row, rows.combine_row, self.rows_per_slot)

    def region(self, part: str) -> str:
        """Return the name of a region: card, slots, requests, answers, mask, seats, cards; or, with the
        slot's number, outbox, words, returned."""
        return f"{self.name}.{part}"

    def plan_server(self, memory: MemoryPlan) -> None:
        """Reserve a server's regions. Raises OutOfMemoryError if the metadata area is too small."""
        memory.metadata.alloc(self.region("card"), CARD.size)
        memory.metadata.alloc(self.region("slots"), self.state_at(self.num_all_slots))
        memory.managed.alloc(self.region("requests"), self.request_at(self.num_all_slots))
        memory.managed.alloc(self.region("answers"), self.answer_at(self.num_all_slots))

    def plan_client(self, memory: MemoryPlan) -> None:
        """Reserve a client's regions for all its microbatches."""
        rows, num_servers = self.rows, self.servers.num_ranks
        memory.metadata.alloc(self.region("mask"), padded(num_servers))
        memory.metadata.alloc(self.region("seats"), num_servers * SEAT.size)
        memory.app.alloc(self.region("cards"), num_servers * CARD.size)
        for slot in range(self.num_slots):
            memory.managed.alloc(self.region(f"outbox.{slot}"), self.max_rows * rows.dispatch_row)
            memory.managed.alloc(self.region(f"words.{slot}"), num_servers * SLOT_NBYTES)
            returned = num_servers * HEADER.size + self.max_rows * rows.combine_row
            memory.app.alloc(self.region(f"returned.{slot}"), returned)
