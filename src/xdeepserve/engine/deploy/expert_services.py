"""Experts as services (EaaS): the experts of each server, and errors in such settings."""

from __future__ import annotations

import re
from collections.abc import Sequence

from xdeepserve.engine.deploy.deployment import Deployment, ExpertConfig

HOST_PORT = re.compile(r"[^\s:]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")


def declustered(experts_of: Sequence[range], num_servers: int, copies: int) -> tuple[tuple[int, ...], ...]:
    """Choose the copies of experts on each of the first `num_servers` servers (chained declustering).

    Copies of one server's experts go to all other servers in turn, beginning with its neighbour. So many
    servers share its work when it is lost.
    """
    held: list[list[int]] = [[] for _ in experts_of]
    for server, experts in enumerate(experts_of[:num_servers]):
        for number, expert in enumerate(experts):
            for copy in range(copies):
                held[(server + 1 + (number + copy) % (num_servers - 1)) % num_servers].append(expert)
    return tuple(map(tuple, held))


def copies_of(
    experts_of: Sequence[range], num_servers: int, copies: int, vacancies: int
) -> tuple[tuple[int, ...], ...]:
    """Choose the copies of experts on all servers, those included that may join behind the first
    `num_servers`.

    A joining server gets as many copies as any other one, from as many servers. No experts depend on these
    copies; the server just takes over a part of the others' work.
    """
    held = list(declustered(experts_of, num_servers, copies))
    num_experts = sum(map(len, experts_of))
    share = max([*map(len, held), min(num_experts, -(-num_experts // num_servers))])
    for number in range(vacancies):
        held[num_servers + number] = tuple(
            sorted((place * num_experts // share + number) % num_experts for place in range(share))
        )
    return tuple(held)


def reasons_against_services(d: Deployment, num_experts: int, num_servers: int) -> list[str]:
    """Return the reasons against the settings of `num_servers` servers with routed experts."""
    experts, reasons = d.experts or ExpertConfig(), []
    counts, copies = experts.counts, experts.copies
    if counts is not None and (
        len(counts) != num_servers or min(counts, default=0) < 1 or sum(counts) != num_experts
    ):
        reasons.append(
            f"experts.counts must be the routed experts of each of {num_servers} servers, 1 or more, "
            f"{num_experts} together, found {list(counts)}"
        )
    if not 0 <= copies < max(1, num_servers):
        reasons.append(
            f"experts.copies must be between 0 and {num_servers - 1}, the number of other servers, "
            f"found {copies}"
        )
    if experts.monitor is not None and not HOST_PORT.fullmatch(experts.monitor):
        reasons.append(f"experts.monitor must be HOST:PORT, found '{experts.monitor}'")
    return reasons
