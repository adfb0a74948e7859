"""Names of the parts and commands that wings bring to the house.

The house serves without its wings, and none of its files imports one. Where it has a place for something that
a wing brings, it asks for it here by name, and the wing is imported then.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

COMMANDS: Final[Mapping[str, str]] = {  # modules with `add_options` and `run`, beside the files of cli
    "bench": "xdeepserve.bench.command",
    "chaos": "xdeepserve.chaos.command",
    "cluster": "xdeepserve.jobs.command",
    "ems": "xdeepserve.ems.command",
    "eval": "xdeepserve.evals.command",
    "learn": "xdeepserve.learn.command",
    "expert-server": "xdeepserve.remote.expert_server_command",
    "monitor": "xdeepserve.remote.monitor_command",
    "place": "xdeepserve.remote.place_command",
    "plan": "xdeepserve.planner.command",
    "quantize": "xdeepserve.quant.command",
    "replay": "xdeepserve.platform.command",
    "sweep": "xdeepserve.planner.sweep_command",
}
PARTS: Final[Mapping[str, str]] = {  # "module:name"
    "memory pool": "xdeepserve.ems.pool_use:PoolUse",
    "seats outside": "xdeepserve.remote.watcher:Watcher",
    "servers outside": "xdeepserve.remote.servers_outside:servers_outside",
    "way over cards": "xdeepserve.m2n.way:M2NWay",
    "clock way over cards": "xdeepserve.m2n.clock_way:M2NClock",
    "remote engine": "xdeepserve.jobs.remote_engine:remote_engine",
    "recording": "xdeepserve.page.page_record:recording",
    "options of jobs": "xdeepserve.jobs.door.job_routes:check_options",
}
ENDPOINT: Final = (
    "xdeepserve.jobs.door.job_routes",
    "xdeepserve.page.door",
)  # have ROUTES, `furnish`


def command(name: str) -> Any:
    """Import the module of a command: a wing's, or the file of that name in `cli`."""
    return importlib.import_module(COMMANDS.get(name, f"xdeepserve.cli.{name.replace('-', '_')}"))


def part(name: str) -> Any:
    """Import the part that a wing brings under a name of PARTS."""
    module, _, attribute = PARTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def endpoint() -> list[Any]:
    """Import the modules with which wings add routes to the endpoint."""
    return [importlib.import_module(name) for name in ENDPOINT]
