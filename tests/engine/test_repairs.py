"""Pages of HBM that are lost: what lay there is put right, and every request has the same bits, or ends."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tools import tokens_and_errors
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp.events import KVLost, Mended, Observed, Preempted
from xdeepserve.engine.loading import own_arrays
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.weight_digests import WeightDigests
from xdeepserve.errors import PageLostError
from xdeepserve.history import History, Told, serve
from xdeepserve.hw.faults import Fault
from xdeepserve.hw.memory import PAGE_NBYTES, SCRIBBLE
from xdeepserve.llm import RequestOutput, digest
from xdeepserve.model.presets import TinyCheckpoint

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
PROMPTS = [[1, 2, 3, 4, 5], [7] * 20, [9, 8]]
SIZE = ("max_model_len=64", "cache.num_blocks=24")
APART = ("attention.domains=2", "attention.dies=1", "experts.routed_dies=2", "experts.shared_dies=1")
PD = ("prefill.dies=2", "prefill.tp=2", "decode.dies=2")


def bad(at_us: float, die: int, page: int | str) -> Fault:
    return Fault(at_us, die, "bad-page", page=page)


def served(
    name: str,
    settings: Sequence[str],
    faults: Sequence[Fault] = (),
    prompts: Sequence[list[int]] = PROMPTS,
    params: SamplingParams = PARAMS,
) -> Told:
    @contextlib.contextmanager
    def around(llm: LLM) -> Iterator[None]:
        yield
        assert not llm.engine.plan.pod.memories.bad_pages

    history = History(name, (*SIZE, *settings), prompts, params, faults=faults)
    return serve(history, hears=(Observed,), around=around)


WAYS: list[tuple[str, tuple[str, ...], int]] = [  # with the die that loses a page
    ("monolithic", ("mtp=2", "execution.overlap=true"), 0),
    ("colocated", ("dies=2", "exchange=push"), 1),
    ("colocated", ("dies=2", "lockstep=true", "mtp=1"), 1),
    ("colocated", ("dies=2", "tp=2"), 0),
    ("colocated", ("dies=4", "lockstep=true", "tp=2", "pipeline.microbatches=2"), 2),
    ("colocated", ("dies=2", "pipeline.microbatches=2"), 0),
    ("colocated", ("dies=2", "experts.redundant_slots=1", "experts.balance_interval=0.0003"), 1),
    ("colocated", ("dies=3", "experts.experts_per_die=8", "experts.balance_interval=0.0003"), 1),
    ("pd", (*PD, "transfer=layer"), 0),
    ("pd", (*PD, "transfer_over=send-receive", "execution.decode.overlap=true"), 3),
    ("moe-attention", APART, 3),
    ("moe-attention", (*APART, "dataflow=true"), 0),
    ("moe-attention", (*APART, "lockstep=true", "mtp=2"), 4),
]
IDS = [f"{way[0]}-{'-'.join(way[1])}-die {way[2]}" for way in WAYS]


@pytest.mark.thin(3)
@pytest.mark.parametrize(("name", "settings", "die"), WAYS, ids=IDS)
def test_any_page_but_those_of_metadata(name: str, settings: tuple[str, ...], die: int) -> None:
    """Of weights, KV, exchanges, results or a step's own: at any time, the same bits."""
    quiet = served(name, settings)
    least_ns = quiet.end_ns * (0.99 if any("balance" in each for each in settings) else 1)
    with LLM("tiny-random", name, overrides=[*SIZE, *settings]) as llm:
        plan = llm.engine.plan.pod.memories.plans[die]
        first, stop = (-(-end // PAGE_NBYTES) for end in (plan.ends[0], plan.nbytes))  # after metadata
    rng = random.Random(f"{name} {settings}")
    for share in (0.1, 0.5, 0.9):
        faults = [
            bad(share * quiet.end_ns / 1000, die, rng.randrange(first, stop)),
            bad((share + 0.02) * quiet.end_ns / 1000, die, rng.randrange(first, stop)),
        ]
        told = served(name, settings, faults)
        assert told.digest == quiet.digest, faults
        assert told.of(Mended), faults
        assert told.lost == {}
        assert told.end_ns >= least_ns  # replicas that change at other steps may be better ones


KV: list[tuple[str, tuple[str, ...], int]] = [
    ("monolithic", (), 0),
    ("monolithic", ("mtp=2", "execution.overlap=true"), 0),
    ("colocated", ("dies=2", "tp=2"), 1),
    ("colocated", ("dies=2", "lockstep=true"), 0),
    ("pd", PD, 2),
    ("moe-attention", APART, 0),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize(("name", "settings", "die"), KV, ids=[f"{k[0]}-{'-'.join(k[1])}" for k in KV])
def test_sequences_whose_kv_is_lost_are_recomputed(name: str, settings: tuple[str, ...], die: int) -> None:
    quiet = served(name, settings)
    assert not quiet.of(Preempted)
    num = 0
    for share in (0.4, 0.7, 0.95):
        told = served(name, settings, [bad(share * quiet.end_ns / 1000, die, "kv/2/k_pe")])
        assert told.digest == quiet.digest
        num += len(told.of(Preempted))
    assert num


def test_the_hosts_of_all_dies_of_a_group_hear_which_bytes() -> None:
    (rollback,) = served("colocated", ("dies=2",), [bad(400.0, 1, 7)]).of(Mended)
    assert rollback.reason == (
        "die 1 reports hbm-page: a page of memory was lost, and a healthy one is in its place, "
        f"bytes {7 * PAGE_NBYTES} to {8 * PAGE_NBYTES}"
    )
    assert rollback.begun_ns == 400_000


def test_weights_come_from_storage_as_when_they_were_loaded(tiny: TinyCheckpoint) -> None:
    """Arrays of a die, one after the other: the same bytes, and as much time as storage takes for them."""
    with LLM(tiny, "moe-attention", overrides=[*SIZE, *APART]) as llm:
        expected = digest(llm.generate(PROMPTS, PARAMS, keep_logits=True))
    for die in (0, 2, 4):
        with LLM(tiny, "moe-attention", overrides=[*SIZE, *APART]) as llm:
            names = [name for name, _ in own_arrays(dict(llm.engine.plan.tes[0].all_memories)[die])][::5]
        names = [name for name in names if name not in ("cos", "sin")]  # these lie beside metadata
        faults = [bad(500.0 + 40_000.0 * i, die, f"weights/{name}") for i, name in enumerate(names)]

        async def look(engine: Engine, faults: Sequence[Fault] = faults) -> None:
            digests = WeightDigests()
            digests.learn(engine.plan.tes)
            clock, te = engine.plan.pod.clock, engine.plan.tes[0]
            for fault in faults:
                await clock.sleep_until(round(1000 * (fault.at_us or 0)) + 1)
                assert te.has_bad_pages
                await clock.sleep_until(round(1000 * (fault.at_us or 0)) + 39_000_000)
                assert not te.has_bad_pages
                digests.check(te, "storage")

        with LLM(tiny, "moe-attention", overrides=[*SIZE, *APART], faults=faults) as llm:
            assert digest(llm.generate(PROMPTS, PARAMS, keep_logits=True, meanwhile=look)) == expected
            spec = llm.engine.plan.pod.spec
            assert llm.engine.plan.pod.clock.now > len(names) * spec.vpc_startup.value * 1e9


def test_bytes_that_are_not_those_of_the_first_load_cost_the_te(monkeypatch: pytest.MonkeyPatch) -> None:
    from xdeepserve.engine import loading

    real = loading.iter_weights

    def damaged(*args: Any) -> Any:
        for name, expert, array in real(*args):
            yield name, expert, array if len(args) < 5 else array * 0

    monkeypatch.setattr(loading, "iter_weights", damaged)
    with pytest.raises(Exception, match=r"die 0: weights from storage came with digest .*: layers\.0\.w"):
        served("monolithic", (), [bad(900.0, 0, "weights/layers.0.wo")])


def test_cached_blocks_that_are_lost_are_never_found(tiny: TinyCheckpoint) -> None:
    """KV of an idle pod is lost: the same prompts, which would have hit, are computed anew."""
    prompts = [[7] * 40, [*range(35)]]

    def hits(pages: Sequence[int]) -> tuple[str, int]:
        with LLM(tiny, "monolithic", overrides=list(SIZE)) as llm:
            llm.generate(prompts, PARAMS)
            plan, prefixes = llm.engine.plan.pod.memories.plans[0], llm.engine.groups[0].scheduler.prefixes
            start, before = plan.find_page("kv/0/latent"), prefixes.num_hits
            assert start is not None
            for page in pages:
                llm.engine.plan.pod.lose_page(0, start // PAGE_NBYTES + page)
            outputs = llm.generate(prompts, PARAMS, keep_logits=True)
            llm.engine.check_integrity()
            return digest(outputs), prefixes.num_hits - before

    expected, num_hits = hits([])
    assert num_hits == 64
    assert hits([0, 1, 2]) == (expected, 0)
    digest_of_some, num_some = hits([1])
    assert digest_of_some == expected
    assert 0 <= num_some < 64


@pytest.mark.thin(3)
@pytest.mark.parametrize(("name", "settings", "die"), KV, ids=[f"{k[0]}-{'-'.join(k[1])}" for k in KV])
def test_the_papers_way_is_that_their_requests_fail(
    tiny: TinyCheckpoint, name: str, settings: tuple[str, ...], die: int
) -> None:
    """With kv_loss=fail: those whose KV lay there, by name; others have their bits, and the pod goes on."""
    asked = [([7 + i] * (6 + 9 * i), PARAMS) for i in range(6)]
    ways = [*SIZE, *settings, "recovery.kv_loss=fail"]
    with LLM(tiny, name, overrides=ways) as llm:
        expected, end_us = tokens_and_errors(llm, asked), llm.engine.plan.pod.clock.now / 1000
    num_failed = num_equal = 0
    for share in (0.3, 0.6, 0.9):
        with LLM(tiny, name, overrides=ways, faults=[bad(share * end_us, die, "kv/2/k_pe")]) as llm:
            for want, found in zip(expected, tokens_and_errors(llm, asked), strict=True):
                if isinstance(found, str):
                    assert found.startswith(f"die {die} reports hbm-page: a page of memory was lost, and a")
                    num_failed += 1
                else:
                    assert found == want
                    num_equal += 1
            llm.engine.check_integrity()
            assert not llm.engine.lost
            assert tokens_and_errors(llm, asked) == expected
    assert num_failed
    assert num_equal


def test_layers_that_have_left_are_taken_back() -> None:
    """By layer: KV of a prompt's earlier chunk is lost while its last chunk sends its layers."""
    settings = (*PD, "transfer=layer", "scheduler.max_num_batched_tokens=16")
    quiet = served("pd", settings, prompts=[[5] * 40])
    taken_back = 0
    for at in range(5, 100, 9):
        told = served("pd", settings, [bad(at * quiet.end_ns / 100_000, 0, "kv/0/latent")], [[5] * 40])
        assert told.digest == quiet.digest
        taken_back += len(told.of(KVLost))
    assert taken_back


def test_a_page_of_metadata_costs_the_te() -> None:
    with pytest.raises(PageLostError, match="die 0 reports hbm-page"):
        served("colocated", ("dies=2",), [bad(900.0, 0, 0)])
    two = ("prefill.count=2", "prefill.dies=1", "decode.dies=1")
    quiet = served("pd", two)
    told = served("pd", two, [bad(300.0, 0, 0)])
    assert told.digest == quiet.digest
    assert [*told.lost] == ["prefill 0"]


def test_stage_2_gives_the_te_up() -> None:
    with pytest.raises(PageLostError, match="die 0 reports hbm-page"):
        served("monolithic", ("recovery.stage=2",), [bad(900.0, 0, "kv/0/latent")])


def test_however_many_are_lost() -> None:
    """Each is put right, so that no number in a row is too many; also in the middle of putting right."""
    quiet = served("colocated", ("dies=2",))
    faults = [bad(900.0 + i, i % 2, "kv/0/latent" if i % 3 else "weights/layers.0.wo") for i in range(12)]
    told = served("colocated", ("dies=2",), faults)
    assert told.digest == quiet.digest
    assert told.lost == {}


def test_a_te_that_loads_loses_a_page(tiny: TinyCheckpoint) -> None:
    """What has come of its weights is read again: it joins, and answers."""
    quiet = served("monolithic", ())
    for page in ("weights/layers.0.wo", "weights/layers.1.gate", "kv/0/latent", 0):

        async def one_more(engine: Engine, page: int | str = page) -> None:
            pod = engine.plan.pod
            joining = pod.clock.spawn(engine.add_te("both", "storage"))
            while not any(2 * each.done > each.total for each in engine.plan.loadings.values()):
                await pod.clock.sleep(1000)
            pod.lose_page(1, page)
            await joining

        with LLM(tiny, "monolithic", overrides=list(SIZE)) as llm:
            llm.generate(PROMPTS, PARAMS, meanwhile=one_more)
            assert [te.num_reports for te in llm.engine.plan.tes] == [0, 1]
            assert not llm.engine.plan.pod.memories.bad_pages
            assert digest(llm.generate(PROMPTS, PARAMS, keep_logits=True)) == quiet.digest


def test_what_was_there_is_scribbled_over(tiny: TinyCheckpoint) -> None:
    with LLM(tiny, "monolithic", overrides=list(SIZE)) as llm:
        pod = llm.engine.plan.pod
        memory = pod.memory(0)
        start = pod.memories.plans[0].find_page("weights/layers.0.wo")
        assert start is not None
        pod.lose_page(0, start // PAGE_NBYTES)
        assert bytes(memory.read(start, PAGE_NBYTES)) == bytes([SCRIBBLE]) * PAGE_NBYTES
        llm.generate(PROMPTS, PARAMS)
        assert bytes(memory.read(start, PAGE_NBYTES)) != bytes([SCRIBBLE]) * PAGE_NBYTES


MOVING: list[tuple[str, tuple[str, ...], int, str]] = [
    ("pd", PD, 0, "kv/1/latent"),
    ("pd", (*PD, "transfer=layer"), 1, "kv/1/latent"),
    ("pd", PD, 2, "kv/1/latent"),
    ("pd", (*PD, "transfer=layer", "transfer_over=send-receive"), 3, "kv/1/latent"),
    ("pd", (*PD, "transfer_over=send-receive"), 0, "kv.rings"),
    ("pd", (*PD, "transfer_over=send-receive"), 2, "kv.rings"),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize(("name", "settings", "die", "page"), MOVING, ids=[f"{m[1:]}" for m in MOVING])
def test_kv_on_its_way(name: str, settings: tuple[str, ...], die: int, page: str) -> None:
    """Lost at either end, in the middle of transfers: it is computed again where it arrives."""
    quiet = served(name, settings)
    preempted = 0
    for at_ns in sorted({at_ns for at_ns, event in quiet.events if "Transfer" in str(event)}):
        for later_ns in (1, 900, 3000):
            told = served(name, settings, [bad((at_ns + later_ns) / 1000, die, page)])
            assert told.digest == quiet.digest, at_ns + later_ns
            assert told.lost == {}
            preempted += len(told.of(Preempted))
    assert preempted or "rings" in page


def test_kv_on_its_way_to_the_host_and_back(tiny: TinyCheckpoint) -> None:
    """Swapped out and in, saved and loaded: what was lost on the way is never read."""
    settings = (
        "cache.num_blocks=5",
        "cache.num_host_blocks=12",
        "cache.preemption=swap",
        "cache.load=always",
        "scheduler.max_num_seqs=4",
    )

    def ask(llm: LLM) -> list[RequestOutput]:
        outputs = llm.generate(
            [[i] * 20 for i in range(4)], SamplingParams(max_tokens=14, ignore_eos=True), keep_logits=True
        )
        return outputs + llm.generate([[i] * 20 for i in range(4)], PARAMS, keep_logits=True)

    with LLM(tiny, "monolithic", overrides=["max_model_len=64", *settings], trace=True) as llm:
        expected = digest(ask(llm))
        spans = [span for span in llm.engine.plan.pod.trace.spans if span.name == "KV blocks"]
    assert len(spans) > 8
    for span in spans:
        at_us = (span.start_ns + span.end_ns) / 2000
        faults = [bad(at_us, 0, "kv/0/latent")]
        with LLM(tiny, "monolithic", overrides=[*SIZE, *settings], faults=faults) as llm:
            assert digest(ask(llm)) == expected, at_us
            llm.engine.check_integrity()
            assert not llm.engine.plan.pod.memories.bad_pages


def test_nothing_that_is_lost_goes_to_the_memory_pool(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """Blocks on their way there: they are not kept, and what the pool has is as it should be."""

    def run(number: int, faults: Sequence[Fault] = (), trace: bool = False) -> tuple[str, int, list[float]]:
        (tmp_path / str(number)).mkdir(exist_ok=True)
        settings = [f"ems.path={tmp_path / str(number)}", "ems.servers=1", "ems.block_size=16", *SIZE]
        with LLM(tiny, "monolithic", overrides=settings, faults=faults, trace=trace) as llm:
            value = digest(llm.generate([[3] * 40, [*range(34)]], PARAMS, keep_logits=True))
            spans = [each for each in llm.engine.plan.pod.trace.spans if each.name == "KV blocks"]
            pool = llm.engine.groups[0].scheduler.pool
            assert pool is not None
            return value, pool.num_hits, [(each.start_ns + each.end_ns) / 2000 for each in spans]

    expected, _, moments = run(0, trace=True)
    assert moments
    assert run(0)[:2] == (expected, 64)
    kept = []
    for number, at_us in enumerate(moments, start=1):
        assert run(number, [bad(at_us, 0, "kv/0/latent")])[0] == expected
        again, num_hits, _ = run(number)
        assert again == expected
        kept.append(num_hits)
    assert min(kept) < 64


@pytest.mark.thin(2)
@pytest.mark.parametrize("settings", [("lockstep=true",), ("dies=2",), ("dies=2", "mtp=2")], ids=str)
@pytest.mark.parametrize("every", [20, pytest.param(2, marks=pytest.mark.campaign)])
def test_steps_that_were_planned_ahead_are_planned_anew(settings: tuple[str, ...], every: int) -> None:
    """What they would find in a die's results of a step that has ended may be lost; blocks that the next step
    copies on write are those of before until then."""
    ahead = (*settings, "execution.overlap=true")
    params = SamplingParams(max_tokens=9, ignore_eos=True, n=2, seed=3)
    prompts = [[7] * 18, [7] * 12, [*range(16)]]
    quiet = served("colocated", ahead, (), prompts, params)
    for number in range(4, 60, every):
        for page in ("sampled/0", "sampled/1", "hidden"):
            faults = [bad(number * quiet.end_ns / 60_000, 0, page)]
            told = served("colocated", ahead, faults, prompts, params)
            assert told.digest == quiet.digest, (number, page)
