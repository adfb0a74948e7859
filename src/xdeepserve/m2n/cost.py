"""Cost of M2N by formula, for timing-only runs; `tests/timing` compares it with the real steps."""

from __future__ import annotations

import math

import msgspec

from xdeepserve.hw.rdma import CONTROL_NBYTES
from xdeepserve.hw.spec import Spec


class M2NCost(msgspec.Struct, frozen=True):
    """Cost of a transfer in one direction, between cards of two kinds of devices.

    Times are ns, not rounded.
    """

    sender: Spec
    receiver: Spec

    def line_ns(self, nbytes: float, is_sent: bool) -> float:
        """Compute the time [ns] of bytes through one side's card, with the headers of their segments."""
        spec = self.sender if is_sent else self.receiver
        segments = math.ceil(nbytes / spec.rdma_segment.value)
        return 1e9 * (nbytes + segments * CONTROL_NBYTES) / spec.roce_bandwidth.value

    def until_there(self, num_peers: int, sent: float, received: float) -> float:
        """Compute the time [ns] from rows that are ready until all have arrived. The slower card's bytes
        count from the first posted write on (MS equation 6); the last segment passes both cards."""
        spec = self.sender
        segment = min(spec.rdma_segment.value, sent / max(1, num_peers))
        line = max(self.line_ns(sent, True), self.line_ns(received, False))
        posts = 1e9 * spec.rdma_post.value * num_peers
        passes = max(line, posts) + 1e9 * segment / self.receiver.roce_bandwidth.value
        ready = spec.hbm_ns(2 * sent) + 1e9 * spec.stream_flag.value
        return ready + passes + 1e9 * spec.roce_startup.value

    def until_acknowledged(self) -> float:
        """Compute the time [ns] from arrival until the sender's stream continues."""
        return 1e9 * (self.receiver.roce_startup.value + self.sender.stream_flag.value)

    def until_received(self) -> float:
        """Compute the time [ns] from arrival until the receiver's stream continues; its flush comes first."""
        return 1e9 * (self.receiver.pcie_flush.value + self.receiver.stream_flag.value)

    def total_ns(self, num_peers: int, sent: float, received: float) -> float:
        """Compute T_c [ns]: from rows that are ready until the receiver's stream continues with them."""
        return self.until_there(num_peers, sent, received) + self.until_received()
