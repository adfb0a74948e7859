"""Times of the host's launches for a die (xDeepServe 2.3, CloudMatrix 4.2.4)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from xdeepserve.engine.deploy.deployment import ExecutionConfig
from xdeepserve.engine.plans import StepPlan
from xdeepserve.errors import ProtocolError
from xdeepserve.hw.die import Die


class Guards(NamedTuple):
    """Conditions of a captured graph; a step that differs in any of them needs another graph."""

    bucket: int  # rows, padded
    num_parts: int  # overlapping microbatches
    has_rows: bool
    has_logits: bool
    samples: bool  # some sequence's last row is in the step
    is_carried: bool  # planned before the step before had ended
    has_looks: bool  # at logits, to edit or report them

    @classmethod
    def of(cls, plan: StepPlan) -> Guards:
        return cls(
            plan.bucket,
            plan.num_parts,
            plan.num_tokens > 0,
            bool(plan.logit_rows),
            any(token < 0 for token in plan.next_token_ids),
            any(seq >= 0 for seq in plan.carried_seq),
            plan.num_looks > 0,
        )


class Launches(Protocol):
    """Receives the stages of a layer, and waits for their launch by the host."""

    @property
    def is_eager(self) -> bool: ...

    def stage(self, name: str) -> None: ...

    async def kernel(self, operators: int) -> None: ...


class Launcher:
    """Launches of a die's step by the host, as single operators or as a captured graph.

    Single-op: the host launches operator after operator, ahead of the die if it can; a kernel waits for its
    launch. Graph: the first step with given guards runs that way too and is captured as the list of its
    stages, those without rows included. Later steps with the same guards are replayed as one launch, whose
    time is the step's. A replay that departs from the list is an error: the guards are incomplete. Naive MTP
    needs the host again before each of the drafts' graphs. In lockstep the list lacks the stages of layers: a
    timetable runs them for all dies alike, and bills their launches with `launched_ns` and `op_ns`.
    """

    def __init__(self, die: Die, config: ExecutionConfig) -> None:
        self.die, self.config = die, config
        self.graphs: dict[Guards, tuple[str, ...]] = {}
        self.num_replays = 0
        self._guards: Guards | None = None  # of the step, if it is a graph
        self._captured: tuple[str, ...] | None = None  # the graph that is replayed
        self._stages: list[str] = []  # of the step, so far
        self.launched_ns = 0  # when the host has launched all operators so far
        self.op_ns = die.spec.dispatch_ns("op")
        self._graph_ns = die.spec.dispatch_ns("graph")
        self._sampling_ns = round(1e9 * die.spec.host_sampling.value)

    @property
    def is_eager(self) -> bool:
        """Whether the host launches operators one by one."""
        return self._captured is None

    def begin(self, plan: StepPlan) -> None:
        """Begin the launches of a step, when its plan has reached the die."""
        self.launched_ns = self.die.clock.now
        self._guards = Guards.of(plan) if plan.bucket else None
        self._captured = None if self._guards is None else self.graphs.get(self._guards)
        self._stages = []

    def stage(self, name: str) -> None:
        """Record a stage of the step, with rows or without; ProtocolError if the graph has another."""
        place, captured = len(self._stages), self._captured
        self._stages.append(name)
        if captured is not None and (place >= len(captured) or captured[place] != name):
            expected = captured[place] if place < len(captured) else "the end"
            raise self._departure(f"stage {place} is {name}, captured was {expected}")

    def end(self) -> None:
        """End a step: keep the stages as a graph, or check that the whole graph was replayed."""
        if self._guards is None:
            return
        if self._captured is None:
            self.graphs[self._guards] = tuple(self._stages)
            return
        self.num_replays += 1
        if len(self._stages) < len(self._captured):
            raise self._departure(f"it ended before stage {len(self._stages)}")

    def _departure(self, reason: str) -> ProtocolError:
        return ProtocolError(
            f"{self.die.name}: the replay of a graph departs from it: {reason}; {self._guards}"
        )

    async def kernel(self, operators: int) -> None:
        """Wait until the host has launched the next stage, which consists of so many operators."""
        if self.is_eager:
            self.launched_ns += operators * self.op_ns
            await self.die.clock.sleep_until(self.launched_ns)

    async def next_graph(self) -> None:
        """Wait for the host before an MTP pass, with naive MTP only.

        Pipelined, the pass was launched while the main model ran.
        """
        if self.config.mtp == "naive":
            graph_ns = 0 if self.config.mode == "op" else self._graph_ns
            await self.die.clock.sleep(self._sampling_ns + graph_ns)
            self.launched_ns = self.die.clock.now


class MicrobatchLaunches:
    """Launches of a microbatch; `report` passes all of them to the graph at the end.

    The stages of two microbatches mix as time goes, and differently each time. So the graph has them one
    microbatch after the other.
    """

    def __init__(self, launcher: Launches) -> None:
        self._launcher = launcher
        self._names: list[str] = []

    @property
    def is_eager(self) -> bool:
        """Whether the host launches operators one by one."""
        return self._launcher.is_eager

    def stage(self, name: str) -> None:
        """Record a stage of the microbatch; `report` tells the graph later."""
        self._names.append(name)

    async def kernel(self, operators: int) -> None:
        """Wait until the host has launched the next stage, which consists of so many operators."""
        await self._launcher.kernel(operators)

    def report(self) -> None:
        """Report all stages of the microbatch to the step's graph."""
        for name in self._names:
            self._launcher.stage(name)
