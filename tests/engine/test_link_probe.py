"""Dummy payloads tell a link fault from decode that is saturated, and from a die that is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.comm.distflow.backends import UbBackend
from xdeepserve.comm.distflow.channels import Channels, channel_layout, plan_channels
from xdeepserve.comm.distflow.link_probe import plan_link_probe, probe
from xdeepserve.comm.distflow.send_receive import SendReceiveBackend
from xdeepserve.engine.deploy.deployment import Over
from xdeepserve.engine.dp.events import LinkChanged, Observed
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import TransferError
from xdeepserve.history import History, Told, serve
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.faults import Fault, schedule
from xdeepserve.hw.memory import Address
from xdeepserve.hw.pod import Pod
from xdeepserve.model.presets import TinyCheckpoint

PAIR = ("prefill.dies=1", "prefill.tp=1", "decode.dies=2", "max_model_len=64", "checksums=true")
PROMPTS = [[1, 2, 3], [7] * 20]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
OVER = ("dma", "send-receive", "zero-copy")
LINK = (0, 2)  # from prefill to a decode die


def fault(kind: str, for_us: float | None = None, factor: float | None = None) -> Fault:
    return Fault(0.0, link=LINK, plane="ub", kind=kind, for_us=for_us, factor=factor)  # type: ignore[arg-type]


def served(settings: Sequence[str], faults: Sequence[Fault] = ()) -> Told:
    return serve(History("pd", (*PAIR, *settings), PROMPTS, PARAMS, faults=faults))


@pytest.mark.parametrize(
    ("over", "faults", "verdict"),
    [
        *((over, (), "well") for over in OVER),
        *(
            (over, (fault("slow", 1e8, factor=factor),), "slow")
            for over in OVER
            for factor in (5, 100, 1e4, 1e6)
        ),
        *((over, (fault("slow", 1e6, factor=2),), "well") for over in OVER),
        ("dma", (fault("blocked", 500.0),), "delayed"),
        ("dma", (fault("blocked", 1e9),), "blocked"),
        *((over, (fault("down"),), "blocked") for over in OVER),
        *((over, (Fault(0.0, 2, "lost"),), "lost") for over in OVER),
    ],
)
def test_what_becomes_of_a_dummy_payload(
    tiny: TinyCheckpoint, over: str, faults: tuple[Fault, ...], verdict: str
) -> None:
    seen: list[str] = []

    async def look(engine: Engine) -> None:
        await engine.plan.pod.clock.sleep(10)
        link, _ = engine.je.links
        seen.append(await link.probe(link.tes[0].groups[0]))

    settings = [*PAIR, "decode.count=2", f"transfer_over={over}"]  # so that others go on
    with LLM(tiny, "pd", overrides=settings, faults=faults) as llm:
        llm.generate(PROMPTS, PARAMS, meanwhile=look)
    assert seen == [verdict]


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize(
    ("factor", "beside", "verdict"),
    [(1, 0, "well"), (1, 200, "delayed"), (5, 200, "slow"), (1e4, 200, "slow")],
)
def test_payloads_behind_traffic_are_delayed_and_slow_if_the_link_is(
    over: Over, factor: float, beside: int, verdict: str
) -> None:
    """Decode is saturated if payloads wait behind traffic; on a slow link they take long by themselves."""
    pod, nbytes = Pod(), 4096
    for die in LINK:
        plan = pod.plan(die)
        plan_link_probe(plan, nbytes)
        plan_channels(plan, channel_layout(has_rings=over == "send-receive"), 1)
        plan.app.alloc("data", nbytes)
    pod.materialise()
    if factor > 1:
        schedule([fault("slow", 1e9, factor)], pod)
    source, target = [Address(die, pod.memory(die).app.regions["data"].offset) for die in LINK]

    async def found() -> str:
        clock = pod.clock
        await clock.sleep(10)
        channels = Channels(pod, channel_layout(has_rings=over == "send-receive"))
        backend = UbBackend(pod) if over == "dma" else SendReceiveBackend(channels, 10**10)
        traffic = [backend.move([Copy(source, target, nbytes)], "KV") for _ in range(beside)]
        *_, verdict = await clock.gather(*traffic, probe(pod, backend, [LINK], 10**10))
        return str(verdict)

    async def run() -> str:
        return await pod.clock.spawn(found())

    assert asyncio.run(run()) == verdict


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize(("factor", "verdict"), [(None, "well"), (2, "well"), (5, "slow"), (1e5, "slow")])
def test_time_only_runs_find_what_others_find(
    tiny: TinyCheckpoint, over: str, factor: float | None, verdict: str
) -> None:
    settings = [*PAIR[:-1], f"transfer_over={over}", "health.link_probe_s=0.001"]
    faults = [] if factor is None else [fault("slow", 1e9, factor)]
    with LLM(tiny, "pd", overrides=settings, faults=faults, timing_only=True, progress=False) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True, temperature=0))
        (link,) = llm.engine.je.links
    assert link.verdict == verdict


@pytest.mark.parametrize("transfer", ["request", "layer"])
@pytest.mark.parametrize(
    "broken", [fault("flipped"), fault("down", 4_000.0)], ids=["flipped", "down for a while"]
)
def test_what_is_over_is_tried_again(broken: Fault, transfer: str) -> None:
    """There is one link, and a request that it fails goes by it once more, with the same bits."""
    settings = [f"transfer={transfer}"]
    again = served(settings, [broken])
    assert again.digest == served(settings).digest
    assert {te.links for te in again.stats.health} <= {(), ("decode 0: well",), ("prefill 0: well",)}


def test_health_names_the_link(tiny: TinyCheckpoint) -> None:
    """Decode has one die, the one that the link leads to."""
    settings = [*PAIR, "decode.dies=1"]
    down = Fault(0.0, link=(0, 1), plane="ub", kind="down")
    with LLM(tiny, "pd", overrides=settings, faults=[down]) as llm:
        with pytest.raises(TransferError, match="no decode TE can be reached from prefill 0"):
            llm.generate(PROMPTS, PARAMS)
        health = {te.name: te.links for te in llm.engine.health()}
    assert health == {"prefill 0": ("decode 0: blocked",), "decode 0": ("prefill 0: blocked",)}


def test_probes_beside_traffic_find_a_link_that_becomes_slow_and_one_that_is_well_again(
    tiny: TinyCheckpoint,
) -> None:
    """Without them nobody looks at a link on which transfers take long and do not fail."""
    slow = Fault(2000.0, link=LINK, plane="ub", kind="slow", for_us=6000.0, factor=100)
    found: dict[str, list[tuple[bool, str]]] = {}
    for name, more in {"never": (), "beside": ("health.link_probe_s=0.0005",)}.items():
        changes: list[tuple[bool, str]] = []
        with LLM(
            tiny, "pd", overrides=[*PAIR, "decode.count=2", *more], faults=[slow], progress=False
        ) as llm:

            def see(event: Observed, changes: list[tuple[bool, str]] = changes) -> None:
                if isinstance(event, LinkChanged):
                    changes.append((event.is_well, event.reason))

            llm.engine.observe(see)
            arrivals = [1_000_000 * at for at in range(12)]
            outputs = llm.generate([[7, at] for at in range(12)], PARAMS, arrivals_ns=arrivals)
            assert [len(output.outputs[0].token_ids) for output in outputs] == [6] * 12
        found[name] = changes
    assert found["never"] == []
    (is_well, reason), *_, (is_well_again, _) = found["beside"]
    assert (is_well, is_well_again) == (False, True)
    assert reason.startswith("a dummy payload from prefill 0 to decode 0 was slow")


def test_a_slow_link_costs_no_other_link_its_payloads(tiny: TinyCheckpoint) -> None:
    """Payloads to both TEs leave the same die, and one of them is on its way while others come and go."""
    changes: list[str] = []
    settings = ("prefill.dies=1", "prefill.tp=1", "decode.dies=2", "decode.count=2", "max_model_len=512")
    more = ("cache.prefix=false", "health.link_probe_s=0.0005")
    with LLM(
        tiny, "pd", overrides=[*settings, *more], faults=[fault("slow", 1e9, factor=1e7)], progress=False
    ) as llm:
        llm.engine.observe(lambda e: changes.append(e.reason) if isinstance(e, LinkChanged) else None)
        outputs = llm.generate(
            [[7, at] * 200 for at in range(8)], PARAMS, arrivals_ns=[1_000_000 * at for at in range(8)]
        )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6] * 8
    assert len(changes) == 1
    assert changes[0] == "a dummy payload from prefill 0 to decode 0 was delayed"
