"""Expert services beside the paper's figures, and the loss of expert servers (EaaS 5.3 to 5.6).

The first rows are DeepSeek-R1 on up to 64 dies, in time only: bench/papers/eaas_full_size.py. The
others are tokens per second before, during and after a loss (5.4, Figure 10), with every token computed.

In the pod, in virtual time, one of 64 servers is lost for good in the middle of a run. All its experts have
replicas, spread over the other servers. The paper publishes less than 2 % for a GPU out of 64. Rows give the
time until the loss is found, the delay of the last token, and how much longer steps take from then on than
the same steps without a loss. The model is a small one. Its time is mostly the fixed cost of exchanges, so a
server's share of the work hardly shows.

With server processes, in this computer's time, a process is killed and another takes its place while requests
run without a pause. The processes share this computer's cores with the client, so the loss of a server is not
the loss of its share of the capacity. The new process also uses cores while it loads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from xdeepserve.bench.papers import eaas_full_size
from xdeepserve.bench.report import Row
from xdeepserve.comm.services.layout import Presence
from xdeepserve.engine.dp.events import ServerHeard, StepEnded
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.errors import XDeepServeError
from xdeepserve.history import History, Told, serve
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import LLM
from xdeepserve.remote.servers_outside import ServersOutside

CLIENTS, SERVERS, SHARED = 8, 64, 2
POD = (
    f"attention.dies={CLIENTS}",
    f"experts.routed_dies={SERVERS - SHARED}",
    f"experts.shared_dies={SHARED}",
    "experts.copies=1",
    "max_model_len=128",
)
FEW = ("attention.dies=2", "experts.routed_dies=3", "experts.copies=1", "max_model_len=128")
NUM_PROMPTS, NUM_TOKENS = 32, 48
VICTIM = 5  # server
PATIENCE_S = 300.0


def all_rows() -> Iterator[Row]:
    """Yield all rows; virtual time comes first."""
    yield from eaas_full_size.rows()
    yield from lost_in_the_pod()
    for transport in ("pod", "shm", "tcp"):
        yield from _killed(transport)


def lost_in_the_pod() -> Iterator[Row]:
    """Measure the loss of a single server of 64 at half of the tokens, compared with the run without the
    loss."""
    history = History("eaas", POD, _prompts(), _params(), model="tiny")
    quiet = serve(history, hears=(StepEnded,))
    without = quiet.token_times
    half_ns = sorted(without)[len(without) // 2]
    fault = Fault(half_ns / 1e3, CLIENTS + VICTIM, "lost")
    lost = serve(msgspec.structs.replace(history, faults=(fault,)), hears=(StepEnded, ServerHeard))
    if lost.digest != quiet.digest:
        raise XDeepServeError("bench eaas: the loss of a server has changed bits")
    heard_ns = next(at for at, event in lost.events if isinstance(event, ServerHeard) and event.is_lost)
    prefix = f"eaas/pod/lost=1_of_{SERVERS}"
    yield Row(f"{prefix}/until_found", (heard_ns - half_ns) / 1e6, "ms", "measured")
    later = max(lost.token_times) - max(without)
    yield Row(f"{prefix}/last_token_later", later / 1e6, "ms", "measured")
    rate = len(without) / max(without) * 1e9
    yield Row(f"{prefix}/tokens_per_s_without", rate, "1/s", "measured")
    before = _steps(quiet)
    alike = [
        (there, here)
        for group, steps in _steps(lost).items()
        for there, here in zip(steps, before[group], strict=False)
        if there.start_ns > heard_ns
    ]
    took, would = (sum(step.end_ns - step.start_ns for step in each) for each in zip(*alike, strict=True))
    drop = 100 * (1 - would / took)
    yield Row(f"{prefix}/drop_once_found", drop, "%", "measured", "EaaS 5.4: less than 2 %")


def _steps(told: Told) -> dict[str, list[StepEnded]]:
    """Steps of each DP group, in order."""
    steps: dict[str, list[StepEnded]] = {}
    for step in told.of(StepEnded):
        steps.setdefault(str(step.group), []).append(step)
    return steps


def _prompts() -> list[list[int]]:
    return [[10 + i, 20 + 3 * i, 30, 40 + i] for i in range(NUM_PROMPTS)]


def _params() -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


# ---- this computer's time ---------------------------------------------------------------------------


def _killed(transport: str) -> Iterator[Row]:
    """Measure rounds of the same requests: before the loss, while a server is missing, and after its
    replacement."""
    prefix = f"eaas/{transport}/servers=3"
    with LLM("tiny", "eaas", overrides=[*FEW, f"experts.transport={transport}"]) as llm:
        ids = _round(llm)[1]  # all that is compiled is there
        yield _rate_of(f"{prefix}/before", llm, ids, 3)
        if transport == "pod":
            return
        (outside,) = llm.engine.plan.outside
        assert isinstance(outside, ServersOutside)
        seats = outside.watcher.seats
        outside.children.servers[1].kill()
        since = time.perf_counter()
        yield _rate_of(f"{prefix}/one_killed", llm, ids, 3)
        outside.add(1)
        rounds, begin = 0, time.perf_counter()
        while seats[1].presence != Presence.THERE:
            if time.perf_counter() - since > PATIENCE_S:
                raise XDeepServeError(f"bench eaas: no server has come to seat 1 within {PATIENCE_S:g} s")
            _check(_round(llm)[1], ids)
            rounds += 1
        took = time.perf_counter() - begin
        tokens = rounds * NUM_PROMPTS * NUM_TOKENS
        yield Row(f"{prefix}/while_another_loads", tokens / took, "1/s", "measured")
        yield Row(f"{prefix}/until_it_serves", took, "s", "measured")
        yield _rate_of(f"{prefix}/after", llm, ids, 3)


def _rate_of(name: str, llm: LLM, ids: list[list[int]], rounds: int) -> Row:
    """Measure tokens per second over some rounds, and check the token ids."""
    took = 0.0
    for _ in range(rounds):
        seconds, found = _round(llm)
        _check(found, ids)
        took += seconds
    return Row(name, rounds * NUM_PROMPTS * NUM_TOKENS / took, "1/s", "measured")


def _check(found: list[list[int]], expected: list[list[int]]) -> None:
    if found != expected:
        raise XDeepServeError("bench eaas: tokens have changed")


def _round(llm: LLM) -> tuple[float, list[list[int]]]:
    """Answer all prompts once; return the seconds and their tokens."""
    begin = time.perf_counter()
    outputs = llm.generate(_prompts(), _params())
    return time.perf_counter() - begin, [list(each.outputs[0].token_ids) for each in outputs]
