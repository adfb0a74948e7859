"""Links between prefill and decode TEs, and which of them may be used (xDeepServe 5.1, step 7).

Each pair of a prefill and a decode TE has a DistFlow instance of its own, with buffers and queues of its own,
so that a failure stays in the pair. A transfer that fails marks its link as failed, and its sequence goes by
another: to another decode TE, from the same blocks.

    well     --- a transfer fails --->  failed, avoided for `retry_ns`
    failed   --- `retry_ns` later --->  as good as a well one for the next sequence, avoided by those after
             --- a transfer succeeds -> well

While no link of a prefill TE is well, failed ones are tried all the same. A sequence tries each once, and
when it has tried all, those once more that a dummy payload comes through (`comm/distflow/link_probe.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from xdeepserve.comm.distflow import Backend, DistFlow, Endpoint, backend_between
from xdeepserve.comm.distflow.channels import Channels
from xdeepserve.comm.distflow.link_probe import Verdict, probe
from xdeepserve.comm.distflow.send_receive import SendReceiveBackend
from xdeepserve.engine.deploy.deployment import Fabric, Over
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
        self.channels = Channels(pod, kv_weight) if over == "send-receive" else None

    def backend(self, prefill: TE, decode: TE, timeout_ns: int) -> Backend:
        """What moves the bytes of one link. HardwareError if nothing reaches from one TE to the other."""
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
        """It is gone, and what was on its dies."""
        if self.channels is not None:
            self.channels.forget(te.plan.dies)

    def check_integrity(self) -> None:
        """Nothing is left in XCCL's buffers."""
        if self.channels is not None:
            self.channels.check_integrity()


class PDLink:
    """The DistFlow instance of one prefill and one decode TE: an endpoint for each of their DP groups."""

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

    @property
    def is_avoided(self) -> bool:
        return self.error is not None and self._clock.now < self._avoided_until_ns

    def fail(self, error: XDeepServeError) -> None:
        """A transfer has failed."""
        self.error = error
        self._avoided_until_ns = self._clock.now + self._retry_ns

    async def probe(self, source: DPGroup) -> Verdict:
        """From within a process: what becomes of dummy payloads from a group to all dies at the other end."""
        nodes = [die.index for group in self.tes[1].groups for die in group.dies]
        pairs = [(die.index, node) for die in source.dies for node in nodes]
        self.verdict = verdict = await probe(self._pod, self.flow.backend, pairs, self._timeout_ns)
        return verdict

    def recover(self) -> None:
        """A transfer has succeeded."""
        self.error = None

    def take(self) -> None:
        """A sequence goes by it. If it has failed, that one finds out how it is; others had better not."""
        if self.error is not None:
            self._avoided_until_ns = self._clock.now + self._retry_ns

    def close(self) -> None:
        """Nothing goes by it any more. Groups forget their ends when they have read their completions."""
        self.flow.close()

    async def settle(self) -> None:
        """From within a process: until no side waits for the word of the other."""
        while any(end.num_open for end in self.ends.values()):
            await self._clock.sleep(SETTLE_NS)


class Links:
    """All links of a pod, and by which of them each sequence could not go."""

    def __init__(self) -> None:
        self.by_prefill: dict[TE, dict[TE, PDLink]] = {}  # by prefill TE and decode TE
        self._failures: dict[int, dict[TE, XDeepServeError]] = {}  # by seq_id and decode TE
        self._again: dict[int, set[TE]] = {}  # those that a sequence has been allowed once more

    def add(self, link: PDLink) -> None:
        prefill, decode = link.tes
        self.by_prefill.setdefault(prefill, {})[decode] = link

    def of(self, te: TE) -> list[PDLink]:
        """All that lead from or to a TE."""
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
        """Links that sequences have tried in vain."""
        return sum(map(len, self._failures.values()))

    def __iter__(self) -> Iterator[PDLink]:
        return (link for links in self.by_prefill.values() for link in links.values())

    def are_avoided(self, prefill: TE) -> bool:
        """Whether nothing that is prefilled there had better be sent anywhere."""
        links = self.by_prefill.get(prefill, {})
        return bool(links) and all(link.is_avoided for link in links.values())

    def troubles(self, te: TE) -> tuple[str, ...]:
        """The links of a TE that have failed: where they lead, and whether it is a fault of theirs."""
        others = [(link, link.tes[link.tes[0] is te]) for link in self.of(te) if link.error is not None]
        return tuple(f"{other.sizes.place.name}: {link.verdict}" for link, other in others)

    def choose(self, prefill: TE, seq_id: int) -> PDLink | None:
        """Step 4: the link to the decode TE with the lowest load, of those that can be reached if there are
        any. None if the sequence has tried all.
        """
        tried = self._failures.get(seq_id, {})
        links = [
            link
            for te, link in self.by_prefill.get(prefill, {}).items()
            if te not in tried and te.life == "ready"
        ]
        return min(links, key=_rank, default=None)

    def between(self, prefill: TE, decode: TE) -> PDLink | None:
        """The link of a pair, if there is one and it is not avoided."""
        link = self.by_prefill.get(prefill, {}).get(decode)
        return None if link is None or link.is_avoided else link

    def fail(self, link: PDLink, seq_id: int, error: XDeepServeError) -> None:
        """A sequence could not go by a link."""
        link.fail(error)
        self._failures.setdefault(seq_id, {})[link.tes[1]] = error

    def try_again(self, link: PDLink, seq_id: int) -> None:
        """A sequence may go by a link although that has failed, but not for ever; nor if a field said what
        cannot be, which is no fault of a link.
        """
        te, again = link.tes[1], self._again.setdefault(seq_id, set())
        failures = self._failures.get(seq_id, {})
        error = failures.get(te)
        if te not in again and isinstance(error and (error.__cause__ or error), MAY_BE_OVER):
            again.add(te)
            del failures[te]

    def error(self, prefill: TE, seq_id: int) -> TransferError:
        """Why a sequence cannot be decoded anywhere."""
        reasons = [f"{te.sizes.place.name}: {error}" for te, error in self._failures.get(seq_id, {}).items()]
        return TransferError(
            f"no decode TE can be reached from {prefill.sizes.place.name}, which has prefilled the request: "
            + ("; ".join(reasons) or "none takes new work")
        )

    def forget(self, seq_id: int) -> None:
        """The sequence has ended, or its blocks have arrived."""
        self._failures.pop(seq_id, None)
        self._again.pop(seq_id, None)


def _rank(link: PDLink) -> tuple[bool, bool, float, int, int]:
    te = link.tes[1]
    return link.is_avoided, te.is_suspect, te.kv_load, te.num_sequences, te.sizes.place.first_die
