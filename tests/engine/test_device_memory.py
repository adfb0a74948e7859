"""What a die has to hold is compared with the memory of its own hardware, by every command alike."""

import msgspec
import pytest

from xdeepserve.cli import main
from xdeepserve.engine import build, description
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import Deployment, Device
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.description import describe, fullest, lack, memory_uses
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.hw.accelerators import ACCELERATORS, atlas_a2
from xdeepserve.hw.spec import Param, Spec
from xdeepserve.model.presets import resolve_model
from xdeepserve.planner.layouts import PodLayout, max_requests
from xdeepserve.planner.sweep import Point, measure
from xdeepserve.prices.profile import Demand, PodProfile

BLOCK = 128
DEVICES: list[Device] = list(ACCELERATORS)  # type: ignore[arg-type]
# Dies by which 16 experts of DBRX, 127 GB of INT8, fit into nine tenths of a die's memory.
LEAST_ROUTED = {"l20": 4, "l40s": 4, "cm384": 4, "910b": 4, "h800": 2, "a800": 2, "h20": 2}


def settings(device: Device, num_blocks: int) -> list[str]:
    """Attention on one die and experts on four, all of one kind of hardware."""
    sizes = ["attention.domains=1", "attention.dies=1", "experts.routed_dies=4", "experts.shared_dies=0"]
    hardware = [f"attention.hardware={device}", f"experts.hardware={device}"]
    return [*sizes, *hardware, f"cache.block_size={BLOCK}", f"cache.num_blocks={num_blocks}"]


def planned(deployment: Deployment, model: str = "dbrx") -> PodPlan:
    return PodPlan(resolve_model(model), deployment, timing=TimingConfig())


def most_blocks(device: Device) -> int:
    """KV blocks beside the weights of an attention die, by the published size of its memory."""
    plans = (planned(resolve("moe-attention", settings(device, num_blocks))) for num_blocks in (100, 101))
    one, two = (next(iter(memory_uses(plan))) for plan in plans)
    return int((ACCELERATORS[device].spec.hbm_bytes.value - one.weights) // (two.need - one.need))


@pytest.mark.parametrize("device", DEVICES)
def test_describe_generate_and_sweep_know_the_memory_of_each_device(
    device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    most = most_blocks(device)
    has = ACCELERATORS[device].spec.hbm_bytes.value
    # A sweep plans shorter tables of positions, which are less than two blocks.
    for num_blocks, fits in ((most, True), (most + 2, False)):
        given = settings(device, num_blocks)
        options = [part for each in given for part in ("--set", each)]
        asked = ["--model", "dbrx", "--deployment", "moe-attention", *options]
        assert main(["describe", *asked]) == 0
        out = capsys.readouterr().out
        assert f"of its {has / 2**20:.0f} MiB" in out
        assert ("it does not fit" not in out) == fits
        assert main(["generate", *asked, "--timing-only", "--prompt-ids", "1,2", "--max-tokens", "1"]) == 0
        assert ("weights and KV of the fullest die" not in capsys.readouterr().err) == fits
        refusal = measure(Point("dbrx", "moe-attention", tuple(given), batch=1, context=100)).refusal
        assert (refusal == "") == fits
        assert fits or "give a smaller --batch or --context" in refusal


@pytest.mark.parametrize("device", DEVICES)
def test_plan_proposes_what_the_others_say_fits(device: Device) -> None:
    profile = PodProfile(resolve_model("dbrx"), Demand(400, 112))
    for routed in (1, 2, 4):
        layout = PodLayout(kind="moe-attention", dies=1, routed=routed, devices=(device, device))
        most = max_requests(profile, layout)
        assert (most >= 1) == (routed >= LEAST_ROUTED[device])
        missing = lack(planned(layout.deployment(profile.demand, max(1, most))))
        assert not missing if most >= 1 else missing or routed > 1  # a tenth is left for activations
    more = layout.deployment(profile.demand, most * 5 // 4)
    assert "weights and KV of the fullest die" in lack(planned(more))


def test_prefill_on_other_hardware_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def smaller(num_npus: int) -> Spec:
        half = Param(32 * 2**30, "B", "assumed: for this test")
        return msgspec.structs.replace(atlas_a2(num_npus), hbm_bytes=half)

    blocks = 22_000_000_000 // (40 * 2048 * 2 * BLOCK)
    given = [f"cache.block_size={BLOCK}", f"cache.num_blocks={blocks}", "prefill.dies=8", "decode.dies=8"]
    deployment = resolve("pd", ["prefill.hardware=910b", *given])
    assert lack(planned(deployment)) == ""
    monkeypatch.setattr(build, "atlas_a2", smaller)
    plan = planned(deployment)
    assert "fullest die (Ascend 910B)" in lack(plan)
    assert "it has 32" in lack(plan)
    assert [(use.device, use.share > 1) for use in fullest(plan)] == [("910b", True), ("cm384", False)]


def test_the_fullest_die_of_each_kind_is_shown() -> None:
    given = settings("h20", 100)
    text = describe(planned(resolve("moe-attention", [*given, "attention.hardware=l40s"])))
    assert "hardware    with attention on L40S and experts on H20\n" in text
    assert "of its 45776 MiB" in text
    assert "of its 91553 MiB" in text
    assert "the fullest die (L40S)" in text
    assert "the fullest die (H20)" in text


def test_alike_dies_with_other_experts_have_a_row_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A routed expert takes as much memory as the shared one."""
    monkeypatch.setattr(description, "SHOWN_ALIKE", 1)
    sizes = ["attention.domains=1", "attention.dies=2", "experts.routed_dies=16", "experts.shared_dies=2"]
    text = describe(planned(resolve("moe-attention", sizes), "tiny-random"))
    rows = [line.split() for line in text.splitlines() if ".." in line.partition(" s00.")[0]]
    assert [(row[0], row[4]) for row in rows] == [("0..1", "none"), ("2..17", "0..15"), ("18..19", "shared")]
