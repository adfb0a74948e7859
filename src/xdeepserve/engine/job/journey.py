"""A request's way through the eight steps of xDeepServe's Figure 17, for traces.

Each step is a span on a lane of who takes it, and arrows join the steps of one request. A span lasts from
when the step could be taken until it was: so it shows who waited, and for whom. What takes no virtual time,
as the host's decisions, is drawn MARK_NS wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xdeepserve.comm.distflow import Completion
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
GROUP = "DP group"  # the lane of steps 3, 6 and 8, on a group's first die


class Journey:
    """Lanes for the job executor and for the TE-shell of each of `tes`. Does nothing without a trace."""

    def __init__(self, pod: Pod, tes: Sequence[str]) -> None:
        self.trace, self._clock = pod.trace, pod.clock
        self._since: dict[int, int] = {}  # when a request's next step could be taken, if it was not at once
        self._shells: dict[str, int] = {}
        if self.trace.is_on:
            self._job_executor = self.trace.add_node("job executor", 0)
            for order, te in enumerate(tes, 1):
                name = f"TE-shell of {te}" if len(tes) > 1 else "TE-shell"
                self._shells[te] = self.trace.add_node(name, order)

    def at_job_executor(self, number: int, seq_id: int, te: str) -> None:
        """Steps 1 and 4, after which a TE has the request."""
        if self.trace.is_on:
            self._take(number, seq_id, self._job_executor, "requests", {"te": te})
            self._since[seq_id] = self._clock.now

    def at_shell(self, number: int, seq_id: int, te: str, group: int) -> None:
        """Steps 2 and 5, after which a DP group has it."""
        if self.trace.is_on:
            self._take(number, seq_id, self._shells[te], "requests", {"group": group})
            self._since[seq_id] = self._clock.now

    def at_group(self, number: int, seq_id: int, die: int) -> None:
        """Steps 3, 6 and 8."""
        if self.trace.is_on:
            if number != 6:
                self.forget(seq_id)
            self._take(number, seq_id, die, GROUP, {})

    def end_transfer(self, completion: Completion, die: int, peer: int, began_ns: int) -> None:
        """Steps 7 and 8, as a group has learnt of them, with an arrow for each part that has moved.

        `die` and `peer` are the groups' first dies, `began_ns` is when this one registered its side.
        """
        trace, seq_id = self.trace, completion.tag
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
        self.at_group(8, seq_id, die)

    def forget(self, seq_id: int) -> None:
        """The request waits for nothing any more."""
        self._since.pop(seq_id, None)

    def _take(self, number: int, seq_id: int, node: int, lane: str, args: dict[str, Any]) -> None:
        now = self._clock.now
        start = self._since.pop(seq_id, now)
        args = {"request": seq_id, "step": number, **args}
        name = f"{number} {STEPS[number]}"
        self.trace.link(f"request {seq_id}", node, lane, name, start, max(now, start + MARK_NS), args)
