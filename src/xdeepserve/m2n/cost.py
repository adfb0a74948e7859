"""What M2N takes by formula, for runs that only take time; `tests/timing` compares it with the steps."""

from __future__ import annotations

import math

import msgspec

from xdeepserve.hw.rdma import CONTROL_NBYTES
from xdeepserve.hw.spec import Spec


class M2NCost(msgspec.Struct, frozen=True):
    """Costs of one way, between cards of two kinds of devices. Times are ns, not rounded."""

    sender: Spec
    receiver: Spec

    def line_ns(self, nbytes: float, is_sent: bool) -> float:
        """Bytes through one side of a card, with the headers of their segments."""
        spec = self.sender if is_sent else self.receiver
        segments = math.ceil(nbytes / spec.rdma_segment.value)
        return 1e9 * (nbytes + segments * CONTROL_NBYTES) / spec.roce_bandwidth.value

    def until_there(self, num_peers: int, sent: float, received: float) -> float:
        """From rows that are ready to all of them at the far end: the slower card's bytes, which begin with
        the first write that is posted (MS equation 6); the last segment passes both."""
        spec = self.sender
        segment = min(spec.rdma_segment.value, sent / max(1, num_peers))
        line = max(self.line_ns(sent, True), self.line_ns(received, False))
        posts = 1e9 * spec.rdma_post.value * num_peers
        passes = max(line, posts) + 1e9 * segment / self.receiver.roce_bandwidth.value
        ready = spec.hbm_ns(2 * sent) + 1e9 * spec.stream_flag.value
        return ready + passes + 1e9 * spec.roce_startup.value

    def until_acknowledged(self) -> float:
        """From there until the sender's stream goes on."""
        return 1e9 * (self.receiver.roce_startup.value + self.sender.stream_flag.value)

    def until_received(self) -> float:
        """From there until the receiver's stream goes on: its flush comes first."""
        return 1e9 * (self.receiver.pcie_flush.value + self.receiver.stream_flag.value)

    def total_ns(self, num_peers: int, sent: float, received: float) -> float:
        """T_c: from rows that are ready to a receiver that goes on with them."""
        return self.until_there(num_peers, sent, received) + self.until_received()
