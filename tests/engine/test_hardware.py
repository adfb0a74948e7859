"""Prefill on Ascend 910B: the bits of one die, its own times, and the fabric that both sides are on."""

import msgspec
import pytest

from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.comm.distflow import backend_between
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.description import describe
from xdeepserve.errors import DeploymentError, HardwareError
from xdeepserve.hw.accelerators import atlas_a2
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.spec import Spec
from xdeepserve.hw.topology import Plane, Topology
from xdeepserve.llm import digest
from xdeepserve.model.presets import TinyCheckpoint

PROMPTS = [[1, 2, 3], list(range(100)), [7] * 50, [9], [5] * 90]
PARAMS = SamplingParams(max_tokens=6, temperature=0.5, seed=1, ignore_eos=True)
ON_910B = "prefill.hardware=910b"
PAIR = ["prefill.dies=1", "decode.dies=1"]


@pytest.fixture(scope="module")
def expected() -> str:
    return digest(one_die(PROMPTS, PARAMS))


@pytest.mark.parametrize(
    ("deployment", "overrides"),
    [
        ("pd", PAIR),
        ("pd", ["prefill.dies=8", "decode.dies=2", "transfer=layer", "mtp=1"]),
        ("pd", ["prefill.count=3", "prefill.dies=2", "prefill.tp=2", "decode.count=2", "decode.dies=1"]),
        ("pd", ["prefill.dies=4", "prefill.tp=4", "prefill.tp_mode=sp-tp-sp", "decode.dies=2", "fabric=vpc"]),
        ("pd", ["prefill.dies=2", "decode.dies=2", "pipeline.microbatches=2", "pipeline.overlap=cores"]),
        ("pd", ["prefill.dies=2", "decode.dies=2", "pipeline.microbatches=2", "pipeline.attention_cores=22"]),
        ("pd", [*PAIR, "cache.num_host_blocks=8", "max_model_len=128", "cache.num_blocks=8"]),
        ("transformerless", ["prefill.dies=2", "lockstep=true"]),
        ("transformerless", ["prefill.dies=2", "transfer=layer", "dataflow=true"]),
    ],
)
def test_every_shape_has_the_bits_of_one_die(
    tiny: TinyCheckpoint, expected: str, deployment: str, overrides: list[str]
) -> None:
    with LLM(tiny, deployment, overrides=[ON_910B, *overrides]) as llm:
        assert digest(llm.generate(PROMPTS, PARAMS, keep_logits=True)) == expected
        llm.engine.check_integrity()
        wanted = "vpc" if "fabric=vpc" in overrides else "roce"
        assert {link.flow.backend.name for link in llm.engine.je.links} == {wanted}
        for te in llm.engine.je.tes:
            cores = 20 if te.sizes.place.role == "prefill" else 24
            for die in (die for group in te.groups for die in group.dies):
                assert die.spec.num_cores("aic") == die.cores["aic"].total == cores


def test_prefill_takes_the_time_of_its_hardware_and_decode_that_of_cloudmatrix(tiny: TinyCheckpoint) -> None:
    """Kernel by kernel: as the spec of the die on which it runs says."""
    names = {}
    for hardware in ("cm384", "910b"):
        overrides = [*PAIR, f"prefill.hardware={hardware}", "fabric=roce"]
        with LLM(tiny, "pd", overrides=overrides, trace=True) as llm:
            llm.generate([list(range(100))], PARAMS)
            spans = llm.engine.plan.pod.trace.spans
            first, second = (te.sizes.place.first_die for te in llm.engine.je.tes)
            assert first == (0 if hardware == "cm384" else 768)
            names[hardware] = [
                [
                    (s.name, s.end_ns - s.start_ns)
                    for s in spans
                    if s.node == node and s.lane in ("AIC", "AIV")
                ]
                for node in (first, second)
            ]
    (prefill, decode), (foreign_prefill, foreign_decode) = names["cm384"], names["910b"]
    assert decode == foreign_decode
    assert [name for name, _ in prefill] == [name for name, _ in foreign_prefill]
    pairs = [(here, there) for (_, here), (_, there) in zip(prefill, foreign_prefill, strict=True)]
    assert all(here <= there for here, there in pairs)
    assert any(here < there for here, there in pairs)


def test_what_npus_exchange_is_billed_by_their_links(tiny: TinyCheckpoint) -> None:
    first_token = {}
    for hardware in ("cm384", "910b"):
        for dies in (1, 4):
            overrides = [f"prefill.dies={dies}", "decode.dies=1", f"prefill.hardware={hardware}"]
            # A host that costs nothing: a small model's kernels would end before the next one is launched.
            deployment = msgspec.structs.replace(resolve("pd", overrides), execution=None)
            with LLM(tiny, deployment) as llm:
                metrics = llm.generate([[3] * 100], PARAMS)[0].metrics
                assert metrics is not None
                assert metrics.first_token_ns is not None
                first_token[hardware, dies] = metrics.first_token_ns
    slower = {dies: first_token["910b", dies] - first_token["cm384", dies] for dies in (1, 4)}
    assert 0 < slower[1] < slower[4]


def test_the_spec_of_an_npu_is_consistent() -> None:
    cm384, two, eight = Spec(), atlas_a2(2), atlas_a2(8)
    assert two.aiv_cores.value == 2 * two.aic_cores.value
    assert two.kernel_ns(1e12, 0) > cm384.kernel_ns(1e12, 0)
    assert two.kernel_ns(0, 1e9) == cm384.kernel_ns(0, 1e9)
    assert eight.ub_bandwidth.value == 7 * two.ub_bandwidth.value
    assert two.exchange_copy.value > eight.exchange_copy.value
    differing = [
        name for name in cm384.__struct_fields__ if getattr(cm384, name).value != getattr(two, name).value
    ]
    for name in differing:
        assert getattr(two, name).source.split(":")[0] in ("public", "public CANN notes", "assumed")


def test_the_fabric_is_the_best_that_both_sides_have_in_common() -> None:
    topology = Topology(servers=50)
    pod = Pod(topology)
    beside, host, far_host = 768, topology.host(3), topology.host(48)
    assert backend_between(pod, [0, 1], [700]).name == "ub"
    assert backend_between(pod, [beside], [beside + 16]).name == "ub"
    assert backend_between(pod, [beside], [700]).name == "roce"
    assert backend_between(pod, [beside, beside + 2], [0, 700]).name == "roce"
    assert backend_between(pod, [0], [host]).name == "ub"
    assert backend_between(pod, [0, host], [far_host]).name == "vpc"
    assert backend_between(pod, [0, 1], [700], "vpc").name == "vpc"
    with pytest.raises(HardwareError, match=r"ub: s48.c0.d0 and s43.c6.d0 have no UB plane in common"):
        backend_between(pod, [beside], [700], "ub")
    with pytest.raises(HardwareError, match="no UB plane in common"):
        topology.check_path(host, far_host, Plane.UB)


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        ("pd", [ON_910B, "fabric=ub"], "fabric=ub does not lead from prefill.hardware=910b"),
        ("transformerless", [ON_910B, "fabric=ub"], "fabric=ub does not lead from prefill.hardware=910b"),
        ("pd", ["decode.hardware=910b"], "decode needs the interconnect of CloudMatrix dies"),
        ("pd", [ON_910B, "prefill.dies=9"], "prefill.dies=9 do not fit in a 910B server, whose 8 NPUs"),
        (
            "pd",
            [ON_910B, "pipeline.overlap=cores", "pipeline.attention_cores=20"],
            "between 1 and 19, of the 20 AIC cores",
        ),
        ("pd", [ON_910B, "pipeline.attention_cores=24"], "between 1 and 23, of the 24 AIC cores"),
        ("colocated", [ON_910B], "prefill is no setting of colocated"),
    ],
)
def test_what_cannot_be_is_refused_with_one_line(
    tiny: TinyCheckpoint, name: str, overrides: list[str], says: str
) -> None:
    with pytest.raises(DeploymentError) as caught:
        fit(resolve(name, overrides), tiny.config)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_hardware_is_unknown() -> None:
    with pytest.raises(DeploymentError, match=r"prefill\.hardware must be one of 910b, cm384, found 'h100'"):
        resolve("pd", ["prefill.hardware=h100"])


@pytest.mark.parametrize(
    ("overrides", "hardware", "fabric"),
    [
        ([], "prefill and decode on CloudMatrix384 dies", "over ub, which both sides are on"),
        ([ON_910B], "prefill on Ascend 910B, a server for each TE", "over roce, which both sides are on"),
        ([ON_910B, "fabric=vpc"], "prefill on Ascend 910B, a server for each TE", "over vpc\n"),
    ],
)
def test_describe_shows_hardware_and_fabric(
    tiny: TinyCheckpoint, overrides: list[str], hardware: str, fabric: str
) -> None:
    text = describe(PodPlan(tiny, resolve("pd", ["prefill.count=2", *overrides]), "int8"))
    assert hardware in text
    assert fabric in text
    if ON_910B in overrides:  # one die of each package, and a server of its own for each TE
        assert all(f"{place} " in text for place in ("s48.c0.d0", "s48.c3.d0", "s49.c0.d0"))
        assert "s48.c0.d1" not in text


def test_memory_may_be_set_for_other_hardware_too(tiny: TinyCheckpoint) -> None:
    plan = PodPlan(tiny, resolve("pd", [ON_910B, "hardware.hbm_mb=100"]), "int8")
    assert {die.spec.hbm_bytes.value for die in plan.pod.dies.values()} == {100 * 2**20}
    sizes = fit(resolve("pd", [ON_910B]), tiny.config)
    assert sizes[0].place.hardware == "910b"
    assert sizes[1].place.hardware == "cm384"
