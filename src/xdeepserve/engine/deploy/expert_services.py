"""Experts as services (EaaS): the experts of each server, and errors in such settings."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from xdeepserve.engine.deploy.deployment import Deployment, ExpertConfig, ServiceConfig
from xdeepserve.engine.deploy.roles import has_services

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
    """List errors in the settings of expert servers; `num_servers` of them have routed experts."""
    experts, services, reasons = d.experts or ExpertConfig(), d.services or ServiceConfig(), []
    counts, copies = experts.counts, experts.copies
    if counts is not None and (len(counts) != num_servers or min(counts) < 1 or sum(counts) != num_experts):
        reasons.append(
            f"experts.counts must be the routed experts of each of {num_servers} servers, 1 or more, "
            f"{num_experts} together, found {list(counts)}"
        )
    if not 0 <= copies < max(1, num_servers):
        reasons.append(
            f"experts.copies must be between 0 and {num_servers - 1}, the number of other servers, "
            f"found {copies}"
        )
    if copies and experts.redundant_slots:
        reasons.append(
            "experts.copies stay where they are, so that any lost server is covered, and "
            "experts.redundant_slots are filled as load asks: choose one"
        )
    if experts.vacancies < 0:
        reasons.append(f"experts.vacancies must not be negative, found {experts.vacancies}")
    if experts.vacancies and experts.redundant_slots:
        reasons.append("experts.vacancies bring copies, and experts.redundant_slots are for EPLB: choose one")
    if experts.transport == "pod" and experts.monitor is not None:
        reasons.append("experts.monitor is for server processes: set experts.transport to shm or tcp")
    if experts.transport != "pod" and experts.redundant_slots:
        reasons.append(
            f"experts.redundant_slots are filled by a pod's dies, and with transport={experts.transport} "
            "experts are elsewhere: experts.copies are there from the start"
        )
    if experts.monitor is not None and not HOST_PORT.fullmatch(experts.monitor):
        reasons.append(f"experts.monitor must be HOST:PORT, found '{experts.monitor}'")
    if services.batch_clients < 1:
        reasons.append(f"services.batch_clients must be at least 1, found {services.batch_clients}")
    if services.lost_heartbeats < 1:
        reasons.append(f"services.lost_heartbeats must be at least 1, found {services.lost_heartbeats}")
    for key, least in (
        ("batch_timeout_us", "0 or"),
        ("answer_timeout_ms", ""),
        ("process_timeout_ms", ""),
        ("heartbeat_ms", ""),
    ):
        value = getattr(services, key)
        if not 0 <= value < math.inf or (not least and value == 0):
            reasons.append(f"services.{key} must be {least or 'more than 0, and'} a number, found {value:g}")
    if d.exchange == "push":
        reasons.append("exchange=push waits for a flag of every die, and expert services are no group")
    return reasons


IN_A_GROUP = (
    ": where a group waits for every die no copy stands in for a lost one; experts.redundant_slots share load"
)


def reasons_elsewhere(d: Deployment) -> list[str]:
    """List settings of expert services that are set in a deployment without such services."""
    experts = d.experts or ExpertConfig()
    if has_services(d.kind):
        return []
    given = {key: getattr(experts, key) for key in ("counts", "copies", "vacancies", "transport", "monitor")}
    return [
        f"experts.{key} is for experts that are services (eaas){IN_A_GROUP if key == 'copies' else ''}"
        for key, value in given.items()
        if value not in (None, 0, "pod")
    ]
