"""What short runs of the presets show of the papers' mechanisms: events, spans and bytes that each leaves.

`SEEN` has a row for each mechanism of `tools/write_mechanisms.py` that a run shows by more than its setting:
a run of a preset in miniature, and a function that looks into it once it has ended. Runs only take time,
unless a row needs bytes, and are shared by rows.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import msgspec

from xdeepserve import LLM, SamplingParams
from xdeepserve.comm.distflow.channels import Channels
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.dp import events as e
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.hw.faults import Fault
from xdeepserve.hw.trace import Trace, TraceSpan
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model

E = TypeVar("E", bound=e.Observed)
Dies = dict[str, tuple[int, ...]]  # of each TE

SMALL = ("max_model_len=256", "cache.block_size=16", "cache.num_blocks=64")
PREFILL = ("prefill.count=2", "prefill.dies=4", "prefill.tp=4", "prefill.experts_per_die=6")
FEW_ROWS = ("prefill.max_num_batched_tokens=64", "decode.max_num_seqs=4", "decode.max_num_batched_tokens=8")
SIZES: dict[str, tuple[str, ...]] = {  # of the papers' pods, for a model with 16 routed experts
    "colocated": ("dies=4",),
    "superpod": ("prefill.dies=4", "attention.dies=2", "experts.routed_dies=4", "experts.shared_dies=1"),
    "dp288": (*SMALL, "dies=18", "experts.shared_dies=2", "scheduler.max_num_seqs=8"),
    "production": (*SMALL, *PREFILL, *FEW_ROWS, "decode.dies=8"),
    "cloudmatrix384": (*SMALL, *PREFILL, *FEW_ROWS, "decode.dies=20", "decode.shared_dies=2"),
}
LONG = ("max_model_len=1088", "cache.block_size=128", "scheduler.max_num_batched_tokens=2048")


class Asked(NamedTuple):
    """A run: requests to a preset in miniature, with some settings of its own."""

    preset: str
    more: tuple[str, ...] = ()
    has_bytes: bool = False
    is_wide: bool = False  # layers are as wide as DeepSeek-R1's, and prompts have 512 tokens
    tokens: int = 12
    faults: tuple[Fault, ...] = ()

    def set(self, *more: str) -> Asked:
        """Ask for the same with more settings."""
        return self._replace(more=(*self.more, *more))


class Ran(NamedTuple):
    """A run that has ended."""

    plan: PodPlan
    events: tuple[e.Observed, ...]
    trace: Trace
    channels: Channels | None  # of send and receive
    before: Dies
    after: Dies
    end_ns: int

    def spans(self, name: str = "", lane: str = "", nodes: Sequence[int] | None = None) -> list[TraceSpan]:
        """Spans of a name, in a lane, on some nodes."""
        return [
            span
            for span in self.trace.spans
            if name in ("", span.name) and lane in ("", span.lane) and (nodes is None or span.node in nodes)
        ]

    def names(self, lane: str = "", nodes: Sequence[int] | None = None) -> set[str]:
        return {span.name for span in self.spans(lane=lane, nodes=nodes)}

    def nodes(self, name: str) -> set[int]:
        return {span.node for span in self.spans(name)}

    def spent_ns(self, name: str) -> int:
        return sum(span.end_ns - span.start_ns for span in self.spans(name))

    def of(self, kind: type[E]) -> list[E]:
        """Events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def dies(self, role: str) -> tuple[int, ...]:
        """Dies of a role's TEs at the beginning."""
        return tuple(die for name, dies in self.before.items() if name.startswith(role) for die in dies)

    @property
    def planes(self) -> set[str]:
        """Planes over which engines have moved bytes."""
        return {moved.plane for moved in self.trace.moved}

    @property
    def num_moved(self) -> int:
        """Bytes that engines have moved from die to die."""
        return sum(moved.nbytes for moved in self.trace.moved)

    @property
    def shares(self) -> list[tuple[str, e.ShareOfStep]]:
        """Shares of all steps, with the name of the TE."""
        return [(step.group.te, share) for step in self.of(e.StepEnded) for share in step.shares]

    def is_before(self, first: type[e.Event], second: type[e.Event]) -> bool:
        """Whether an event of each sequence comes before one of another kind."""
        at: dict[tuple[type[e.Observed], int], int] = {}
        for number, event in enumerate(self.events):
            if isinstance(event, first | second):
                at.setdefault((type(event), event.seq_id), number)
        seqs = {seq for _, seq in at}
        never = len(self.events)
        return bool(seqs) and all(at.get((first, seq), never) < at.get((second, seq), never) for seq in seqs)


def wide() -> Checkpoint:
    """DeepSeek-R1 with five layers of 16 experts."""
    model = resolve_model("deepseek-r1")
    few = {"num_hidden_layers": 5, "n_routed_experts": 16, "n_group": 2, "topk_group": 2}
    model.config = msgspec.structs.replace(model.config, **few)
    return model


@functools.cache
def ran(asked: Asked) -> Ran:
    """Serve eight requests."""
    events: list[e.Observed] = []
    lengths = [512] * 16 if asked.is_wide else [12 + 18 * number for number in range(8)]
    sizes = (*SIZES.get(asked.preset, ()), *(LONG if asked.is_wide else ()), *asked.more)
    with LLM(
        wide() if asked.is_wide else "tiny-random",
        asked.preset,
        overrides=sizes,
        trace=True,
        trace_dies=0,
        timing_only=not asked.has_bytes and TimingConfig(skew=0.8),
        faults=asked.faults,
        progress=False,
    ) as llm:

        def dies() -> Dies:
            return {te.plan.name: te.plan.every_die for te in llm.engine.je.tes}

        before = dies()
        llm.engine.observe(events.append)
        params = SamplingParams(max_tokens=asked.tokens, temperature=0, ignore_eos=True)
        llm.generate([[7 + number] * length for number, length in enumerate(lengths)], params)
        plan, carriage = llm.engine.plan, llm.engine.je.carriage
        return Ran(plan, tuple(events), plan.pod.trace, carriage.channels, before, dies(), llm.virtual_ns)


# ---- what is seen ---------------------------------------------------------------------------------------


def has_a_ring_for_each_pair(r: Ran) -> bool:
    """Messages have gone through rings, step by step; each pair of dies has a place of its own on both."""
    if r.channels is None:
        return False
    pairs = {(moved.source, moved.target) for moved in r.trace.moved}
    rings = {channel: place for places in r.channels.places.values() for channel, place in places.items()}
    are_own = all(len(set(places.values())) == len(places) for places in r.channels.places.values())
    steps = {"send 1", "send 2", "receive 5", "receive 6", "send 8"} <= r.names("XCCL")
    return steps and are_own and len(pairs) > 1 and {*rings} == pairs


def are_served_in_turn(r: Ran) -> bool:
    """Each expert die has worked for three domains, one after the other."""
    nodes = {span.node for span in r.spans(lane="MoE")}
    for node in nodes:
        spans = sorted(r.spans(lane="MoE", nodes=[node]), key=lambda span: span.start_ns)
        if len({span.name[: len("domain 0")] for span in spans}) < 3:
            return False
        if any(one.end_ns > two.start_ns for one, two in pairwise(spans)):
            return False
    return bool(nodes)


def overlap(r: Ran) -> bool:
    """On some die parts of one microbatch run while parts of the other do."""
    one, two = (r.spans(lane=f"microbatch {number}") for number in (0, 1))
    return any(
        a.node == b.node and a.start_ns < b.end_ns and b.start_ns < a.end_ns
        for a in one[:100]
        for b in two[:100]
    )


def decides(r: Ran) -> bool:
    """Some steps are cut, and some are not."""
    steps = {(event.group.te, event.step) for event in r.of(e.StepEnded)}
    cut = {(event.te, event.step) for event in r.of(e.StepCut)}
    return bool(cut) and bool(steps - cut)


def microbatches(r: Ran) -> set[str]:
    return {name[-len("microbatch 0") :] for name in r.names("A2E receive")}


def has_other_dies(r: Ran, one: str, other: str) -> bool:
    """Stages of two names run on dies of different hardware."""
    first, second = (
        {r.plan.pod.spec_of(die).bf16_peak.value for die in r.nodes(name)} for name in (one, other)
    )
    return first.isdisjoint(second)


def longest_pause_ns(r: Ran) -> int:
    """Longest time between two steps that a DP group ran one after the other."""
    ends: dict[e.GroupId, int] = {}
    longest = 0
    for step in r.of(e.StepEnded):
        longest = max(longest, step.start_ns - ends.get(step.group, step.start_ns))
        ends[step.group] = step.end_ns
    return longest


def drafts(r: Ran) -> Counter[int]:
    """Number of shares with so many drafts; those with an accepted one."""
    return Counter(len(share.drafts) for _, share in r.shares if share.num_accepted)


def lost_decode(r: Ran) -> tuple[int, int]:
    """Numbers of dies of the decode TE that was lost, and of the one in its place."""
    new = [dies for name, dies in r.after.items() if name.startswith("decode") and name not in r.before]
    return len(r.dies("decode")), sum(map(len, new))


class Seen(NamedTuple):
    """Row of the table: a run, whether it shows the mechanism, and a run without the mechanism."""

    asked: Asked
    look: Callable[[Ran], Any]
    without: Asked = Asked("monolithic")


def is_sooner(asked: Asked, off: str) -> Seen:
    """A run ends sooner than one with the mechanism switched off."""
    without = asked.set(off)
    return Seen(asked, lambda r: r.end_ns < ran(without).end_ns, without)


def moves_less(asked: Asked, off: str) -> Seen:
    """Engines move fewer bytes than with the mechanism switched off."""
    without = asked.set(off)
    return Seen(asked, lambda r: r.num_moved < ran(without).num_moved, without)


def is_less(asked: Asked, name: str, off: str) -> Seen:
    """Spans of a name take less time than with the mechanism switched off."""
    without = asked.set(off)
    return Seen(asked, lambda r: r.spent_ns(name) < ran(without).spent_ns(name), without)


COLOCATED, PD, APART = Asked("colocated"), Asked("pd"), Asked("moe-attention")
DP288, PRODUCTION, CM, MEGASCALE = (
    Asked(name) for name in ("dp288", "production", "cloudmatrix384", "megascale")
)
BYTES = COLOCATED._replace(has_bytes=True, tokens=3)
WIDE_CM = Asked("cloudmatrix384", ("prefill.max_num_batched_tokens=2048",), is_wide=True, tokens=3)
HETEROGENEOUS = Asked("heterogeneous")
LOST = PRODUCTION._replace(faults=(Fault(20.0, 9, "lost"),))
GLITCH = COLOCATED._replace(faults=(Fault(8000.0, 1, "glitch", code="aicore-exception"),))

SEEN: dict[str, Seen] = {
    "dispatch and combine by pull": Seen(COLOCATED, lambda r: r.names("XCCL") == {"dispatch", "combine"}),
    "FusedDispatch and FusedCombine by push": Seen(
        CM, lambda r: r.nodes("fused dispatch") and r.nodes("fused combine") and not r.nodes("dispatch")
    ),
    "A2E and E2A with trampolines": Seen(APART, lambda r: {"A2E", "E2A'"} <= r.names("XCCL")),
    "A2E and E2A by URMA": Seen(
        Asked("superpod", ("lockstep=false",), has_bytes=True, tokens=3),
        lambda r: {"A2E 6-7 pull", "E2A 6-7 pull"} <= r.names("URMA"),
    ),
    "M2N between network cards": Seen(MEGASCALE, lambda r: "N2M" in r.names("XCCL") and not r.nodes("E2A'")),
    "expert services, slots on servers": Seen(
        Asked("eaas"), lambda r: all(name.endswith(" clients") for name in r.names("MoE")) and r.names("MoE")
    ),
    "INT8 combine": moves_less(BYTES.set("combine=int8"), "combine=bf16"),
    "prefill and decode apart": Seen(
        PD,
        lambda r: (
            {(te, share.is_prefill) for te, share in r.shares} == {("prefill 0", True), ("decode 0", False)}
        ),
    ),
    "KV pulled by DMA (SDMA)": Seen(PD, lambda r: r.planes == {"UB"} and r.spans(lane="DMA")),
    "send and receive in 8 steps, a ring for each pair": Seen(PRODUCTION, has_a_ring_for_each_pair),
    "zero-copy and asynchronous send": Seen(
        PD.set("transfer_over=zero-copy"), lambda r: r.nodes("send 2") and not r.nodes("send 1")
    ),
    "KV by RoCE": Seen(CM, lambda r: r.planes == {"ROCE"}),
    "KV by VPC": Seen(HETEROGENEOUS.set("fabric=vpc"), lambda r: r.planes == {"VPC"}),
    "KV by layer": Seen(
        HETEROGENEOUS, lambda r: r.of(e.LayerEnded) and r.is_before(e.TransferBegan, e.Prefilled)
    ),
    "prefill on Ascend 910B": Seen(
        HETEROGENEOUS,
        lambda r: {moved.source for moved in r.trace.moved} & r.nodes("OProj inputs") & {*range(768, 784)},
    ),
    "attention and experts apart, persistent kernels": Seen(
        APART, lambda r: r.nodes("MLA") and r.nodes("Experts") and not r.nodes("MLA") & r.nodes("Experts")
    ),
    "DP domains that experts serve in turn": Seen(Asked("superpod"), are_served_in_turn),
    "two microbatches of attention dies": Seen(APART, lambda r: len(microbatches(r)) == 2),
    "ping-pong of three microbatches": Seen(MEGASCALE, lambda r: len(microbatches(r)) == 3),
    "attention and experts on other hardware": Seen(MEGASCALE, lambda r: has_other_dies(r, "MLA", "Experts")),
    "dataflow without barriers": Seen(
        APART.set("dataflow=true"), lambda r: len({name for name in r.names("MoE") if "clients" in name}) > 1
    ),
    "two microbatches, by cores in decode, by engines in prefill": Seen(WIDE_CM, overlap),
    "microbatches decided per step": Seen(WIDE_CM, decides),
    "SP-TP-SP": Seen(PRODUCTION, lambda r: "all-to-all" in r.names("XCCL", r.dies("prefill"))),
    "MLA of prompts unabsorbed": is_less(WIDE_CM, "MLA", "prefill_attention=absorbed"),
    "output projection with TP, attention without": Seen(
        PRODUCTION, lambda r: "reduce-scatter" in r.names("XCCL", r.dies("decode"))
    ),
    "copies of the shared expert on dies of their own": Seen(
        DP288, lambda r: not r.nodes("SharedExpert") and {16, 17} <= r.nodes("Experts")
    ),
    "one expert on each die (EP320)": Seen(
        CM, lambda r: {len(mem.slots) + mem.is_shared for mem in r.plan.tes[-1].memories} == {1}
    ),
    "MTP with one draft": Seen(DP288, lambda r: drafts(r).keys() == {1}),
    "MTP with two drafts": Seen(DP288.set("mtp=2"), lambda r: drafts(r)[2]),
    "drafts without a way back to the host": is_sooner(DP288, "execution.mtp=naive"),
    "decode admits before prefill": Seen(CM, lambda r: r.is_before(e.Booked, e.Prefilled)),
    "statuses of DP groups by all-gather": Seen(DP288, lambda r: r.spans(lane="XCCL statuses")),
    "steps planned ahead": Seen(DP288, lambda r: r.nodes("Resolve")),
    "garbage collected by hand": Seen(
        PD._replace(tokens=270), lambda r: longest_pause_ns(r) > 100_000_000, PD._replace(tokens=240)
    ),
    "launch threads pinned to cores": is_sooner(PD, "execution.pin_cores=false"),
    "compiled graphs cached": is_sooner(PD, "execution.cache_graphs=false"),
    "EPLB: collect, select, place, route": Seen(
        DP288.set("experts.balance_interval=0.005")._replace(tokens=60),
        lambda r: (
            {"Collect", "Route"} <= r.names("AIV") and r.nodes("prefetch experts") and r.of(e.ReplicasChanged)
        ),
    ),
    "link probing beside traffic": Seen(
        Asked("superpod", ("health.link_probe_s=0.01",)), lambda r: r.nodes("dummy payload")
    ),
    "rollback of a step": Seen(GLITCH, lambda r: [event.rung for event in r.of(e.Mended)] == ["run again"]),
    "failover, kill-P-to-preserve-D": Seen(
        LOST, lambda r: [event.reason for event in r.of(e.FailoverEnded)] == [None] and lost_decode(r)
    ),
    "vertical scale-down": Seen(LOST, lambda r: lost_decode(r) == (8, 4)),
}
