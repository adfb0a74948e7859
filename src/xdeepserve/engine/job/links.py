"""Links between prefill and decode TEs, and the choice of those that may be used (xDeepServe 5.1, step 7).

Each pair of a prefill and a decode TE has a DistFlow instance of its own, with its own buffers and queues, so
a failure stays in the pair. A failed transfer marks its link as failed. Its sequence goes by another link to
another decode TE, from the same blocks.

    well     --- a transfer fails --->  failed, avoided for `retry_ns`
    failed   --- `retry_ns` later --->  as good as a well one for the next sequence, avoided by those after
             --- a transfer succeeds -> well

While no link of a prefill TE is well, failed ones are tried all the same. A sequence tries each link once.
When it has tried all, it tries again those through which a dummy payload arrives
(`comm/distflow/link_probe.py`). With `health.link_probe_s` payloads go over all links beside their traffic,
and a link on which they come late counts as failed, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Literal

from xdeepserve.comm.distflow import Backend, DistFlow, Endpoint, backend_between
from xdeepserve.comm.distflow.channels import Channels, channel_layout
from xdeepserve.comm.distflow.link_probe import Verdict, probe
from xdeepserve.comm.distflow.send_receive import SendReceiveBackend
from xdeepserve.engine.deploy.deployment import Fabric, Over
from xdeepserve.engine.dp.events import LinkChanged
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.te.te import TE
from xdeepserve.errors import HardwareError, IntegrityError, TransferError, WaitError, XDeepServeError
from xdeepserve.hw.pod import Pod

SETTLE_NS = 1000  # between looks at a transfer whose bytes have arrived; its own deadline bounds it
MAY_BE_OVER = (HardwareError, IntegrityError, WaitError)
TIMEOUT_NS = 10_000_000_000  # of a side of DistFlow for a word of the other, and for bytes


class Carriage:
    """Backends for the links of one engine, which share XCCL's buffers. Each of their bytes stands for
    `kv_weight`. A deployment chooses the fabric, and on UB the DMA engine or kernels.
    """

    def __init__(self, pod: Pod, fabric: Fabric = "ub", over: Over = "dma", kv_weight: float = 1.0) -> None:
        self._pod, self._fabric, self._kv_weight = pod, fabric, kv_weight
        layout = channel_layout(kv_weight, has_rings=over == "send-receive")
        self.channels = None if over == "dma" else Channels(pod, layout)

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


class PDLink:
    """DistFlow instance between a prefill and a decode TE, with an endpoint for each DP group of both."""

    def __init__(self, pod: Pod, prefill: TE, decode: TE, carriage: Carriage, retry_ns: int) -> None:
        self.tes = prefill, decode
        self._clock, self._retry_ns = pod.clock, retry_ns
        lost_ns = [te.sizes.groups.lost_ns for te in self.tes]
        # A TE that waits for a transfer shall hear of its failure before it takes itself for lost.
        timeout_ns = min(TIMEOUT_NS, min(lost_ns) // 3)
        self.flow = DistFlow(
            pod,
            carriage.backend(prefill, decode, timeout_ns),
            timeout_ns=timeout_ns,
            # A decode TE without room is heard of by its heartbeats; if it is lost, so is the pod.
            offer_timeout_ns=None,
            # A part comes when a step has computed it, whose own deadline is the first to pass.
            part_timeout_ns=2 * max(lost_ns),
        )
        groups = {str(group.id): group for te in self.tes for group in te.groups}
        nodes = {name: [die.index for die in group.dies] for name, group in groups.items()}
        endpoints = self.flow.link_cluster(nodes)
        self.ends: dict[DPGroup, Endpoint] = dict(zip(groups.values(), endpoints, strict=True))
        for te in self.tes:
            for group in te.groups:
                self.ends[group].on_completion = te.wake
                group.endpoints.append(self.ends[group])
        self.error: XDeepServeError | None = None  # why it has failed; None: it is well
        self.verdict: Verdict | Literal["not probed"] = "not probed"
        self._pod, self._timeout_ns = pod, timeout_ns
        self._avoided_until_ns = 0
        self._sent_ns: int | None = None  # when the dummy payloads under way were sent

    @property
    def is_avoided(self) -> bool:
        return self.error is not None and self._clock.now < self._avoided_until_ns

    def fail(self, error: XDeepServeError) -> None:
        """Mark the link as failed, and avoid it for `retry_ns`."""
        was_well, self.error = self.error is None, error
        self._avoided_until_ns = self._clock.now + self._retry_ns
        if was_well:
            self._tell(is_well=False, reason=str(error))

    def _tell(self, is_well: bool, reason: str = "") -> None:
        prefill, decode = self.tes
        prefill.tell(LinkChanged(prefill.plan.name, decode.plan.name, is_well, reason))

    async def probe(self, source: DPGroup) -> Verdict:
        """Send dummy payloads from a DP group to all dies at the other end, and return the verdict. For
        callers that are processes of the pod."""
        nodes = [die.index for group in self.tes[1].groups for die in group.dies]

        def pairs() -> Iterator[tuple[int, int]]:
            for pair in product([die.index for die in source.dies], nodes):
                self._sent_ns = self._clock.now
                yield pair

        try:
            verdict = await probe(self._pod, self.flow.backend, pairs(), self._timeout_ns)
        finally:
            self._sent_ns = None
        self.verdict = verdict
        return verdict

    async def look(self, avoid_ns: int) -> None:
        """Probe the link beside its traffic, unless a payload is still on its way. The link is avoided for
        `avoid_ns`, at least, if two looks in a row find payloads late, which traffic alone can do to one, if
        one is on its way for so long, or if one does not come."""
        before = self.verdict
        if self._sent_ns is None:
            verdict = await self.probe(self.tes[0].groups[0])
        elif self._clock.now - self._sent_ns < avoid_ns:
            return
        else:
            before = self.verdict = verdict = "delayed"
        if verdict == "well" and self.error is not None:
            self.recover()
        elif verdict == "blocked" or {before, verdict} <= {"delayed", "slow"}:
            names = " to ".join(te.sizes.place.name for te in self.tes)
            self.fail(TransferError(f"a dummy payload from {names} was {verdict}"))
            self._avoided_until_ns = max(self._avoided_until_ns, self._clock.now + avoid_ns)

    def recover(self) -> None:
        """Mark the link as well, because a transfer has succeeded."""
        was_well, self.error = self.error is None, None
        if not was_well:
            self._tell(is_well=True)

    def take(self) -> None:
        """Note the use of the link by a sequence. If the link has failed, this sequence tests it, while
        others keep avoiding it."""
        if self.error is not None:
            self._avoided_until_ns = self._clock.now + self._retry_ns

    def close(self) -> None:
        """Close the link. DP groups forget their endpoints when they have read the last completions."""
        self.flow.close()

    async def settle(self) -> None:
        """Wait until no side has an open transfer; for callers that are processes of the pod."""
        while any(end.num_open for end in self.ends.values()):
            await self._clock.sleep(SETTLE_NS)


class Links:
    """All links of an engine, and for each sequence those that failed for it."""

    def __init__(self) -> None:
        self.by_prefill: dict[TE, dict[TE, PDLink]] = {}  # by prefill TE and decode TE
        self._failures: dict[int, dict[TE, XDeepServeError]] = {}  # by seq_id and decode TE
        self._again: dict[int, set[TE]] = {}  # those that a sequence has been allowed once more

    def add(self, link: PDLink) -> None:
        prefill, decode = link.tes
        self.by_prefill.setdefault(prefill, {})[decode] = link

    def of(self, te: TE) -> list[PDLink]:
        """List all links from or to a TE."""
        return [link for link in self if te in link.tes]

    def remove(self, te: TE) -> None:
        """Close all links of a TE."""
        for link in self.of(te):
            link.close()
            prefill, decode = link.tes
            del self.by_prefill[prefill][decode]
            if not self.by_prefill[prefill]:
                del self.by_prefill[prefill]

    @property
    def num_failures(self) -> int:
        """Number of links tried in vain by sequences that are still on their way."""
        return sum(map(len, self._failures.values()))

    def __iter__(self) -> Iterator[PDLink]:
        return (link for links in self.by_prefill.values() for link in links.values())

    def are_avoided(self, prefill: TE) -> bool:
        """Whether all links from a prefill TE are avoided, so that requests should not be prefilled there."""
        links = self.by_prefill.get(prefill, {})
        return bool(links) and all(link.is_avoided for link in links.values())

    def troubles(self, te: TE) -> tuple[str, ...]:
        """Describe the failed links of a TE: where each leads, and the verdict of its probe."""
        others = [(link, link.tes[link.tes[0] is te]) for link in self.of(te) if link.error is not None]
        return tuple(f"{other.sizes.place.name}: {link.verdict}" for link, other in others)

    def choose(self, prefill: TE, seq_id: int) -> PDLink | None:
        """Step 4: choose the link to the decode TE with the lowest load; avoided links come last. None if the
        sequence has tried all."""
        tried = self._failures.get(seq_id, {})
        links = [
            link
            for te, link in self.by_prefill.get(prefill, {}).items()
            if te not in tried and te.life == "ready"
        ]
        return min(links, key=_rank, default=None)

    def between(self, prefill: TE, decode: TE) -> PDLink | None:
        """Return the link of a pair of TEs, if it exists and is not avoided."""
        link = self.by_prefill.get(prefill, {}).get(decode)
        return None if link is None or link.is_avoided else link

    def fail(self, link: PDLink, seq_id: int, error: XDeepServeError) -> None:
        """Note the failure of a link, both for the link and for this sequence."""
        link.fail(error)
        self._failures.setdefault(seq_id, {})[link.tes[1]] = error

    def try_again(self, link: PDLink, seq_id: int) -> None:
        """Allow a sequence to use a failed link once more. Not allowed after protocol errors, because they
        are no fault of the link."""
        te, again = link.tes[1], self._again.setdefault(seq_id, set())
        failures = self._failures.get(seq_id, {})
        error = failures.get(te)
        if te not in again and isinstance(error and (error.__cause__ or error), MAY_BE_OVER):
            again.add(te)
            del failures[te]

    def error(self, prefill: TE, seq_id: int) -> TransferError:
        """Make the error for a sequence without any way to a decode TE, with all reasons."""
        reasons = [f"{te.sizes.place.name}: {error}" for te, error in self._failures.get(seq_id, {}).items()]
        return TransferError(
            f"no decode TE can be reached from {prefill.sizes.place.name}, which has prefilled the request: "
            + ("; ".join(reasons) or "none takes new work")
        )

    def forget(self, seq_id: int) -> None:
        """Forget the failures of a sequence that has ended, or whose blocks have arrived."""
        self._failures.pop(seq_id, None)
        self._again.pop(seq_id, None)


def load_at(te: TE) -> tuple[bool, float, int, int]:
    """Return the sort key by which decode TEs get prefilled requests: the lowest load first, a suspect TE
    last (step 4 of xDeepServe 5.1)."""
    return te.is_suspect, te.kv_load, te.num_sequences, te.sizes.place.first_die


def _rank(link: PDLink) -> tuple[bool, tuple[bool, float, int, int]]:
    return link.is_avoided, load_at(link.tes[1])
