"""Draws in traces how a request goes through the eight steps of xDeepServe's Figure 17.

Each step is a span on the lane of the part that takes it, and arrows join the steps of one request. A span
lasts from the moment when the step could be taken until it was taken, so it shows waiting. Steps without
virtual time, such as the host's decisions, are drawn MARK_NS wide.
"""

from __future__ import annotations

from typing import Any

from xdeepserve.engine.dp import events
from xdeepserve.engine.dp.events import GroupId
from xdeepserve.engine.dp.group import TransferEnded
from xdeepserve.engine.numbers import StepNo
from xdeepserve.engine.te.te import TE
from xdeepserve.hw.pod import Pod

MARK_NS = 1000
STEPS = {
    1: "request arrives at the job executor",
    2: "prefill TE-shell schedules it onto a DP group",
    3: "DP group registers a PD transfer",
    4: "job executor sends it to a decode TE",
    5: "decode TE-shell picks a DP group",
    6: "DP group checks its blocks, asks DistFlow to receive",
    7: "DistFlow moves the bytes",
    8: "DP group learns of the end",
}
STEPS_LANE = "steps"  # a lane of a DP group's first die
GROUP = "DP group"  # the lane of steps 3, 6 and 8, on a group's first die


class Journey:
    """Draws events on trace lanes for the job executor, the TE-shells and the DP groups."""

    def __init__(self, pod: Pod) -> None:
        self.trace, self._clock = pod.trace, pod.clock
        self._since: dict[int, int] = {}  # when a request's next step could be taken, if it was not at once
        self._began_ns: dict[tuple[int, GroupId], int] = {}  # when a group registered its side of a transfer
        self._cut: dict[tuple[str, StepNo], int] = {}  # microbatches of steps that are not whole
        self._die: dict[str, int] = {}  # the first of each DP group
        self._tes: dict[str, TE] = {}
        self._job_executor = self.trace.add_node("job executor", 0)
        self._shells: dict[str, int] = {}
        self._decodes: set[str] = set()

    def join(self, te: TE, is_alone: bool) -> None:
        """Add the lanes of a TE that takes requests from now on."""
        name = te.sizes.place.name
        self._tes[name] = te
        self._die.update({str(group.id): group.dies[0].index for group in te.groups})
        label = "TE-shell" if is_alone else f"TE-shell of {name}"
        self._shells[name] = self.trace.add_node(label, 1 + len(self._shells))
        if te.sizes.place.role == "decode":
            self._decodes.add(name)

    def see(self, event: events.Observed) -> None:
        """Draw an event. After steps 1, 2, 4 and 5 the next step could be taken at once, so its span begins
        now."""
        # A TE warms up before it joins: those steps belong to no request.
        if isinstance(event, events.StepEnded) and event.group.te in self._tes:
            self._draw_step(event)
        elif isinstance(event, events.StepCut):
            self._cut[event.te, event.step] = event.num_parts
        if not isinstance(event, events.Event):
            return
        now, seq_id = self._clock.now, event.seq_id
        match event:
            case events.Assigned(te=te) | events.Sent(te=te):
                number = 1 if isinstance(event, events.Assigned) else 4
                self._take(number, seq_id, self._job_executor, "requests", te=te)
                self._since[seq_id] = now
            case events.Given(group=group):
                number = 5 if group.te in self._decodes else 2
                self._take(number, seq_id, self._shells[group.te], "requests", group=group.rank)
                self._since[seq_id] = now
            case events.Registered(group=group):
                self._since.pop(seq_id, None)
                self._take(3, seq_id, self._die[str(group)], GROUP)
            case events.TransferBegan(group=group):
                self._began_ns[seq_id, group] = now
                if not event.is_source:
                    self._take(6, seq_id, self._die[str(group)], GROUP)
            case TransferEnded():
                self._end_transfer(event, self._began_ns.pop((seq_id, event.group), event.completion.at_ns))
            case events.Ended():
                self._since.pop(seq_id, None)

    def _draw_step(self, step: events.StepEnded) -> None:
        """Draw a DP group's step on its first die with the rows in it, and count batch, KV blocks and
        queue."""
        te, die = self._tes[step.group.te], self._die[str(step.group)]
        num_prefill = sum(share.num_tokens for share in step.shares if share.is_prefill)
        num_decode = sum(1 + len(share.drafts) for share in step.shares if not share.is_prefill)
        kind = "prefill" if not num_decode else "decode" if not num_prefill else "prefill and decode"
        rows = num_prefill + num_decode
        name = f"{kind}, {rows} row{'s' if rows > 1 else ''}"
        args = {"step": step.step, "prefill rows": num_prefill, "decode rows": num_decode}
        args |= {"sequences": len(step.shares), "KV blocks": step.num_used_blocks}
        if (num_parts := self._cut.get((step.group.te, step.step))) is not None:
            args["microbatches"] = num_parts
        self.trace.span(die, STEPS_LANE, name, step.start_ns, step.end_ns, args)
        self.trace.count(die, "batch (sequences)", step.start_ns, len(step.shares))
        self.trace.count(die, "KV blocks in use", step.start_ns, step.num_used_blocks)
        self.trace.count(
            self._shells[step.group.te], "queue (sequences)", step.end_ns, te.te_shell.num_pending
        )

    def _end_transfer(self, event: TransferEnded, began_ns: int) -> None:
        """Draw steps 7 and 8, with an arrow for each part that has moved. A side's span begins when its group
        has registered it."""
        trace, seq_id, completion = self.trace, event.seq_id, event.completion
        if completion.error is not None:
            return
        die, peer = self._die[str(event.group)], self._die[completion.peer]
        lasting = f"{'3-8' if completion.is_source else '6-8'} request {seq_id}"
        trace.span(die, "DistFlow", lasting, began_ns, completion.at_ns, {"request": seq_id})
        called = f"KV of request {seq_id}"
        for part, ready_ns in enumerate(completion.ready_ns):
            trace.depart((die, peer, seq_id, part), called, die, "DistFlow", ready_ns, lasting)
        is_one_part = [move.parts for move in completion.moves] == [(0,)]
        for move in completion.moves:
            parts = "" if is_one_part else f", parts {', '.join(map(str, move.parts))}"
            name = f"7 {STEPS[7]} of request {seq_id}{parts}"
            args = {"request": seq_id, "step": 7, "parts": [*move.parts]}
            trace.link(f"request {seq_id}", die, "KV transfer", name, move.start_ns, move.end_ns, args)
            for part in move.parts:
                trace.arrive((peer, die, seq_id, part), called, die, "KV transfer", move.end_ns - 1, name)
        self._since.pop(seq_id, None)
        self._take(8, seq_id, die, GROUP)

    def _take(self, number: int, seq_id: int, node: int, lane: str, **args: Any) -> None:
        now = self._clock.now
        start = self._since.pop(seq_id, now)
        args = {"request": seq_id, "step": number, **args}
        name = f"{number} {STEPS[number]}"
        self.trace.link(f"request {seq_id}", node, lane, name, start, max(now, start + MARK_NS), args)
