"""Checksums over payloads that engines and network cards bring from one node to another.

The sender's is compared with that of what arrives, before a byte of it is written: what was damaged on the
way is refused, not computed with. Both ends read the payload once more for it, side by side, which takes the
time of its bytes in HBM.

Covered: KV on its way from prefill to decode, blocks between dies and DRAM (the memory pool and a group's
own), weights and replicas; and what kernels gather and push, the tokens of exchanges and their answers: there
damage is an error code of the die that finds it, and the step is run again. Not covered: fields and flags,
which protocols check by themselves, and messages between hosts. Values on volumes have digests of their own.
"""

from __future__ import annotations

import math
import zlib

from ..errors import IntegrityError
from .memory import Address, Bytes
from .spec import Spec


class Checksums:
    """Off by default."""

    def __init__(self) -> None:
        self.is_on = False

    def time_ns(self, nbytes: float, spec: Spec) -> int:
        """What they take for a payload."""
        return math.ceil(spec.hbm_ns(nbytes)) if self.is_on else 0

    def check(self, sent: Bytes, arrived: Bytes, src: Address, dst: Address) -> None:
        """IntegrityError unless they are alike."""
        if not self.is_on or src.node == dst.node or arrived is sent:
            return
        expected, seen = zlib.crc32(sent), zlib.crc32(arrived)
        if expected != seen:
            raise IntegrityError(
                f"{len(sent)} bytes from node {src.node} to node {dst.node} are not those that were sent: "
                f"checksum {expected:#010x} became {seen:#010x}"
            )
