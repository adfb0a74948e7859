"""Histories: requests of a pod and what happens to it meanwhile, as data that is served and then judged.

The bit-exactness matrix, rows of benches, the kept virtual times and the tests of faults are all told as
histories; what differs is who judges them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal, NamedTuple, TypeVar, get_args

import msgspec

from xdeepserve.engine.deploy.deployment import Role
from xdeepserve.engine.dp.events import Observed, StepEnded
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.request import EngineStats
from xdeepserve.engine.te.reports import TEReport
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.faults import Fault
from xdeepserve.hw.trace import Trace
from xdeepserve.llm import LLM, RequestOutput, digest
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.weights import Recipe

E = TypeVar("E", bound=Observed)


class TEChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A TE, or one of its expert servers, is added to the pod or taken away while it serves."""

    at_us: float  # of virtual time, from when the prompts come
    what: Literal["add", "drain", "remove", "add server", "remove server"]
    te: str | None = None  # its name; of one that comes, its role; of servers None for the first TE
    server: int | None = None  # its number; of one that comes None for any vacant seat

    def __str__(self) -> str:
        what, _, is_server = self.what.partition(" ")
        if not is_server:
            return f"{what} {self.te} at {self.at_us:g} us"
        return f"expert server {self.server} {'comes' if what == 'add' else 'leaves'} at {self.at_us:g} us"


class History(msgspec.Struct, frozen=True):
    """Requests of a pod, and the faults and changes that it has while it serves them.

    Prompts, `params` and `arrivals_ns` are those of `LLM.generate`. With `in_turn`, each prompt comes when
    the one before has been answered.
    """

    deployment: str
    settings: Sequence[str] = ()
    prompts: Sequence[list[int]] = ()
    params: SamplingParams | Sequence[SamplingParams] | None = None
    arrivals_ns: Sequence[int] | None = None
    faults: Sequence[Fault] = ()
    life: Sequence[TEChange] = ()
    clock_seed: int | None = None
    precision: Recipe = "int8"
    model: str | Checkpoint = "tiny-random"
    is_timing_only: bool = False
    in_turn: bool = False


class Told(NamedTuple):
    """Results of serving a history. `events` are of the kinds asked for, each with its virtual time [ns]."""

    outputs: list[RequestOutput]
    events: list[tuple[int, Observed]]
    stats: EngineStats
    tes: list[TEReport]
    lost: dict[str, XDeepServeError]  # TEs that were given up while others went on, and why
    trace: Trace

    @property
    def digest(self) -> str:
        """The sha256 of all tokens and their logits."""
        return digest(self.outputs)

    @property
    def end_ns(self) -> int:
        """Virtual time when the pod was at rest again."""
        return self.stats.virtual_ns

    @property
    def token_times(self) -> list[int]:
        """Times at which tokens left the pod [ns]; needs the events `StepEnded`."""
        return [step.end_ns for step in self.of(StepEnded) for share in step.shares for _ in share.token_ids]

    def of(self, kind: type[E]) -> list[E]:
        """List the events of a kind, in their order."""
        return [event for _, event in self.events if isinstance(event, kind)]


def serve(
    history: History,
    *,
    hears: tuple[type[Observed], ...] = (),
    around: Callable[[LLM], AbstractContextManager[object]] = contextlib.nullcontext,
    is_traced: bool = False,
    may_fail: bool = False,
) -> Told:
    """Serve a history through an LLM of its own, and check the integrity of its engine at the end.

    hears     kinds of events to keep; events are made only if there are some
    around    entered with the LLM before the prompts come, left when they are answered
    may_fail  if requests end with errors, keep their outputs instead of raising the first error
    """
    events: list[tuple[int, Observed]] = []
    with LLM(
        history.model,
        history.deployment,
        history.precision,
        overrides=history.settings,
        trace=is_traced,
        trace_dies=0,
        clock_seed=history.clock_seed,
        timing_only=history.is_timing_only,
        faults=history.faults,
    ) as llm:
        if hears:
            clock = llm.engine.plan.pod.clock
            llm.engine.observe(
                lambda event: events.append((clock.now, event)) if isinstance(event, hears) else None
            )
        try:
            with around(llm):
                outputs = _outputs(llm, history)
        except XDeepServeError as error:
            if not may_fail:
                raise
            outputs = list(error.outputs)
        engine, trace = llm.engine, llm.engine.plan.pod.trace
        engine.check_integrity()
        trace.is_on = False  # that the pod stops now is no part of the history
        return Told(outputs, [*events], engine.stats(), engine.tes(), dict(engine.lost), trace)


def _outputs(llm: LLM, history: History) -> list[RequestOutput]:
    prompts, params, keep = history.prompts, history.params, not history.is_timing_only
    if history.in_turn:
        each = params if isinstance(params, Sequence) else [params] * len(prompts)
        pairs = zip(prompts, each, strict=True)
        return [llm.generate([prompt], one, keep_logits=keep)[0] for prompt, one in pairs]
    meanwhile = partial(change_tes, history.life) if history.life else None
    arrivals = history.arrivals_ns
    return llm.generate(prompts, params, keep_logits=keep, arrivals_ns=arrivals, meanwhile=meanwhile)


async def change_tes(life: Sequence[TEChange], engine: Engine) -> None:
    """Add, drain and remove TEs and expert servers one after the other, each at its virtual time at the
    earliest."""
    clock = engine.plan.pod.clock
    start = clock.now
    for change in life:
        await clock.sleep_until(max(clock.now, start + round(1000 * change.at_us)))
        if change.what == "add server" and change.server is not None:
            for _ in range(10_000):  # how soon its place is free depends on the model
                seats = {seat.server: seat.presence for seat in engine.servers()}
                if seats[change.server] != "there":
                    break
                await clock.sleep(100_000)
        await make_change(engine, change)


async def make_change(engine: Engine, change: TEChange) -> None:
    """Make a change now. Raises RequestError or DeploymentError, with nothing changed, if it cannot be."""
    te = change.te or ""
    match change.what:
        case "add":
            role: Role = next(role for role in get_args(Role) if role == te)
            await engine.add_te(role)
        case "drain":
            await engine.drain(te)
        case "remove":
            await engine.remove(te)
        case "add server":
            await engine.add_server(change.te, change.server)
        case "remove server":
            seats = engine.servers()  # none while all TEs are started anew
            if change.server is not None and (te or seats):
                await engine.remove_server(te or seats[0].te, change.server)
