"""Rows with experts as services: number of servers, placement of experts, batching, and lost servers and
clients."""

from __future__ import annotations

import msgspec

from xdeepserve.engine.deploy.teams import num_routed_experts
from xdeepserve.history import TEChange
from xdeepserve.hw.faults import Fault
from xdeepserve.model.config import ModelConfig
from xdeepserve.verify.case import LATE, Case

MS = 1000.0  # us
MANY = 32  # experts: more dies than that take their time
COPIES = "experts.copies=1"
SOON = ("services.heartbeat_ms=0.2", "services.answer_timeout_ms=2")


def services(config: ModelConfig) -> list[Case]:
    """List the rows of the deployment `eaas` that the model's number of experts allows."""
    num_experts = num_routed_experts(config, 1)
    numbers = [count for count in (1, 2, 3, 5, 8) if count <= num_experts]
    rows = [
        Case("eaas", f"{count} server{'s' if count > 1 else ''}", (f"experts.routed_dies={count}",))
        for count in numbers
    ]
    for clients, words in ((2, "two clients"), (99, "all clients")):
        waits = (f"services.batch_clients={clients}", "services.batch_timeout_us=200")
        rows.append(Case("eaas", f"servers wait for {words}", waits, crowded=True))
    rows += [
        Case("eaas", "stragglers, dies wake in order 1", (LATE,), crowded=True, clock_seed=1),
    ]
    if num_experts > 3:
        uneven = f"experts.counts=[1,{num_experts - 3},2]"
        rows += [
            Case("eaas", "unequal counts", (uneven,), crowded=True),
            Case("eaas", "unequal counts, each expert twice", (uneven, COPIES), crowded=True),
        ]
    if num_experts > 1:
        rows += _losses(config)
    if 1 < num_experts <= MANY:
        more = (f"experts.routed_dies={num_experts + 2}", COPIES)
        rows.append(Case("eaas", "more servers than experts", more))
    return rows


def _losses(config: ModelConfig) -> list[Case]:
    """List the rows with a lost expert server, whose experts have copies, or a lost client; the TE goes
    on."""
    first = 3  # server, after the clients
    two = ("experts.routed_dies=2", COPIES, f"attention.dies={first}", *SOON)
    busy = Fault(die=first + 1, kind="lost", operation="expert serve", step=2, event=9)
    ways = [("a server", Fault(900.0, first, "lost")), ("a server with a batch", busy)]
    if config.n_shared_experts:
        ways.append(("a server of the shared expert", Fault(2100.0, first + 2, "lost")))
    rows = [
        Case("eaas", f"{what} is lost", two, crowded=True, faults=(fault,), servers_lost=1)
        for what, fault in ways
    ]
    back = TEChange(4 * MS, "add server", "te", 1)
    name = "a server is lost and comes back"
    rows.append(msgspec.structs.replace(rows[1], variant=name, life=(back,), servers_back=1))
    rows.append(
        Case("eaas", "a client is lost", two, crowded=True, faults=(Fault(900.0, 1, "lost"),), clients_lost=1)
    )
    more = (*two, "experts.vacancies=1")
    turns = (TEChange(1 * MS, "add server", "te", 2), TEChange(1 * MS, "remove server", "te", 0))
    rows.append(Case("eaas", "a server joins, another leaves", more, crowded=True, life=turns))
    return rows
