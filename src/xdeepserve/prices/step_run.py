"""A simulated decode iteration of a timing-only pod; all requests are in the middle of decoding."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import Deployment
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.sequence import SampledToken, Sequence
from xdeepserve.engine.recovery.ladder import Loss
from xdeepserve.engine.run.clock.wiring import DUMMY_TOKEN, ClockWiring
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.te.te import TE
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.spec import Spec
from xdeepserve.loop import run
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.step.passes import MTP_HEAD, MTP_INPUT, MTP_STATES
from xdeepserve.step.stage import stages

PARAMS = SamplingParams(max_tokens=None)  # of all requests


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection: a pod is millions of objects that live as long as the pod itself."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class DummyTokens(list[int]):
    """A list of `length` equal tokens that takes no memory, because a run needs tens of thousands."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:  # a slice too, whose list is real
        if isinstance(index, slice):
            return [DUMMY_TOKEN] * len(range(*index.indices(self._length)))
        return DUMMY_TOKEN

    def __iadd__(self, tokens: Any) -> DummyTokens:  # type: ignore[override,misc]
        self._length += len(tokens)
        return self


class DecodeRun(msgspec.Struct, frozen=True):
    """Times of a decode iteration, on average over the dies with DP groups.

    iteration_ns   from the plans' launch to the last die's report
    spent_ns       by stage and exchange, waiting included
    num_tokens     that were generated
    experts_ns     that the busiest of the dies with experts alone computes; 0 if there are none
    combine_ns     of `spent_ns`, what combines take without waiting for the last rank
    drafts_ns      of a traced run: the MTP layer and its drafts, on the first die
    """

    iteration_ns: int
    spent_ns: dict[str, float]
    num_requests: int
    num_tokens: int
    experts_ns: float = 0.0
    combine_ns: float = 0.0
    drafts_ns: float = 0.0

    def spent(self, *names: str) -> float:
        """Return the time in the stages of these names [ns]; 0 for stages that the model does not have."""
        return sum(self.spent_ns.get(name, 0.0) for name in names)

    def share(self, *names: str) -> float:
        """Return the time in the stages of these names, in percent of the iteration."""
        return 100 * self.spent(*names) / self.iteration_ns


class StepShare(NamedTuple):
    """A sequence's share of a step.

    With `rows` > 0: as many rows of its prompt, after `before` cached positions. With `rows` 0: the token
    after `before` positions, with the deployment's drafts.
    """

    before: int
    rows: int = 0


def decode_iteration(
    checkpoint: Checkpoint,
    deployment: Deployment,
    context: int,
    requests: int,
    timing: TimingConfig,
    trace: Path | bool = False,
    spec: Spec | None = None,
) -> DecodeRun:
    """Run a decode iteration: each DP group that decodes has `requests` sequences of `context` positions.
    Times by stage are of the first TE that decodes.

    `trace`: whether to record a timeline, or a file to write it to; `spec` describes dies other than a
    CloudMatrix384's.
    """
    shares = [StepShare(context)] * requests
    return one_step(checkpoint, deployment, lambda _: shares, timing, trace, spec)


def one_step(
    checkpoint: Checkpoint,
    deployment: Deployment,
    shares_of: Callable[[int], Seq[StepShare]],
    timing: TimingConfig,
    trace: Path | bool = False,
    spec: Spec | None = None,
) -> DecodeRun:
    """Run a step of all TEs that decode; each of their DP groups has the shares of its number.

    The step is alone: none is planned ahead while it runs, whose stages would count among its own.
    """
    if deployment.execution is not None:
        alone = msgspec.structs.replace(deployment.execution, overlap=False)
        deployment = msgspec.structs.replace(deployment, execution=alone)
    engine = Engine(PodPlan(checkpoint, deployment, timing=timing, trace=bool(trace), spec=spec))
    engine.load()
    clock = engine.plan.pod.clock
    tes = [te for te in engine.je.tes if te.sizes.place.role != "prefill"]
    groups = [(te, group) for te in tes for group in te.groups]
    given = [shares_of(number) for number in range(len(groups))]
    total = sum(map(len, given))
    ends: list[int] = []
    num_tokens = 0
    failures: list[Exception] = []
    done = asyncio.Event()

    def lose(te: TE, loss: Loss) -> None:
        te.kill()  # else the pod would wait for it
        failures.append(loss.reason)
        done.set()

    def finish(seq: Sequence, tokens: Seq[SampledToken]) -> bool:
        nonlocal num_tokens
        num_tokens += len(tokens)
        ends.append(clock.now)
        if len(ends) == total:
            done.set()
        return True

    for (te, group), shares in zip(groups, given, strict=True):
        for share in shares:
            te.te_shell.adopt(_resumed(group, len(group.places.running), share, finish), group)

    async def main() -> int:
        for te in engine.je.tes:
            te.on_loss = lose
        start = clock.now
        await engine.start()
        while len(ends) < total and not failures:
            await done.wait()
        await engine.stop()
        if failures:
            raise failures[0]
        return start

    with uncollected():
        start = run(main())
    if isinstance(trace, Path):
        engine.plan.pod.trace.write(trace)
    return _result(engine.plan, max(ends) - start, total, num_tokens)


def _result(plan: PodPlan, iteration_ns: int, num_requests: int, num_tokens: int) -> DecodeRun:
    """Sum the timelines of the first TE that decodes."""
    wiring = next(te.wiring for te in plan.tes if te.sizes.place.role != "prefill")
    assert isinstance(wiring, ClockWiring)
    spent: Counter[str] = Counter()
    for timelines in wiring.timelines.values():
        for timeline in timelines:
            spent.update(timeline.spent_ns)
    count = len(wiring.timelines)
    layers, first = plan.config.num_hidden_layers, wiring.team.dies[0]
    around = {stage.name for stage in stages(MTP_INPUT + MTP_HEAD + MTP_STATES)}
    drafts = [
        span
        for span in plan.pod.trace.spans
        if span.node == first and (span.name in around or (span.args or {}).get("layer", 0) >= layers)
    ]
    return DecodeRun(
        drafts_ns=max(s.end_ns for s in drafts) - min(s.start_ns for s in drafts) if drafts else 0.0,
        iteration_ns=iteration_ns,
        spent_ns={name: ns / count for name, ns in spent.items()},
        num_requests=num_requests,
        num_tokens=num_tokens,
        experts_ns=max((sum(each.spent_ns.values()) for each in wiring.expert_timelines), default=0),
        combine_ns=sum(hub.priced_ns["combine"] for hub in wiring.among),
    )


def _resumed(group: DPGroup, index: int, share: StepShare, finish: Any) -> Sequence:
    """Return a sequence added to a DP group, with its first `before` positions cached. Its next step verifies
    a draft after a token, or computes the rest of its prompt."""
    before, num_tokens = share.before, share.before + (share.rows or 1)
    seq = Sequence(
        seq_id=group.rank << 20 | index,
        choice=0,
        token_ids=DummyTokens(num_tokens),
        num_prompt=num_tokens if share.rows else before,
        max_tokens=max(1, before),
        params=PARAMS,
        seed=0,
        on_tokens=finish,
    )
    if not group.rtc.alloc_blocks(seq.holding, num_tokens + 1):
        raise XDeepServeError(
            f"DP group {group.rank}: no KV blocks for {num_tokens - 1} positions of request {index}"
        )
    seq.num_computed = before
    if not share.rows:
        seq.drafts = [DUMMY_TOKEN] * group.steps.mtp
    group.places.move(seq, "add")
    group.places.move(seq, "admit")
    return seq
