"""Glitches: all dies of a TE go back to the iteration before, and run it again, with the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import generate_latest

from xdeepserve import LLM, SamplingParams
from xdeepserve.api.server.engine_metrics import EngineCollector
from xdeepserve.engine.die.drafts import Drafter
from xdeepserve.engine.dp.events import Mended, StepEnded
from xdeepserve.engine.messages import CopyBlocks
from xdeepserve.engine.plans import BlockCopy
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.te.reports import TEHealth
from xdeepserve.errors import DeploymentError, XDeepServeError
from xdeepserve.history import History, Told, serve
from xdeepserve.hw.die import Die
from xdeepserve.hw.faults import Fault
from xdeepserve.model.presets import TinyCheckpoint

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
PROMPTS = [[1, 2, 3, 4, 5], [7] * 20, [9, 8]]
SIZE = "max_model_len=64"
APART = ("attention.domains=2", "attention.dies=1", "experts.routed_dies=2", "experts.shared_dies=1")


def glitches(*at: tuple[float, int], code: str = "aicore-exception") -> tuple[Fault, ...]:
    return tuple(Fault(at_us, die, "glitch", code=code) for at_us, die in at)


def served(name: str, settings: Sequence[str], faults: Sequence[Fault] = ()) -> Told:
    return serve(History(name, (SIZE, *settings), PROMPTS, PARAMS, faults=faults), hears=(Mended,))


WAYS: list[tuple[str, tuple[str, ...], int]] = [  # with the die that glitches
    ("monolithic", ("mtp=2", "execution.overlap=true"), 0),
    ("colocated", ("dies=2", "exchange=push"), 1),
    ("colocated", ("dies=2", "lockstep=true", "mtp=1"), 1),
    ("colocated", ("dies=4", "lockstep=true", "tp=2", "pipeline.microbatches=2"), 2),
    ("colocated", ("dies=4", "lockstep=true", "o_proj_tp=2", "exchange=push", "mtp=1"), 3),
    ("colocated", ("dies=2", "tp=2"), 0),
    ("colocated", ("dies=2", "o_proj_tp=2"), 1),
    ("colocated", ("dies=2", "pipeline.microbatches=2"), 0),
    ("pd", ("prefill.dies=2", "prefill.tp=2", "decode.dies=2", "transfer=layer"), 3),
    ("moe-attention", APART, 3),
    ("moe-attention", (*APART, "dataflow=true"), 2),
    ("moe-attention", (*APART, "dataflow=true", "mtp=2", "execution.overlap=true"), 1),
    ("moe-attention", (*APART, "lockstep=true", "mtp=2"), 4),
    ("transformerless", (*APART, "prefill.dies=2", "prefill.tp=1", "execution.decode.overlap=true"), 4),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize(("name", "settings", "die"), WAYS, ids=[f"{w[0]}-{'-'.join(w[1])}" for w in WAYS])
def test_the_same_bits_in_every_mode(name: str, settings: tuple[str, ...], die: int) -> None:
    quiet = served(name, settings)
    assert quiet.events == []
    # An expert die that serves whoever comes waits most of the time, and a glitch hits what it does.
    shares = (0.1,) if die == 2 and settings[-1] == "dataflow=true" else (0.05, 0.37, 0.62, 0.84)
    at = [(share * quiet.end_ns / 1000, die) for share in shares]
    again = served(name, settings, glitches(*at))
    assert again.digest == quiet.digest
    epochs = [each.epoch for each in again.of(Mended)]
    assert epochs
    assert epochs == list(range(1, 1 + len(epochs)))
    assert again.lost == {}
    assert again.end_ns > quiet.end_ns


def test_the_host_says_when_and_why() -> None:
    (rollback,) = served("colocated", ["dies=2"], glitches((400.0, 1), code="link-error")).of(Mended)
    assert (rollback.te, rollback.epoch) == ("te", 1)
    assert rollback.reason == (
        "die 1 reports link-error: a link has given a packet up after sending it again and again"
    )
    assert rollback.begun_ns == 400_000


def test_the_endpoint_is_told(tiny: TinyCheckpoint) -> None:
    """Which stage a TE is at and why, while it is; and how often it has been there."""
    seen: list[TEHealth] = []

    async def look(engine: Engine) -> None:
        for at_ns in (399_999, 400_001, 500_000):
            await engine.plan.pod.clock.sleep_until(at_ns)
            seen.extend(engine.health())

    with LLM(tiny, "colocated", overrides=[SIZE, "dies=2"], faults=glitches((400.0, 1))) as llm:
        llm.generate(PROMPTS, PARAMS, meanwhile=look)
        text = generate_latest(EngineCollector("m", llm.engine.stats)).decode()
    why = "stage 3: die 1 reports aicore-exception: a kernel on AI cores has ended with an exception"
    assert [(te.num_rollbacks, te.recovering) for te in seen] == [(0, None), (1, why), (1, None)]
    for stage, number in (("2", 0), ("3", 1)):
        assert f'xdeepserve:recoveries_total{{model_name="m",stage="{stage}"}} {number}.0' in text


@pytest.mark.parametrize("settings", [[*APART], [*APART, "dataflow=true"]], ids=["barriers", "flows"])
def test_it_goes_on_where_nothing_is_computed(settings: list[str]) -> None:
    """In a run that only takes time, at least as many steps are run, and all end."""

    history = History("moe-attention", (SIZE, *settings), PROMPTS, PARAMS, is_timing_only=True)
    quiet_ns = serve(history).end_ns
    for die in range(5):
        told = serve(replace(history, faults=glitches((quiet_ns / 3000, die))))
        assert [len(each.outputs[0].token_ids) for each in told.outputs] == [6, 6, 6]
        assert (told.stats.num_recoveries["3"], told.end_ns > quiet_ns) in ((1, True), (0, False))


def test_dies_draw_their_rollback() -> None:
    history = History("colocated", (SIZE, "dies=2"), PROMPTS, PARAMS, faults=glitches((400.0, 1)))
    spans = [span for span in serve(history, is_traced=True).trace.spans if span.lane == "recovery"]
    assert [(span.node, span.name) for span in spans] == [(die, "rolled back to epoch 1") for die in (0, 1)]


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (["recovery.stage=2"], "aicore-exception"),
        (["recovery.max_rollbacks=0"], "aicore-exception"),
        ([], "unspecified"),
    ],
)
def test_where_it_is_not_to_be_tried_the_te_is_given_up(settings: list[str], code: str) -> None:
    two = ["prefill.count=2", "prefill.dies=1", "prefill.tp=1", "decode.dies=1"]
    again = served("pd", [*two, *settings], glitches((4000.0, 0), code=code))
    assert again.digest == served("pd", two).digest
    assert again.events == []
    assert list(again.lost) == ["prefill 0"]
    assert str(again.lost["prefill 0"]).startswith(f"die 0 reports {code}: ")


def test_so_often_in_a_row_and_no_more() -> None:
    faults = glitches(*((400.0 + 40 * number, 1) for number in range(4)))
    assert len(served("colocated", ["dies=2"], faults).events) == 4
    with pytest.raises(XDeepServeError, match=r"^die 1 reports aicore-exception"):
        served("colocated", ["dies=2", "recovery.max_rollbacks=3"], faults)


def test_a_die_that_is_lost_does_not_come_to_the_barrier() -> None:
    faults = (*glitches((400.0, 1)), Fault(400.5, 0, "lost"))
    with pytest.raises(
        XDeepServeError, match=r"rollback: deadline passed .* waits for peer \[0\], field epoch"
    ):
        served("colocated", ["dies=2"], faults)


def test_an_idle_die_has_nothing_that_could_fail() -> None:
    pod = ["prefill.dies=1", "prefill.tp=1", "decode.dies=1"]
    assert served("pd", pod, glitches((50.0, 1))).events == []


def test_drafts_are_made_of_what_was_there_before(tiny: TinyCheckpoint) -> None:
    """The states that MTP keeps from step to step are overwritten in place: a step that fails after that, and
    is run again, finds those of the step before it."""
    kept: list[int] = []
    moments: list[float] = []

    def proposed(faults: Sequence[Fault]) -> list[tuple[int, ...]]:
        made = []
        with LLM(tiny, "monolithic", overrides=[SIZE, "mtp=2"], faults=faults, trace=True) as llm:
            llm.engine.observe(
                lambda event: made.extend(share.proposed for share in getattr(event, "shares", ()))
            )
            llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3))
            drafter = llm.engine.je.tes[0].executors[0].drafter
            assert isinstance(drafter, Drafter)
            kept.append(len(drafter.overwritten))
            spans = llm.engine.plan.pod.trace.spans
            moments.extend(span.end_ns / 1000 + 0.5 for span in spans if span.name == "DraftState")
        return made

    quiet = proposed(())
    for at_us in tuple(moments):
        assert proposed(glitches((at_us, 0))) == quiet
    assert max(kept) <= 2


def test_each_group_keeps_the_states_of_steps_that_have_happened() -> None:
    """Where tokens flow groups number their steps by themselves: of one that is at its tenth step that one is
    rolled back, and not also the ninth because another group is at its second."""

    settings = (SIZE, *APART, "dataflow=true", "mtp=2")
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3)
    history = History("moe-attention", settings, PROMPTS[:2], params, [0, 8_000_000])

    def proposed(faults: Sequence[Fault]) -> dict[int, list[tuple[int, ...]]]:
        made: dict[int, list[tuple[int, ...]]] = {}
        told = serve(replace(history, faults=faults), hears=(StepEnded,))
        assert told.stats.num_recoveries["3"] == len(faults)
        for share in (share for step in told.of(StepEnded) for share in step.shares):
            made.setdefault(share.seq_id, []).append(share.proposed)
        return made

    quiet = proposed(())
    assert sorted(quiet) == [0, 1]
    for at_us in (9_000, 11_300, 13_700):
        assert proposed(glitches((at_us, 1))) == quiet


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("recovery.stage=4", "recovery.stage must be 2 or 3, found 4"),
        ("recovery.max_rollbacks=-1", "recovery.max_rollbacks must be 0 or more, found -1"),
    ],
)
def test_settings_that_cannot_be(tiny: TinyCheckpoint, setting: str, reason: str) -> None:
    with pytest.raises(DeploymentError, match=reason):
        LLM(tiny, "colocated", overrides=[setting])


def test_kernels_that_send_kv_are_run_again() -> None:
    """A glitch of either die in the middle of a message: no request knows."""
    settings = ("prefill.dies=2", "prefill.tp=2", "decode.dies=2", "transfer_over=send-receive")
    quiet = serve(History("pd", (SIZE, *settings), PROMPTS, PARAMS), is_traced=True)
    spans = [s for s in quiet.trace.spans if s.name.startswith(("send ", "receive "))]
    assert spans
    for span in spans:
        at_us = (span.start_ns + span.end_ns) / 2000
        assert served("pd", settings, glitches((at_us, span.node))).digest == quiet.digest


def test_blocks_are_copied_once_unless_what_is_copied_is_written_again(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step has copied before it ran may be gone when it is run again: its slot is another block's."""
    copied: list[tuple[BlockCopy, ...]] = []
    put = Die.put

    def seen(self: Die, command: Struct, delay_ns: int = 0) -> None:
        if isinstance(command, CopyBlocks):
            copied.append(tuple(command.copies))
        put(self, command, delay_ns)

    monkeypatch.setattr(Die, "put", seen)
    choices = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=3, n=3)

    def copies(faults: Sequence[Fault] = ()) -> tuple[list[tuple[BlockCopy, ...]], int, int]:
        copied.clear()
        with LLM(tiny, "monolithic", overrides=[SIZE], faults=faults) as llm:
            llm.generate([[7] * 20], choices)
            return list(copied), llm.engine.stats().num_recoveries["3"], llm.engine.plan.pod.clock.now

    once, _, end_ns = copies()
    assert len(once) == 1
    assert len(once[0]) > 1
    rolled_back = 0
    for share in range(1, 10):
        again, count, _ = copies(glitches((share / 10 * end_ns / 1000, 0)))
        assert again == once
        rolled_back += count
    assert rolled_back > 4
