"""Resources of an operator: cores, engine and patience."""

from __future__ import annotations

from typing import NamedTuple

from xdeepserve.comm.checks import integer
from xdeepserve.comm.exchange_choices import Carrier
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.die import Die


class Means(NamedTuple):
    """Cores and engine for an operator, its timeout, and its lane in traces. No byte depends on them."""

    cores: int | None = None  # AIV cores; None: all
    carrier: Carrier = "mte"  # of rows that are pulled; what is pushed, and collectives, the cores carry
    timeout_ns: int = 1_000_000_000  # of virtual time, for each wait for peers
    lane: str = "XCCL"

    def checked(self, die: Die) -> Means:
        """Return the means with Python's numbers. Raises DeploymentError for cores that the die lacks, or
        unknown carriers."""
        total, where = die.spec.num_cores("aiv"), f"die {die.index}"
        cores = None if self.cores is None else integer(where, "cores", self.cores)
        if cores is not None and not 1 <= cores <= total:
            raise DeploymentError(f"{where} has 1..{total} AIV cores to use, not {cores}")
        if self.carrier not in ("mte", "urma"):
            raise DeploymentError(f"rows are carried by mte or urma, not {self.carrier!r}")
        return self._replace(cores=cores, timeout_ns=integer(where, "timeout_ns", self.timeout_ns))


ALL_CORES = Means()
"""All AIV cores of a die, their own engines, and a second to wait."""
