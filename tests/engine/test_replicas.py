"""Replicas of experts on running pods: the bits of one die in every phase, and what breaks without phases."""

from collections import defaultdict
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.api.server.engine_metrics import EngineCollector
from xdeepserve.engine.balance.reconfigure import ExpertStorage, Reconfiguration
from xdeepserve.engine.balance.trigger import EPLBTrigger
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.deploy.sizes import Sizes
from xdeepserve.engine.description import describe
from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.die.replicas import NOTHING, RedundantSlots, ReplicaMap, primaries_only
from xdeepserve.engine.die.workspace import Workspace
from xdeepserve.engine.dp.events import ReplicasChanged
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.messages import LoadExperts, SetExpertMap
from xdeepserve.engine.plans import StepPlan
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.errors import CheckpointError, DeploymentError, ProtocolError
from xdeepserve.hw.die import Die
from xdeepserve.hw.dma import DMA
from xdeepserve.hw.pod import Pod
from xdeepserve.llm import digest
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import TinyCheckpoint
from xdeepserve.quant.forward import Walk

PROMPTS = [[1, 2, 3], list(range(40)), [7] * 50, [9], [10, 11], [5] * 60]
PARAMS = SamplingParams(max_tokens=24, temperature=0.5, seed=1, ignore_eos=True)
OFTEN = ("experts.redundant_slots=1", "experts.balance_interval=0.002", "experts.balance_slices=2")
OFTENER = ("experts.balance_interval=0.0005", "experts.balance_slices=1")
COLOCATED = ["dies=4", *OFTEN]
APART = ["attention.domains=2", "attention.dies=2", "experts.routed_dies=3", "max_model_len=128", *OFTEN]


@pytest.fixture(scope="module")
def expected() -> str:
    return digest(one_die(PROMPTS, PARAMS))


def run(llm: LLM) -> str:
    made = digest(llm.generate(PROMPTS, PARAMS, keep_logits=True))
    llm.engine.check_integrity()
    return made


def reconfigurations(llm: LLM) -> list[Reconfiguration]:
    return [te.reconfiguration for te in llm.engine.je.tes if te.reconfiguration is not None]


# ---- bits -------------------------------------------------------------------------------------------------


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("deployment", "overrides"),
    [
        ("colocated", COLOCATED),
        ("colocated", [*COLOCATED, "dies=3", "experts.redundant_slots=3", "mtp=1"]),
        ("colocated", [*COLOCATED, "execution.overlap=true", "execution.pin_cores=false"]),
        ("colocated", [*COLOCATED, "tp=2"]),
        ("colocated", [*COLOCATED, "pipeline.microbatches=2"]),
        ("moe-attention", APART),
        ("moe-attention", [*APART, "mtp=2", "mtp_reuse=true", "execution.mode=op"]),
        ("transformerless", [*APART, "prefill.dies=2", "execution.overlap=true"]),
        ("colocated", ["dies=6", "experts.shared_dies=2", *OFTEN]),
        ("colocated", ["dies=20", "experts.shared_dies=2", *OFTEN, *OFTENER]),
        ("colocated", ["dies=6", "experts.shared_dies=2", "tp=2", "mtp=1", *OFTEN]),
        ("colocated", ["dies=6", "experts.shared_dies=2", "tp=2", "tp_mode=sp-tp-sp", *OFTEN]),
        ("colocated", ["dies=6", "experts.shared_dies=2", "pipeline.microbatches=2", *OFTEN]),
        ("colocated", ["dies=20", "experts.shared_dies=2", "lockstep=true", *OFTEN, *OFTENER]),
        ("colocated", [*COLOCATED, "lockstep=true"]),
        ("colocated", [*COLOCATED, "lockstep=true", "dies=3", "experts.redundant_slots=3", "mtp=2"]),
        ("colocated", [*COLOCATED, "lockstep=true", "tp=2", "mtp=1"]),
        ("colocated", [*COLOCATED, "lockstep=true", "pipeline.microbatches=2", "exchange=push"]),
        ("colocated", ["dies=6", "experts.shared_dies=2", "o_proj_tp=2", "lockstep=true", *OFTEN]),
        ("pd", ["lockstep=true", "prefill.tp=2", "decode.tp=2", *OFTEN, *OFTENER]),
        ("moe-attention", [*APART, "lockstep=true", "mtp=1"]),
        ("transformerless", [*APART, "lockstep=true", "execution.overlap=true", "threads=2"]),
        ("moe-attention", [*APART, "dataflow=true"]),
        ("moe-attention", [*APART, "dataflow=true", "attention.microbatches=3", "mtp=2"]),
        ("transformerless", [*APART, "dataflow=true", "execution.pin_cores=false"]),
    ],
    ids=str,
)
def test_replicas_that_change_while_steps_go_on_do_not_change_a_bit(
    tiny: TinyCheckpoint, expected: str, deployment: str, overrides: list[str]
) -> None:
    with LLM(tiny, deployment, overrides=overrides) as llm:
        assert run(llm) == expected
        assert reconfigurations(llm)[-1].num_done >= 2


@pytest.mark.parametrize("more", [[], ["lockstep=true"], ["mtp=2"]], ids=str)
def test_dies_of_the_shared_expert_without_replicas(
    tiny: TinyCheckpoint, expected: str, more: list[str]
) -> None:
    with LLM(tiny, "colocated", overrides=["dies=5", "experts.shared_dies=3", *more]) as llm:
        assert run(llm) == expected


@pytest.mark.parametrize(
    ("deployment", "overrides"),
    [("colocated", ["dies=6", "experts.shared_dies=2", *OFTEN]), ("moe-attention", APART)],
)
def test_dies_of_the_shared_expert_get_replicas(
    tiny: TinyCheckpoint, deployment: str, overrides: list[str]
) -> None:
    with LLM(tiny, deployment, overrides=overrides) as llm:
        llm.generate(PROMPTS, PARAMS)
        (plan,) = llm.engine.plan.tes
        shared = [mem for _, mem in plan.all_memories if mem.is_shared]
        rows = [mem.redundant.num_rows.sum() for mem in shared if mem.redundant is not None]
        assert len(rows) == plan.sizes.experts.num_shared_dies
        assert sum(rows) > 0


def test_no_step_uses_a_slot_while_its_bytes_change(
    tiny: TinyCheckpoint, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are full of other bytes while they are loaded; their dies would not even notice."""
    spoil_slots(monkeypatch)
    monkeypatch.setattr(RedundantSlots, "accept", lambda self, local_idx, layer: None)
    flows = [*APART, "dataflow=true"]
    for deployment, overrides in (
        ("colocated", COLOCATED),
        ("moe-attention", APART),
        ("moe-attention", flows),
    ):
        with LLM(tiny, deployment, overrides=overrides) as llm:
            assert run(llm) == expected
            assert reconfigurations(llm)[0].num_done >= 2


@pytest.mark.parametrize(
    ("deployment", "overrides"),
    [
        ("colocated", COLOCATED),
        ("colocated", [*COLOCATED, "tp=2", "pipeline.microbatches=2"]),
        ("moe-attention", APART),
    ],
)
def test_no_step_in_lockstep_uses_a_slot_while_its_bytes_change(
    tiny: TinyCheckpoint,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    deployment: str,
    overrides: list[str],
) -> None:
    spoil_slots(monkeypatch)
    with LLM(tiny, deployment, overrides=[*overrides, "lockstep=true"]) as llm:
        assert run(llm) == expected
        assert reconfigurations(llm)[0].num_done >= 2


@pytest.mark.parametrize(("deployment", "overrides"), [("colocated", COLOCATED), ("moe-attention", APART)])
def test_lockstep_notices_a_row_for_half_an_expert(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, deployment: str, overrides: list[str]
) -> None:
    keep_slots_in_use(monkeypatch)
    load_slowly(monkeypatch)
    with (
        pytest.raises(ProtocolError, match="has got a row for a redundant slot that holds no expert"),
        LLM(tiny, deployment, overrides=[*overrides, "lockstep=true"]) as llm,
    ):
        run(llm)


def spoil_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command to load it until its arrays are there, a slot is full of small wrong numbers."""
    put = Reconfiguration.load_if_drained

    def load_and_spoil(self: Reconfiguration) -> None:
        was = self.phase
        put(self)
        if was == "draining" and self.phase == "loading":
            for change in self.loads:
                for address, nbytes in self.redundant_slots(change.holder).pieces(change.layer, change.slot):
                    self.pod.memories.write(address, b"\x3c" * nbytes)

    monkeypatch.setattr(Reconfiguration, "load_if_drained", load_and_spoil)


def keep_slots_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave phase 2 out: dies go on with the map that they have."""
    set_map = Reconfiguration.set_map

    def only_final_ones(self: Reconfiguration, phy2log: list[list[int]]) -> None:
        if self.phase == "loaded":
            set_map(self, phy2log)

    monkeypatch.setattr(Reconfiguration, "set_map", only_final_ones)


def load_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each array of an expert takes as long as part of a step."""
    copy = DMA.copy

    async def slow(self: DMA, pieces: Any, name: str = "copy") -> None:
        if name == "replicas":
            await self.fabric.clock.sleep(250_000)
        await copy(self, pieces, name)

    monkeypatch.setattr(DMA, "copy", slow)


def test_steps_go_on_while_slots_are_loaded(
    tiny: TinyCheckpoint, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_slowly(monkeypatch)
    during: set[int] = set()
    before_step = Reconfiguration.before_step

    def spy(self: Reconfiguration, step_idx: int) -> None:
        if self.phase == "loading":
            during.add(step_idx)
        before_step(self, step_idx)

    monkeypatch.setattr(Reconfiguration, "before_step", spy)
    with LLM(tiny, "colocated", overrides=COLOCATED) as llm:
        assert run(llm) == expected
        assert reconfigurations(llm)[0].num_done >= 1
    assert len(during) >= 4


@pytest.mark.parametrize(("deployment", "overrides"), [("colocated", COLOCATED), ("moe-attention", APART)])
def test_without_phase_2_a_die_notices_a_row_for_half_an_expert(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, deployment: str, overrides: list[str]
) -> None:
    keep_slots_in_use(monkeypatch)
    load_slowly(monkeypatch)
    with (
        pytest.raises(ProtocolError, match="a row has come for redundant slot 0 of expert layer"),
        LLM(tiny, deployment, overrides=overrides) as llm,
    ):
        run(llm)


def test_without_phase_2_and_without_the_die_s_look_the_bits_are_wrong(
    tiny: TinyCheckpoint, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_slots_in_use(monkeypatch)
    load_slowly(monkeypatch)
    spoil_slots(monkeypatch)
    monkeypatch.setattr(RedundantSlots, "accept", lambda self, local_idx, layer: None)
    with LLM(tiny, "colocated", overrides=COLOCATED) as llm:
        assert run(llm) != expected


def test_slots_are_loaded_only_when_every_step_with_the_old_map_has_ended(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned ahead, such a step is running when the new map is sent."""
    events: list[tuple[str, Any]] = []

    def spy(owner: type, name: str, event: str) -> None:
        original = getattr(owner, name)

        def wrapped(self: Any, *args: Any) -> Any:
            if event != "loading" or isinstance(args[0], LoadExperts):
                events.append((event, (self.rank, args[0]) if event == "launched" else args[0]))
            return original(self, *args)

        monkeypatch.setattr(owner, name, wrapped)

    spy(DPGroup, "launch", "launched")
    spy(Reconfiguration, "after_step", "ended")
    spy(Reconfiguration, "set_map", "map")
    spy(Die, "put", "loading")
    with LLM(tiny, "colocated", overrides=[*COLOCATED, "execution.overlap=true"]) as llm:
        llm.generate(PROMPTS, PARAMS)
    num_overlapped = num_loaded = 0
    launched, ended, needed = set[Any](), set[Any](), set[Any]()  # steps with their DP groups
    for event, step in events:
        match event:
            case "launched":
                launched.add(step)
            case "ended":
                ended.add(step)
            case "map":
                needed = set(launched)
                num_overlapped += needed > ended
            case "loading":
                assert needed <= ended
                num_loaded += 1
    assert num_overlapped >= 2
    assert num_loaded >= 2


def test_what_a_slot_holds_is_the_primary_byte_for_byte(tiny: TinyCheckpoint) -> None:
    for precision in ("fp32", "int8"):
        with LLM(tiny, "colocated", precision, overrides=[*COLOCATED, "mtp=1"]) as llm:  # type: ignore[arg-type]
            llm.generate(PROMPTS, PARAMS)
            (plan,), memories = llm.engine.plan.tes, llm.engine.plan.pod.memories
            found = 0
            for mem in plan.memories:
                assert mem.redundant is not None
                for (layer, slot), expert in np.ndenumerate(mem.redundant.experts):
                    if expert == NOTHING:
                        continue
                    home = next(other for other in plan.memories if expert in other.experts)
                    assert home is not mem
                    assert home.redundant is not None
                    # A slot's pieces, counted from the primaries on.
                    place = int(expert) - home.experts.start - len(home.experts)
                    pairs = zip(
                        mem.redundant.pieces(layer, slot), home.redundant.pieces(layer, place), strict=True
                    )
                    for (copy, nbytes), (primary, _) in pairs:
                        assert memories.read(copy, nbytes) == memories.read(primary, nbytes)
                        found += 1
            assert found > 0


@pytest.mark.parametrize(("deployment", "overrides"), [("colocated", COLOCATED), ("moe-attention", APART)])
def test_all_dies_change_maps_before_the_same_steps(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, deployment: str, overrides: list[str]
) -> None:
    seen: dict[int, list[Any]] = defaultdict(list)
    obey = Executor.obey

    async def spy(self: Executor, command: msgspec.Struct) -> None:
        if isinstance(command, SetExpertMap):
            seen[self.rank].append(command.phy2log)
        elif isinstance(command, StepPlan):
            seen[self.rank].append(command.step)
        await obey(self, command)

    monkeypatch.setattr(Executor, "obey", spy)
    late = ["execution.overlap=true", "execution.pin_cores=false"]
    with LLM(tiny, deployment, overrides=[*overrides, *late]) as llm:
        llm.generate(PROMPTS, PARAMS)
    assert len(seen) == 4
    assert all(commands == seen[0] for commands in seen.values())
    assert sum(isinstance(command, list) for command in seen[0]) >= 4


def test_storage_that_fails_ends_requests_with_its_reason(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(self: ExpertStorage, number: int, expert: int) -> list[Any]:
        raise CheckpointError("the checkpoint has gone")

    monkeypatch.setattr(ExpertStorage, "read", read)
    with (
        pytest.raises(CheckpointError, match="has gone"),
        LLM(tiny, "colocated", overrides=COLOCATED) as llm,
    ):
        llm.generate(PROMPTS, PARAMS)


# ---- load -------------------------------------------------------------------------------------------------


def test_the_load_is_that_of_the_routing_and_none_is_lost(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices: list[np.ndarray] = []
    monkeypatch.setattr(EPLBTrigger, "add_slice", lambda self, counts: slices.append(counts))
    monkeypatch.setattr(EPLBTrigger, "is_due", False)
    once = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    short = [*COLOCATED, "experts.balance_interval=0.000002", "scheduler.max_num_batched_tokens=16"]
    with LLM(tiny, "colocated", "fp32", overrides=short) as llm:
        llm.generate(PROMPTS, once)
        config, plan = llm.engine.plan.config, llm.engine.plan.tes[0]
        shape = config.num_moe_layers, config.n_routed_experts
        not_reported = [mem.workspace.take("load", *shape).copy() for mem in plan.memories]
    assert len(slices) >= 2
    walk, total = Walk(tiny, PROMPTS), np.sum([*slices, *not_reported], axis=0)
    chosen = [walk.run(layer) for layer in range(config.num_hidden_layers)]
    layers = [topk_idx for topk_idx in chosen if topk_idx is not None]
    for number, topk_idx in enumerate(layers):
        wanted = np.bincount(topk_idx.ravel(), minlength=config.n_routed_experts)
        assert total[number].tolist() == wanted.tolist()
    assert total.sum() == len(layers) * config.num_experts_per_tok * sum(map(len, PROMPTS))


def test_rows_go_where_the_map_says(tiny: TinyCheckpoint) -> None:
    """Every copy that a gate sends comes to some die; with replicas the hottest one has fewer."""
    hot = [[3, 4, 5] * 8] * 12
    shares = []
    for interval in ("0", "0.001"):
        settings = [*COLOCATED, f"experts.balance_interval={interval}"]
        with LLM(tiny, "colocated", overrides=settings) as llm:
            llm.generate(hot, PARAMS)
            plan = llm.engine.plan.tes[0]
            rows = np.array([mem.redundant.num_rows for mem in plan.memories if mem.redundant is not None])
            config = plan.config
            assert (rows.sum(axis=0) % config.num_experts_per_tok == 0).all()
            assert len(set(rows.sum(axis=0).tolist())) == 1
            shares.append((rows.max(axis=0) / rows.mean(axis=0)).max())
    assert shares[1] < shares[0]


def test_no_interval_no_replicas(tiny: TinyCheckpoint, expected: str) -> None:
    off = [*COLOCATED, "experts.balance_interval=0"]
    with LLM(tiny, "colocated", overrides=off, trace=True) as llm:
        assert run(llm) == expected
        assert reconfigurations(llm)[0].num_done == 0
        names = {span.name for span in llm.engine.plan.pod.trace.spans}
        assert "Route" in names
        assert "Collect" not in names
        assert llm.engine.stats().expert_load == ()


def test_metrics_tell_how_uneven_the_load_is(tiny: TinyCheckpoint) -> None:
    told: list[ReplicasChanged] = []
    with LLM(tiny, "colocated", overrides=COLOCATED) as llm:
        llm.engine.observe(lambda event: told.append(event) if isinstance(event, ReplicasChanged) else None)
        llm.generate(PROMPTS, PARAMS)
        stats = llm.engine.stats()
        assert stats.num_reconfigurations == len(told)
        assert all(each.te == "te" and each.num_slots > 0 for each in told)
        assert stats.num_reconfigurations == reconfigurations(llm)[0].num_done > 0
        assert [(each.te, each.layer) for each in stats.expert_load] == [("te", 1), ("te", 2), ("te", 3)]
        for each in stats.expert_load:
            assert each.hottest_expert >= each.hottest_die >= 1
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in EngineCollector("m", lambda: stats).collect()
        for sample in family.samples
    }
    name = "xdeepserve:expert_load_hottest_over_mean"
    assert samples[name, "m", "te", "3", "dies"] == stats.expert_load[-1].hottest_die
    assert samples[name, "m", "te", "3", "experts"] == stats.expert_load[-1].hottest_expert
    assert samples["xdeepserve:expert_reconfigurations_total", "m"] == stats.num_reconfigurations


# ---- the map ----------------------------------------------------------------------------------------------


def replica_map(sizes: Sizes, config: ModelConfig, rank: int) -> tuple[ReplicaMap, list[Any]]:
    """A die's map on memory of its own, and stand-ins for the layers."""
    pod = Pod()
    space = Workspace(pod.plan(0).app)
    made = ReplicaMap(space, config, sizes.experts, rank)
    pod.materialise()
    space.materialise(pod.memory(0))
    layers = [object() for _ in primaries_only(sizes.experts)]
    made.start(layers)  # type: ignore[arg-type]
    return made, layers


def test_the_column_of_an_expert_rotates_over_its_replicas(tiny_config: ModelConfig) -> None:
    """xDeepServe 4.5, Figure 12: primary in slot 2, redundant in slot 1, four tokens."""
    (sizes,) = fit(resolve("colocated", ["dies=16", "experts.redundant_slots=1"]), tiny_config)
    phy2log = primaries_only(sizes.experts)
    assert phy2log[0][:6] == [0, NOTHING, 1, NOTHING, 2, NOTHING]
    phy2log[0][1] = 1
    topk_idx = np.array([[1, 0], [1, 2], [0, 1], [1, 0]], np.int32)
    for rank, column in ((0, [2, 1, 2, 1]), (1, [1, 2, 1, 2])):
        made, layers = replica_map(sizes, tiny_config, rank)
        made.set_map(phy2log)
        out = np.empty_like(topk_idx)
        made.find(out, topk_idx, layers[0])
        assert out[topk_idx == 1].tolist() == column
        assert set(out[topk_idx == 0].tolist()) == {0}
        assert set(out[topk_idx == 2].tolist()) == {4}
        made.find(out, topk_idx, layers[1])  # another layer's map
        assert set(out[topk_idx == 1].tolist()) == {2}


def test_slots_of_dies_with_unequal_shares(tiny_config: ModelConfig) -> None:
    (sizes,) = fit(resolve("colocated", ["dies=3", "experts.redundant_slots=2"]), tiny_config)
    assert [len(held) for held in sizes.experts.experts_of] == [5, 5, 6]
    assert sizes.experts.slots_of == (range(7), range(7, 14), range(14, 22))
    assert [e for e in primaries_only(sizes.experts)[0] if e != NOTHING] == list(range(16))


# ---- the trigger ------------------------------------------------------------------------------------------


def trigger(tiny_config: ModelConfig, *overrides: str) -> tuple[EPLBTrigger, list[list[list[int]]]]:
    """A trigger for four dies, and empty slots in one layer."""
    settings = ["dies=4", "experts.redundant_slots=1", "experts.balance_slices=2", *overrides]
    sizes = fit(resolve("colocated", settings), tiny_config)[0]
    return EPLBTrigger(sizes.experts, tiny_config.num_experts_per_tok), [[[], [], [], []]]


def test_a_copy_of_the_shared_expert_is_load_of_its_die(tiny_config: ModelConfig) -> None:
    """Two dies of routed experts and one copy, to which each token comes: no replica comes there besides."""
    settings = ["dies=3", "experts.shared_dies=1", "experts.redundant_slots=1", "experts.balance_slices=1"]
    sizes = fit(resolve("colocated", settings), tiny_config)[0]
    targets = []
    for top_k in (1, 1000):
        made = EPLBTrigger(sizes.experts, top_k)
        made.add_slice(one_layer({0: 500}))
        targets.append(made.decide([[[], [], []]]))
    busy, idle = targets
    assert busy is None  # it is the hottest die, whatever is where
    assert idle is not None
    assert idle[0][2] == [0]


def one_layer(hot: dict[int, int]) -> np.ndarray:
    """[1, E]: ten tokens for each expert but the hot ones."""
    return np.array([[hot.get(e, 10) for e in range(16)]], np.int64)


def test_it_waits_for_the_end_of_an_interval(tiny_config: ModelConfig) -> None:
    made, empty = trigger(tiny_config)
    assert not made.is_due
    made.add_slice(one_layer({0: 500}))
    assert not made.is_due
    made.add_slice(one_layer({0: 500}))
    assert made.is_due
    target = made.decide(empty)
    assert target is not None
    assert [0 in held for held in target[0]] == [False, True, True, True]
    assert not made.is_due


def test_it_leaves_replicas_that_are_good_enough(tiny_config: ModelConfig) -> None:
    made, empty = trigger(tiny_config)
    for _ in range(2):
        made.add_slice(one_layer({0: 500}))
    target = made.decide(empty)
    assert target is not None
    for _ in range(2):
        made.add_slice(one_layer({0: 490, 5: 11}))
    assert made.decide(target) is None


def test_even_load_or_none_needs_no_replicas(tiny_config: ModelConfig) -> None:
    for hot in ({}, dict.fromkeys(range(16), 0)):
        made, empty = trigger(tiny_config)
        for _ in range(2):
            made.add_slice(one_layer(hot))
        assert made.decide(empty) is None
        assert len(made.skews(empty)) == 1


# ---- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("monolithic", ["experts.redundant_slots=1"], "experts is no setting of monolithic"),
        ("colocated", ["dies=1", "experts.redundant_slots=1"], "each of which has use for 0 at most"),
        ("colocated", ["dies=4", "experts.redundant_slots=13"], "each of which has use for 12 at most"),
        ("colocated", ["experts.redundant_slots=-1"], "must be 0 or more, found -1"),
        ("colocated", ["experts.balance_interval=-0.5"], "0 or more, found -0.5"),
        ("colocated", ["experts.balance_interval=inf"], "0 or more and finite, found inf"),
        ("colocated", ["experts.balance_slices=0"], "must be at least 1, found 0"),
        ("colocated", ["experts.routed_dies=2"], "for pods with dies for experts alone"),
        ("pd", ["experts.shared_dies=4"], "experts.shared_dies=4 leaves no die of 4 for routed experts"),
        ("colocated", ["dies=3", "experts.shared_dies=3"], "leaves no die of 3 for routed experts"),
        ("colocated", ["experts.shared_dies=-1"], "must be 0 or more, found -1"),
        ("colocated", ["dies=17"], "dies=17 is more than the model's 16 routed experts"),
        ("colocated", ["dies=19", "experts.shared_dies=2"], "more than the model's 16 routed experts"),
        ("pd", ["decode.dies=1", "experts.redundant_slots=1"], "decode 0 has 1 die with routed experts"),
        ("pd", ["decode.redundant_slots=13"], "decode.redundant_slots=13: decode 0 has 4 dies"),
        ("pd", ["decode.shared_dies=4"], "decode.shared_dies=4 leaves no die of 4 for routed experts"),
        ("pd", ["decode.shared_dies=-1"], "decode.shared_dies must be 0 or more, found -1"),
        ("pd", ["decode.experts_per_die=0"], "decode.experts_per_die must be at least 1, found 0"),
        ("pd", ["decode.experts_per_die=4"], "holds between 5 and 17 experts, the shared one counted"),
        ("pd", ["decode.experts_per_die=5", "decode.shared_dies=1"], "holds between 6 and 16 experts"),
        ("pd", ["decode.dies=20", "prefill.experts_per_die=9"], "decode.dies=20 is more than the model's 16"),
        (
            "pd",
            ["prefill.experts_per_die=9", "prefill.redundant_slots=1"],
            "is for replicas: choose one",
        ),
        ("monolithic", ["decode.experts_per_die=9"], "decode is no setting of monolithic"),
        (
            "transformerless",
            ["decode.shared_dies=1"],
            "decode.shared_dies it has prefill.shared_dies and",
        ),
        ("eaas", ["experts.experts_per_die=9"], "pods whose dies exchange tokens in a group"),
    ],
)
def test_refusals(name: str, overrides: list[str], reason: str, tiny_config: ModelConfig) -> None:
    with pytest.raises(DeploymentError, match=reason) as caught:
        fit(resolve(name, overrides), tiny_config)
    assert "\n" not in str(caught.value)


def test_what_models_without_experts_and_timing_only_runs_lack_is_refused(tiny: TinyCheckpoint) -> None:
    for timing in (TimingConfig(of_dies=8), TimingConfig(routed_dies=2)):
        with pytest.raises(
            DeploymentError, match=r"timing: (of_dies|routed_dies) and experts\.redundant_slots"
        ):
            PodPlan(tiny, resolve("colocated", COLOCATED), timing=timing)
    with pytest.raises(DeploymentError, match=r"timing: of_dies and dataflow exclude each other"):
        PodPlan(tiny, resolve("moe-attention", ["dataflow=true"]), timing=TimingConfig(of_dies=16))
    with pytest.raises(DeploymentError, match=r"timing: of_dies and experts\.shared_dies exclude"):
        PodPlan(tiny, resolve("colocated", ["experts.shared_dies=1"]), timing=TimingConfig(of_dies=16))
    dense = msgspec.structs.replace(
        tiny.config, first_k_dense_replace=tiny.config.num_hidden_layers, num_nextn_predict_layers=0
    )
    with pytest.raises(DeploymentError, match="needs a model with routed experts"):
        fit(resolve("colocated", ["dies=2", "experts.redundant_slots=1"]), dense)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("deployment", "settings"),
    [
        ("colocated", ["dies=4"]),
        ("colocated", ["dies=36"]),
        ("colocated", ["dies=4", "mtp=1", "pipeline.microbatches=2"]),
        ("moe-attention", ["mtp=1"]),
        ("transformerless", []),
    ],
)
def test_runs_that_only_take_time_move_experts(deployment: str, settings: list[str]) -> None:
    """Their load is drawn: what is popular stays so, and replicas of it make the hottest die cooler."""
    moves = ["experts.redundant_slots=1", "experts.balance_interval=0.001", "experts.balance_slices=1"]
    overrides = [*moves, *settings, "max_model_len=64"]
    params = SamplingParams(max_tokens=16, ignore_eos=True)

    def served() -> tuple[int, int, float, float]:
        timing = TimingConfig(skew=1.0)
        with LLM("tiny", deployment, overrides=overrides, timing_only=timing) as llm:
            llm.generate([[3, 4, 5 + i] for i in range(16)], params)
            (te,) = [te for te in llm.engine.je.tes if te.sizes.place.role != "prefill"]
            changes = te.reconfiguration
            assert changes is not None
            without = [[[] for _ in held] for held in changes.holdings]
            hottest = [
                sum(s.dies for s in changes.trigger.skews(held)) for held in (changes.holdings, without)
            ]
            return llm.engine.plan.pod.clock.now, changes.num_done, hottest[0], hottest[1]

    first = served()
    _, num_reconfigurations, with_replicas, without_them = first
    assert num_reconfigurations
    assert with_replicas < 0.9 * without_them
    assert served() == first


def test_describe_tells_of_the_slots(tiny: TinyCheckpoint) -> None:
    settings = ["dies=4", "experts.redundant_slots=2", "experts.balance_interval=0.5"]
    text = describe(PodPlan(tiny, resolve("colocated", settings), "int8"))
    assert "2 redundant slots in each layer on each die with experts, balanced every 0.5 s" in text
    assert " 12..15 + 2 " in text


def test_the_memory_has_room_for_slots_and_what_they_are_loaded_from(tiny: TinyCheckpoint) -> None:
    plans = [
        PodPlan(tiny, resolve("colocated", ["dies=4", f"experts.redundant_slots={n}"]), "int8")
        for n in (0, 2)
    ]
    without, with_slots = (plan.tes[0].memories[0] for plan in plans)
    assert without.redundant is None
    assert with_slots.redundant is not None
    assert with_slots.weight_nbytes - without.weight_nbytes == pytest.approx(
        2 * with_slots.redundant.nbytes, rel=0.02
    )
    pod = plans[1].pod
    host = pod.topology.host(0)
    assert pod.memories.plans[host].app.nbytes >= 4 * 2 * with_slots.redundant.nbytes
