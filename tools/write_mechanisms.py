"""Write `docs/mechanisms.md`: the papers' mechanisms, and the presets that switch each of them on.

python tools/write_mechanisms.py [FILE]

Rows are written in `MECHANISMS` alone; the presets that use a mechanism are found by resolving them.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from xdeepserve.engine.deploy.deployment import Deployment
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import PRESETS, resolve
from xdeepserve.engine.deploy.rules import carrier_of, takes_steps_away, without_effect
from xdeepserve.engine.deploy.settings import settings
from xdeepserve.errors import DeploymentError
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import resolve_model
from xdeepserve.reading import toml_value

FILE = Path(__file__).parent.parent / "docs" / "mechanisms.md"
MODEL = "deepseek-r1"  # has as many experts as the papers' pods need
HEAD = """# The papers' mechanisms

Each mechanism of a paper, the setting that switches it on, and the presets that do. A setting in brackets
is the default. Where no preset has the mechanism, the row says why. *Seen* is what `tests/evidence.py` finds
in a short run of a preset; *setting* means that no run is looked into, so only the row's own test shows
the mechanism. This page is made by `tools/write_mechanisms.py`, which asks every preset;
`tests/test_mechanisms.py` fails where a row has neither a preset nor a reason, and where a run does not show
what is seen.
"""
TAIL = """
One mechanism is left out: sequence-parallel prefill over several DP groups, over more of them for a longer
prompt. xDeepServe (4.3) names it as a difficulty of its first scheduler, whose place the shared queue has
taken: ranks that suit 32K tokens did not suit 128K. How ranks were chosen, and on which of them KV lay
then, it does not say. Within a DP group the tokens of a step are cut over its dies by SP-TP-SP, whatever
the prompt's length.
"""


class Mechanism(NamedTuple):
    """Row of the table: a mechanism by the paper's name, and where it is found here."""

    name: str
    paper: str  # and section
    setting: str  # that switches it on; of TEs: te.KEY, wherever a preset gives it; N: any number
    file: str  # in src/xdeepserve
    test: str  # in tests
    why: str = ""  # no preset has it

    @property
    def key(self) -> str:
        """Key of the setting."""
        return self.setting.partition("=")[0]

    @property
    def value(self) -> Any:
        """Value of the setting."""
        return toml_value(self.setting.partition("=")[2])


PAPERS = {
    "XDS": "xDeepServe",
    "CM": "CloudMatrix",
    "MS": "MegaScale-Infer",
    "EAAS": "EaaS",
    "DS": "DeepServe",
}
GAINS = "the papers give its gain, but have no pod with it"

MECHANISMS = (
    # How dies exchange tokens.
    Mechanism(
        "dispatch and combine by pull",
        "XDS 3.2",
        "exchange=pull",
        "comm/exchange/dispatch.py",
        "comm/test_exchange.py",
    ),
    Mechanism(
        "FusedDispatch and FusedCombine by push",
        "CM 4.2.1",
        "exchange=push",
        "comm/fused/dispatch.py",
        "engine/test_push.py",
    ),
    Mechanism(
        "A2E and E2A with trampolines",
        "XDS 3.3, 5.2",
        "attention.carrier=mte",
        "comm/trampoline/a2e.py",
        "comm/test_a2e.py",
    ),
    Mechanism(
        "A2E and E2A by URMA", "XDS 3.3, 5.2", "attention.carrier=urma", "hw/dma.py", "bench/test_carriers.py"
    ),
    Mechanism(
        "M2N between network cards", "MS 5", "attention.carrier=rdma", "m2n/way.py", "comm/test_m2n.py"
    ),
    Mechanism(
        "expert services, slots on servers",
        "EAAS 3, 4.4",
        "kind=eaas",
        "comm/services/client.py",
        "engine/test_eaas.py",
    ),
    Mechanism(
        "copies of experts on other servers",
        "EAAS 3",
        "experts.copies=1",
        "engine/deploy/expert_services.py",
        "engine/test_eaas.py",
        "they double the experts' memory, so the small preset leaves the choice to its user",
    ),
    Mechanism(
        "INT8 combine",
        "XDS 4.7",
        "combine=int8",
        "comm/exchange/combine.py",
        "engine/test_int8_combine.py",
        "it is another arithmetic with digests of its own, and every preset keeps the digest of one die",
    ),
    # How KV goes from prefill to decode.
    Mechanism(
        "prefill and decode apart", "XDS 5.1", "kind=pd", "engine/job/pd_transfer.py", "engine/test_disagg.py"
    ),
    Mechanism(
        "KV pulled by DMA (SDMA)",
        "XDS 3.1",
        "transfer_over=dma",
        "comm/distflow/backends.py",
        "comm/test_distflow.py",
    ),
    Mechanism(
        "send and receive in 8 steps, a ring for each pair",
        "XDS 3.1, 5.1",
        "transfer_over=send-receive",
        "comm/distflow/send_receive.py",
        "engine/test_send_receive_of_kv.py",
    ),
    Mechanism(
        "zero-copy and asynchronous send",
        "XDS 3.1",
        "transfer_over=zero-copy",
        "comm/p2p/send.py",
        "engine/test_send_receive_of_kv.py",
        "the paper's current implementation is not zero-copy (3.1), so its pods are not",
    ),
    Mechanism("KV by RoCE", "CM 4.3.3", "fabric=roce", "comm/distflow/backends.py", "engine/test_disagg.py"),
    Mechanism(
        "KV by VPC",
        "XDS 5.1",
        "fabric=vpc",
        "comm/distflow/backends.py",
        "engine/test_disagg.py",
        "`fabric=auto` takes it where two sides share neither UB nor RoCE, and no paper's pod has such sides",
    ),
    Mechanism(
        "KV by layer",
        "DS 4.4",
        "transfer=layer",
        "comm/distflow/endpoint.py",
        "engine/test_transfer_by_layer.py",
    ),
    Mechanism(
        "prefixes from other TEs' caches",
        "DS 4.3, 4.4",
        "cache.peers=true",
        "engine/job/peer_prefixes.py",
        "engine/test_peer_prefixes.py",
        "the papers' pods route to the TE that has a prefix, or have a memory pool",
    ),
    Mechanism(
        "prefill on Ascend 910B",
        "XDS 5.1",
        "te.hardware=910b",
        "hw/accelerators.py",
        "engine/test_hardware.py",
    ),
    # How a step is laid out over dies.
    Mechanism(
        "attention and experts apart, persistent kernels",
        "XDS 5.2",
        "kind=moe-attention",
        "engine/ways/trampolines/clock.py",
        "engine/test_lockstep.py",
    ),
    Mechanism(
        "DP domains that experts serve in turn",
        "XDS 5.2",
        "attention.domains=3",
        "engine/walk/schedule.py",
        "engine/test_lockstep.py",
    ),
    Mechanism(
        "two microbatches of attention dies",
        "XDS 5.2",
        "attention.microbatches=2",
        "engine/walk/schedule.py",
        "engine/test_lockstep.py",
    ),
    Mechanism(
        "ping-pong of three microbatches",
        "MS 4.1",
        "attention.microbatches=3",
        "engine/walk/schedule.py",
        "engine/test_pipeline.py",
    ),
    Mechanism(
        "attention and experts on other hardware",
        "MS 4.3",
        "attention.hardware=h20",
        "hw/accelerators.py",
        "engine/test_mixed_hardware.py",
    ),
    Mechanism(
        "dataflow without barriers",
        "XDS 5.3",
        "dataflow=true",
        "comm/trampoline/token_flow.py",
        "engine/test_dataflow.py",
        "it is the paper's outlook, which its own pods do not run",
    ),
    Mechanism(
        "two microbatches, by cores in decode, by engines in prefill",
        "CM 4.2.3, 4.3.2",
        "pipeline.microbatches=2",
        "engine/walk/timeline.py",
        "engine/test_pipeline.py",
    ),
    Mechanism(
        "microbatches decided per step",
        "XDS 4",
        "pipeline.dynamic=true",
        "engine/te/forecast.py",
        "engine/test_dynamic_microbatches.py",
    ),
    Mechanism(
        "cores that move between the streams",
        "CM 4.2.3",
        "pipeline.adaptive=true",
        "engine/run/executors.py",
        "engine/test_pipeline.py",
    ),
    Mechanism(
        "SP-TP-SP", "CM 4.3.1", "te.tp_mode=sp-tp-sp", "engine/die/team.py", "engine/test_tensor_parallel.py"
    ),
    Mechanism(
        "MLA of prompts unabsorbed",
        "CM 4.3.1",
        "prefill_attention=unabsorbed",
        "model/canonical.py",
        "timing/test_runs.py",
    ),
    Mechanism(
        "output projection with TP, attention without",
        "XDS 4.2",
        "te.o_proj_tp=4",
        "engine/die/team.py",
        "engine/test_o_proj.py",
    ),
    Mechanism(
        "copies of the shared expert on dies of their own",
        "XDS 7.1, CM 4.1",
        "te.shared_dies=32",
        "engine/deploy/fitting.py",
        "engine/test_layouts.py",
    ),
    Mechanism(
        "one expert on each die (EP320)",
        "CM 4.1",
        "te.experts_per_die=1",
        "engine/deploy/fitting.py",
        "engine/test_layouts.py",
    ),
    # Drafts.
    Mechanism("MTP with one draft", "XDS 4.6", "mtp=1", "engine/dp/step.py", "engine/test_mtp.py"),
    Mechanism("MTP with two drafts", "XDS 4.6", "mtp=2", "engine/dp/step.py", "engine/test_mtp.py", GAINS),
    Mechanism(
        "second draft from the first MTP layer",
        "XDS 4.6",
        "mtp_reuse=true",
        "engine/deploy/fitting.py",
        "engine/test_mtp.py",
        GAINS,
    ),
    Mechanism(
        "drafts without a way back to the host",
        "CM 4.2.4",
        "execution.mtp=pipelined",
        "engine/te/host.py",
        "timing/test_host.py",
    ),
    # Which TE and which DP group serve a request.
    Mechanism(
        "route by cost", "XDS 5.1", "scheduler.route=cost", "engine/job/router.py", "engine/test_router.py"
    ),
    Mechanism(
        "decode admits before prefill",
        "CM 4.3.3",
        "scheduler.admission=decode",
        "engine/job/admission.py",
        "engine/test_decode_first.py",
    ),
    Mechanism(
        "one queue for all DP groups of prefill",
        "XDS 4.3",
        "scheduler.dispatch=collaborative",
        "engine/balance/dp.py",
        "engine/test_scheduler.py",
    ),
    Mechanism(
        "statuses of DP groups by all-gather",
        "XDS 4.3",
        "scheduler.statuses=all-gather",
        "engine/te/status_gather.py",
        "engine/test_status_gather.py",
    ),
    Mechanism(
        "decode group with the lowest use of KV",
        "XDS 4.3",
        "scheduler.decode=kv",
        "engine/balance/dp.py",
        "engine/test_kv_statuses.py",
    ),
    Mechanism(
        "periodic KV statuses",
        "XDS 4.3",
        "scheduler.status_period=0.1",
        "engine/te/shell.py",
        "engine/test_kv_statuses.py",
    ),
    # The host.
    Mechanism(
        "steps planned ahead",
        "XDS 4.2",
        "execution.overlap=true",
        "engine/te/masters.py",
        "engine/test_planning_ahead.py",
    ),
    Mechanism(
        "garbage collected by hand",
        "XDS 4.4",
        "execution.control_gc=true",
        "engine/te/host.py",
        "timing/test_host.py",
    ),
    Mechanism(
        "launch threads pinned to cores",
        "XDS 4.4",
        "execution.pin_cores=true",
        "engine/te/host.py",
        "timing/test_host.py",
    ),
    Mechanism(
        "compiled graphs cached",
        "XDS 4.4",
        "execution.cache_graphs=true",
        "engine/te/host.py",
        "timing/test_host.py",
    ),
    # Load of experts, and the memory pool.
    Mechanism(
        "EPLB: collect, select, place, route",
        "XDS 4.5",
        "te.experts_per_die=N",
        "engine/balance/eplb.py",
        "engine/test_eplb.py",
    ),
    Mechanism(
        "replicas as DeepSeek's EPLB places them",
        "XDS 4.5",
        "experts.placement=deepseek",
        "engine/balance/eplb.py",
        "engine/test_eplb.py",
        "it is the published baseline that the paper compares with",
    ),
    Mechanism(
        "memory pool (EMS)",
        "CM 4.4",
        "ems.path=DIR",
        "ems/memory_pool.py",
        "ems/test_memory_pool.py",
        "it needs a directory, which is its user's: `cloudmatrix384` has `ems.servers=32` for it",
    ),
    # Failures.
    Mechanism(
        "heartbeats of shells and DP groups",
        "XDS 6.1",
        "health.beat_s=1.0",
        "engine/te/heartbeat.py",
        "engine/test_health.py",
    ),
    Mechanism(
        "link probing beside traffic",
        "XDS 6.1",
        "health.link_probe_s=5.0",
        "comm/distflow/link_probe.py",
        "engine/test_link_probe.py",
    ),
    Mechanism(
        "rollback of a step", "XDS 6.2", "recovery.stage=3", "engine/te/repairs.py", "engine/test_rollback.py"
    ),
    Mechanism(
        "failover, kill-P-to-preserve-D",
        "XDS 6.2",
        "recovery.failover=true",
        "engine/serving/failover.py",
        "engine/test_failover.py",
    ),
    Mechanism(
        "vertical scale-down",
        "XDS 6.2",
        "recovery.failover=true",
        "engine/serving/kept_kv.py",
        "engine/test_kept_kv.py",
    ),
)


SEEN = {  # by `tests/evidence.py`, in runs
    "dispatch and combine by pull": "spans",
    "FusedDispatch and FusedCombine by push": "spans",
    "A2E and E2A with trampolines": "spans of both stages",
    "A2E and E2A by URMA": "spans of the URMA engine",
    "M2N between network cards": "spans",
    "expert services, slots on servers": "spans: clients of a batch",
    "INT8 combine": "bytes, against BF16",
    "prefill and decode apart": "steps of each TE",
    "KV pulled by DMA (SDMA)": "bytes on UB, spans of DMA",
    "send and receive in 8 steps, a ring for each pair": "spans of the steps, rings",
    "zero-copy and asynchronous send": "spans: no copy into a ring",
    "KV by RoCE": "bytes on RoCE",
    "KV by VPC": "bytes on VPC",
    "KV by layer": "events: KV leaves before the end of prefill",
    "prefill on Ascend 910B": "spans and bytes of its NPUs",
    "attention and experts apart, persistent kernels": "spans: no die has both",
    "DP domains that experts serve in turn": "spans of expert dies",
    "two microbatches of attention dies": "spans",
    "ping-pong of three microbatches": "spans",
    "attention and experts on other hardware": "dies of the spans",
    "dataflow without barriers": "spans: clients of a batch",
    "two microbatches, by cores in decode, by engines in prefill": "overlapping spans of prefill",
    "microbatches decided per step": "events `StepCut`",
    "SP-TP-SP": "all-to-alls of prefill",
    "MLA of prompts unabsorbed": "time, against absorbed",
    "output projection with TP, attention without": "reduce-scatters of decode",
    "copies of the shared expert on dies of their own": "dies of the spans",
    "one expert on each die (EP320)": "experts in the dies' memories",
    "MTP with one draft": "accepted drafts",
    "MTP with two drafts": "accepted drafts",
    "drafts without a way back to the host": "time, against naive",
    "decode admits before prefill": "events `Booked`",
    "statuses of DP groups by all-gather": "spans",
    "steps planned ahead": "token ids filled in on the die",
    "garbage collected by hand": "pause after 256 steps, of an assumed time",
    "launch threads pinned to cores": "time, against unpinned: an assumed effect",
    "compiled graphs cached": "time, against guards: an assumed effect",
    "EPLB: collect, select, place, route": "spans, events `ReplicasChanged`",
    "link probing beside traffic": "dummy payloads",
    "rollback of a step": "events `Mended` after a glitch",
    "failover, kill-P-to-preserve-D": "events `FailoverEnded` after a loss",
    "vertical scale-down": "fewer dies after a loss",
}


@cache
def written(preset: str) -> dict[str, Any]:
    """Return a preset's TOML table."""
    return tomllib.loads(
        (resources.files("xdeepserve.engine.deploy") / "presets" / f"{preset}.toml").read_text()
    )


def _given(table: Any, names: Sequence[str]) -> Iterator[Any]:
    """Yield the values that a table, or each table of a list, has under a dotted key."""
    tables = table if isinstance(table, list) else [table]
    for each in tables:
        if names[0] in each:
            value = each[names[0]]
            yield from _given(value, names[1:]) if names[1:] else [value]


def uses(preset: str, row: Mechanism, config: ModelConfig) -> bool:
    """Return whether a preset has a mechanism: by its own settings, or by a default that matters there."""
    table, (section, _, name) = written(preset), row.key.rpartition(".")
    places = ("prefill.", "decode.", "te.", "experts.", "") if section == "te" else (f"{section}.",)
    given = [value for at in places for value in _given(table, f"{at}{name}".strip(".").split("."))]
    if given:
        return row.value in ("N", *given)
    if section == "te" or (section == "execution" and section not in table):
        return False  # without the section, a host costs nothing
    deployment = resolve(preset)
    if row.key == "attention.carrier":
        return takes_steps_away(deployment.kind) and carrier_of(deployment) == row.value
    setting = next(setting for setting in settings() if setting.key == row.key)
    others = [each for each in setting.names if each != row.value and ":" not in each] or [row.value]
    return setting.default == row.value and any(
        _has_effect(deployment, f"{row.key}={each}".lower(), config) for each in others
    )


def _has_effect(deployment: Deployment, override: str, config: ModelConfig) -> bool:
    """Return whether a setting is one of a deployment, and not idle there."""
    try:
        fit(resolve(deployment, [override]), config, is_timing_only=True)
    except DeploymentError:
        return False
    return not without_effect(deployment, [override])


def presets_with(row: Mechanism, config: ModelConfig) -> list[str]:
    """Return the presets that have a mechanism."""
    return [preset for preset in PRESETS if uses(preset, row, config)]


def page() -> str:
    """Make the page: a table, in the order of the rows."""
    config = resolve_model(MODEL).config
    defaults = {setting.key: setting.default for setting in settings()}
    lines = ["| mechanism | paper | setting | presets | seen | source | test |", "|---" * 7 + "|"]
    for row in MECHANISMS:
        setting = f"`{row.setting.removeprefix('te.')}`"
        if defaults.get(row.key) == row.value:
            setting = f"({setting})"
        found = presets_with(row, config)
        names = "all" if len(found) == len(PRESETS) else ", ".join(f"`{name}`" for name in found)
        paper = re.sub("[A-Z]+", lambda short: PAPERS[short[0]], row.paper)
        places = names or f"none: {row.why}", SEEN.get(row.name, "setting"), f"`{row.file}`"
        cells = row.name, paper, setting, *places, f"`tests/{row.test}`"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([HEAD, *lines, TAIL])


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else FILE).write_text(page(), encoding="utf-8")
