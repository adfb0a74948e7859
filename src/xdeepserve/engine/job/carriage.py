"""Transport of KV from prefill to decode: a fabric, and on UB the DMA engine or send-receive kernels."""

from __future__ import annotations

from xdeepserve.comm.distflow import Backend, backend_between
from xdeepserve.comm.distflow.channels import Channels
from xdeepserve.comm.distflow.send_receive import SendReceiveBackend
from xdeepserve.engine.deploy.deployment import Fabric, Over
from xdeepserve.engine.te.te import TE
from xdeepserve.hw.pod import Pod


class Carriage:
    """Makes the backends for the links of one engine, which share XCCL's buffers.

    Each byte moved stands for `kv_weight` bytes.
    """

    def __init__(self, pod: Pod, fabric: Fabric = "ub", over: Over = "dma", kv_weight: float = 1.0) -> None:
        self._pod, self._fabric, self._kv_weight = pod, fabric, kv_weight
        self.channels = Channels(pod, kv_weight) if over == "send-receive" else None

    def backend(self, prefill: TE, decode: TE, timeout_ns: int) -> Backend:
        """Make the backend for the link of two TEs. Raises HardwareError if nothing connects them."""
        nodes, others = ([die.index for group in te.groups for die in group.dies] for te in (prefill, decode))
        if self.channels is None:
            return backend_between(self._pod, nodes, others, self._fabric, self._kv_weight)
        # A wait for a field ends before the transfer does: so it is the field that an error names.
        backend = SendReceiveBackend(self.channels, timeout_ns // 2)
        for node in nodes:
            for other in others:
                backend.check_path(node, other)
        return backend

    def forget(self, te: TE) -> None:
        """Forget a departed TE and the buffers on its dies."""
        if self.channels is not None:
            self.channels.forget(te.plan.dies)

    def check_integrity(self) -> None:
        """Check XCCL's buffers: nothing may be left in them."""
        if self.channels is not None:
            self.channels.check_integrity()
