"""Rows with experts as services: number of servers, placement of experts, batching, and lost servers and
clients."""

from __future__ import annotations

import msgspec

from xdeepserve.engine.deploy.deployment import Kind
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.deploy.teams import num_routed_experts
from xdeepserve.history import TEChange
from xdeepserve.hw.faults import Fault
from xdeepserve.model.config import ModelConfig
from xdeepserve.verify.case import LATE, Case

MS = 1000.0  # us
MANY = 32  # experts: more dies than that take their time
COPIES = "experts.copies=1"
SOON = ("services.heartbeat_ms=0.2", "services.answer_timeout_ms=2")


def services(name: Kind, config: ModelConfig) -> list[Case]:
    """List the rows of a deployment with expert servers that the model's number of experts allows."""
    num_experts = num_routed_experts(config, 1)
    numbers = [count for count in (1, 2, 3, 5, 8) if count <= num_experts]
    rows = [
        Case(name, f"{count} server{'s' if count > 1 else ''}", (f"experts.routed_dies={count}",))
        for count in numbers
    ]
    for clients, words in ((2, "two clients"), (99, "all clients")):
        waits = (f"services.batch_clients={clients}", "services.batch_timeout_us=200")
        rows.append(Case(name, f"servers wait for {words}", waits, crowded=True))
    rows += [
        Case(name, "stragglers, dies wake in order 1", (LATE,), crowded=True, clock_seed=1),
    ]
    if num_experts > 3:
        uneven = f"experts.counts=[1,{num_experts - 3},2]"
        rows += [
            Case(name, "unequal counts", (uneven,), crowded=True),
            Case(name, "unequal counts, each expert twice", (uneven, COPIES), crowded=True),
        ]
    if num_experts > 1:
        rows += _losses(name, config)
    if 1 < num_experts <= MANY:
        more = (f"experts.routed_dies={num_experts + 2}", COPIES)
        rows.append(Case(name, "more servers than experts", more))
    return rows


def _losses(name: Kind, config: ModelConfig) -> list[Case]:
    """List the rows with a lost expert server, whose experts have copies, or a lost client; the TE goes
    on."""
    two = ("experts.routed_dies=2", COPIES, "attention.dies=3", *SOON)
    place = next(te.place for te in fit(resolve(name, two), config) if te.walk.services)
    first = place.expert_dies[0]
    busy = Fault(die=first + 1, kind="lost", operation="expert serve", step=2, event=9)
    ways = [("a server", Fault(900.0, first, "lost")), ("a server with a batch", busy)]
    if config.n_shared_experts:
        ways.append(("a server of the shared expert", Fault(2100.0, first + 2, "lost")))
    rows = [
        Case(name, f"{what} is lost", two, crowded=True, faults=(fault,), servers_lost=1)
        for what, fault in ways
    ]
    back = TEChange(4 * MS, "add server", place.name, 1)
    again = "a server is lost and comes back"
    rows.append(msgspec.structs.replace(rows[1], variant=again, life=(back,), servers_back=1))
    client = Fault(900.0, place.dies[1], "lost")
    rows.append(Case(name, "a client is lost", two, crowded=True, faults=(client,), clients_lost=1))
    more = (*two, "experts.vacancies=1")
    joins, leaves = TEChange(MS, "add server", place.name, 2), TEChange(MS, "remove server", place.name, 0)
    rows.append(Case(name, "a server joins, another leaves", more, crowded=True, life=(joins, leaves)))
    return rows
