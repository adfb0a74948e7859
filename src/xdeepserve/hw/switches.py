"""Switches between the servers of a SuperPod: how many there are, and how full (CM 3.3, Table 10).

A server has a chip of its own in each of seven sub-planes, with sixteen links up. A switch is two chips of 48
ports each, and serves one sub-plane.
"""

from __future__ import annotations

import math

SUB_PLANES, LINKS_OF_SERVER, PORTS = 7, 16, 2 * 48


def num_switches(servers: int) -> int:
    """So many that every link of a server has a port."""
    return SUB_PLANES * math.ceil(servers * LINKS_OF_SERVER / PORTS)


def utilisation(servers: int) -> float:
    """Share of the ports that have a link, 0 to 1."""
    return SUB_PLANES * servers * LINKS_OF_SERVER / (num_switches(servers) * PORTS)
