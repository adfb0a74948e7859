"""Rows with experts as services: number of servers, placement of experts, batching, and lost servers and
clients."""

from __future__ import annotations

import msgspec

from xdeepserve.engine.deploy.deployment import Kind
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.deploy.teams import Teams, num_routed_experts
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
    tes = Teams(resolve(name, two), config, is_timing_only=False).tes()
    (served,) = (te for te in tes if te.kind.has_services)
    client = sum(te.total for te in tes[: tes.index(served)])  # the first one, after dies of prefill
    first = client + 3
    busy = Fault(die=first + 1, kind="lost", operation="expert serve", step=2, event=9)
    ways = [("a server", Fault(900.0, first, "lost")), ("a server with a batch", busy)]
    if config.n_shared_experts:
        ways.append(("a server of the shared expert", Fault(2100.0, first + 2, "lost")))
    rows = [
        Case(name, f"{what} is lost", two, crowded=True, faults=(fault,), servers_lost=1)
        for what, fault in ways
    ]
    back = TEChange(4 * MS, "add server", served.name, 1)
    again = "a server is lost and comes back"
    rows.append(msgspec.structs.replace(rows[1], variant=again, life=(back,), servers_back=1))
    gone = (Fault(900.0, client + 1, "lost"),)
    rows.append(Case(name, "a client is lost", two, crowded=True, faults=gone, clients_lost=1))
    more = (*two, "experts.vacancies=1")
    joins, leaves = TEChange(MS, "add server", served.name, 2), TEChange(MS, "remove server", served.name, 0)
    rows.append(Case(name, "a server joins, another leaves", more, crowded=True, life=(joins, leaves)))
    return rows
