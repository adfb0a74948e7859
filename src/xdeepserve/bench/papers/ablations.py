"""`xdeepserve bench papers --ablations`: the effect of each mechanism of the timing model on the published
rows.

One mechanism at a time is switched off (or replaced by another form), with all fitted numbers unchanged.
Every row of `groups` is computed again, and two pods are run again. A mechanism names the groups that it
affects; tests check that these change, and no others. SP-TP-SP, packed prompts and the far end of a copy are
left out: runs have them, but no published row depends on them alone.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from xdeepserve.bench.papers import (
    carriers,
    comm,
    expert_skew,
    interference,
    paper_rows,
    pipelines,
    superpod,
)
from xdeepserve.bench.papers.sizes import MODEL
from xdeepserve.bench.report import Row
from xdeepserve.comm.cost import CommCost
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.hw.spec import Param, Spec
from xdeepserve.hw.topology import SUB_PLANES, Plane
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import resolve_model
from xdeepserve.prices.formula import EP320, ExpertDies, LayerCost, Load, PrefillCost, Tiles
from xdeepserve.prices.step_run import decode_iteration
from xdeepserve.progress import working

PUSHED = frozenset({"FusedDispatch", "FusedCombine"})
EXCHANGES = PUSHED | {"A2E", "E2A", "crossing"}
DECODE = frozenset(
    {
        "Table 4",
        "stream 1",
        "layer",
        "a layer's gain",
        "gains",
        "streams of batch 8",
        "time per token",
        "EPLB",
    }
)
PREFILL = frozenset({"prefill", "prefill's gain"})
FETCHED = frozenset({"prefill", "prefill's gain", "send and receive", "dispatch beside KV"})
PODS = frozenset({"pod of 288", "pod of 768"})
SIMULATED = PODS | {"A2E's MTE2"}


class Formulas(NamedTuple):
    """Parameters and cost models from which all rows are computed."""

    spec: Spec
    config: ModelConfig
    pull: CommCost
    push: CommCost
    decode: type[LayerCost] = LayerCost  # how microbatches of a layer go
    unabsorbed: bool = True  # prefill's attention
    hides: bool = True  # its two microbatches one's exchanges behind the other's kernels
    kv_plane: Plane = Plane.UB  # on which KV comes while dies dispatch
    shares_hbm: bool = True  # two streams of a die
    tiles: Tiles = "BSND"  # of attention
    carrier: Literal["mte", "urma"] = "urma"  # of A2E, where what MTE2 is left counts

    @staticmethod
    def with_spec(spec: Spec) -> Formulas:
        config = resolve_model(MODEL).config
        return Formulas(spec, config, CommCost(spec), CommCost(spec, way="push"))

    @property
    def layer(self) -> LayerCost:
        """CloudMatrix's cost model of a decode layer."""
        return self.decode(self.config, self.spec, self.push, self.shares_hbm, self.tiles)

    @property
    def pulled_layer(self) -> LayerCost:
        """xDeepServe's cost model of a decode layer, whose exchanges pull."""
        return self.decode(self.config, self.spec, self.pull, self.shares_hbm, self.tiles)

    @property
    def prefill(self) -> PrefillCost:
        """CloudMatrix's cost model of prefill."""
        return PrefillCost(
            self.config, unabsorbed=self.unabsorbed, comm=self.push, spec=self.spec, hides=self.hides
        )


class _FixedSplit(LayerCost, frozen=True):
    """Decode layer with a fixed split of cores: the two streams have 16 and 8 cores under any load."""

    def microbatched_ns(self, load: Load, dies: ExpertDies, splits: Sequence[int] = ()) -> float:
        return LayerCost.microbatched_ns(self, load, dies, (pipelines.CM_SPLIT,))


class _OneStream(LayerCost, frozen=True):
    """Decode layer with a single stream: all cores do the stages in sequence."""

    def microbatched_ns(self, load: Load, dies: ExpertDies, splits: Sequence[int] = ()) -> float:
        return self.serial_ns(load, dies)


class _EvenRouting(CommCost, frozen=True):
    """Exchange with even routing: every rank receives the mean."""

    def busiest(self, num_ranks: int, rows: float) -> float:
        return 1.0


class Mechanism(NamedTuple):
    """A mechanism of the timing model: its name, the formulas without it, and the groups of rows affected."""

    name: str
    off: Callable[[], Formulas]
    groups: frozenset[str]


class Shift(msgspec.Struct, frozen=True):
    """Largest change of a group's rows without a mechanism, in percent, with its sign."""

    mechanism: str
    group: str
    percent: float
    expected: bool


def without(**values: float) -> Formulas:
    """Make formulas with other values of some parameters."""
    spec = Spec()
    changed = {name: Param(value, getattr(spec, name).unit, "switched off") for name, value in values.items()}
    return Formulas.with_spec(msgspec.structs.replace(spec, **changed))


def whole() -> Formulas:
    """Make the formulas with every mechanism switched on."""
    return Formulas.with_spec(Spec())


def _even() -> Formulas:
    return whole()._replace(pull=_EvenRouting(), push=_EvenRouting(way="push"))


def _one_sub_plane() -> Formulas:
    machine = without(ub_bandwidth=Spec().ub_bandwidth.value / SUB_PLANES)
    one = msgspec.structs.replace(machine.pull, spread=False)
    return machine._replace(pull=one, push=msgspec.structs.replace(one, way="push"))


def _int8_attention() -> Formulas:
    machine = whole()
    layers = frozenset(range(machine.config.num_hidden_layers))
    return machine._replace(config=msgspec.structs.replace(machine.config, int8_attention=layers))


MECHANISMS = (
    # 1. What exchanges consist of
    Mechanism(
        "cores of an operator meet",
        lambda: without(core_meeting=0),
        DECODE | PODS | {"FusedDispatch", "A2E", "E2A", "crossing"} | PREFILL,  # KV's port lets others meet
    ),
    Mechanism(
        "fields are posted and noted one by one",
        lambda: without(piece_overhead=0, field_poll=0),
        DECODE | PODS | EXCHANGES - {"crossing"} | {"dispatch beside KV"} | PREFILL,
    ),
    Mechanism(
        "a message takes its time at a port",
        lambda: without(exchange_copy=0),
        DECODE | PODS | EXCHANGES - {"crossing"} | {"dispatch beside KV"} | PREFILL,
    ),
    Mechanism("routing is uneven", _even, DECODE | EXCHANGES - {"A2E"} | PREFILL),
    Mechanism(
        "servers are apart",
        lambda: without(inter_server_loss=0, inter_server_latency=0),
        DECODE | PODS | EXCHANGES - {"crossing"} | FETCHED,
    ),
    Mechanism(
        "messages are spread over sub-planes",
        _one_sub_plane,  # which dispatch and combine of a pod know by another parameter, A2E by bandwidth
        DECODE | {"pod of 768"} | EXCHANGES - {"crossing"} | FETCHED,
    ),
    Mechanism("serving waits for the slowest", lambda: without(barrier_stretch=1), DECODE | PODS | PREFILL),
    # 2. What is shared
    Mechanism(
        "an attention die has few cores to spare",
        lambda: without(attention_cores=48),
        frozenset({"A2E", "E2A", "pod of 768"}),
    ),
    Mechanism(
        "a vector core moves so many bytes",
        lambda: without(mte_bandwidth=1e15),
        frozenset({"send and receive", "A2E", "E2A", "pod of 768"}),
    ),
    Mechanism(
        "URMA leaves MTE2 to compute kernels",
        lambda: whole()._replace(carrier="mte"),
        frozenset({"A2E's MTE2"}),
    ),
    Mechanism(
        "streams share HBM",  # those of CloudMatrix's batches read weights while the other one exchanges
        lambda: whole()._replace(shares_hbm=False),
        frozenset({"streams of batch 8"}),
    ),
    Mechanism(
        "KV and exchanges share ports",
        lambda: whole()._replace(kv_plane=Plane.ROCE),
        frozenset({"dispatch beside KV"}),
    ),
    # 3. Kernels
    Mechanism("a tile begins and ends", lambda: without(tile_overhead=0), frozenset({"Table 9"})),
    Mechanism(
        "cores are split as suits the load",
        lambda: whole()._replace(decode=_FixedSplit),
        frozenset({"Table 4", "layer", "gains"}),
    ),
    Mechanism(
        "attention's tiles follow the rows of drafts",
        lambda: whole()._replace(tiles="BNSD"),
        DECODE - {"stream 1"} | {"stream 0"},
    ),
    Mechanism("attention is BF16", _int8_attention, DECODE - {"stream 1"} | {"stream 0"} | PODS),
    Mechanism(
        "attention keeps a share of its peak",
        lambda: without(compute_efficiency=1),
        DECODE - {"stream 1"} | {"stream 0", "A2E"} | PREFILL | PODS,  # vector cores keep that share, too
    ),
    Mechanism(
        "two streams go side by side",
        lambda: whole()._replace(decode=_OneStream),
        frozenset({"Table 4", "layer", "a layer's gain", "gains"}),
    ),
    # 4. Prefill
    Mechanism(
        "prefill's exchanges hide behind its kernels",
        lambda: whole()._replace(hides=False),
        PREFILL,
    ),
    Mechanism(
        "prefill's attention is not absorbed",
        lambda: whole()._replace(unabsorbed=False),
        PREFILL,
    ),
)


def groups(machine: Formulas) -> dict[str, list[Row]]:
    """Compute all formula rows, grouped by topic."""
    exchanges, layer = comm.exchanges(machine.push), machine.layer
    decode, a2e = superpod.formulas(layer), comm.a2e(machine.pull)
    prefill = paper_rows.prefill(machine.prefill)

    def named(rows: Iterable[Row], *prefixes: str) -> list[Row]:
        return [row for row in rows if row.name.startswith(prefixes)]

    return {
        "send and receive": comm.figure_5(machine.spec),
        "dispatch beside KV": [_beside_kv(machine)],
        "FusedDispatch": named(exchanges, "cm.t6/dispatch/"),
        "FusedCombine": named(exchanges, "cm.t6/combine/"),
        "A2E": named(a2e, "xds.a2e"),
        "E2A": named(a2e, "xds.e2a"),
        "crossing": list(paper_rows.crossover(machine.pull)),
        "Table 9": list(paper_rows.gemms(machine.spec)),
        "Table 4": named(decode, "cm.t4/"),
        "stream 0": named(decode, "cm.streams/stream0"),
        "stream 1": named(decode, "cm.streams/stream1"),
        "streams of batch 8": [_second_of_few(layer)],
        "layer": named(decode, "cm.mtp.layer/"),
        "gains": [*pipelines.gains_by_formula(layer), *paper_rows.gains_by_drafts(layer)],
        "a layer's gain": list(paper_rows.microbatches(layer)),
        "time per token": list(paper_rows.latency_by_drafts(machine.pulled_layer)),
        "EPLB": [expert_skew.gain(machine.pulled_layer)],
        "prefill": named(prefill, "cm.t2/"),
        "prefill's gain": named(prefill, "cm.mb.prefill"),
    }


def _second_of_few(cost: LayerCost) -> Row:
    """Compute the time of stream 1 with microbatches so small that both streams read most of the time."""
    _, second = cost.streams_ns(Load(requests=2, rows=2, context=pipelines.CM_CONTEXT), EP320, 16)
    return Row("streams/batch=8/stream1", second / 1000, "us", "predicted")


def _beside_kv(machine: Formulas) -> Row:
    time = interference.dispatch_ns(machine.kv_plane, machine.spec)
    return Row("interference/ub/dispatch", time / 1000, "us", "predicted")


@functools.cache
def _mte2(carrier: Literal["mte", "urma"]) -> int:
    """Simulate A2E and return the time that it uses MTE2 of an attention die [ns]."""
    return carriers.simulate(carrier).attention_mte2


def simulated(machine: Formulas) -> dict[str, list[Row]]:
    """Simulate xDeepServe's two deployments, for a model with a single layer of experts. Settings that are
    not parameters or part of the model stay unchanged."""
    model = copy.copy(resolve_model(MODEL))
    dense = model.config.first_k_dense_replace
    model.config = msgspec.structs.replace(
        machine.config,
        num_hidden_layers=dense + 1,
        int8_attention=frozenset(range(dense + 2)) & machine.config.int8_attention,
    )
    busy = _mte2(machine.carrier)
    found = {"A2E's MTE2": [Row("ablation/A2E/mte2", busy / 1000, "us", "predicted")]}
    for group, deployment, batch in (
        ("pod of 288", superpod.colocated_deployment(288, superpod.BATCH_288), superpod.BATCH_288),
        ("pod of 768", superpod.SUPERPOD, superpod.BATCH_768),
    ):
        timing = TimingConfig(acceptance=superpod.XDS_ACCEPTANCE)
        run = decode_iteration(model, deployment, superpod.CONTEXT, batch, timing, spec=machine.spec)
        found[group] = [Row(f"ablation/{group}/iteration", run.iteration_ns / 1e6, "ms", "predicted")]
    return found


def all_rows(machine: Formulas) -> dict[str, list[Row]]:
    """Compute all groups of rows, by formula and simulated."""
    return groups(machine) | simulated(machine)


def all_changes() -> list[Shift]:
    """List every shift of a group, found or expected, without each mechanism; takes three minutes."""
    before, found = all_rows(whole()), []
    for mechanism in MECHANISMS:
        for group, rows in all_rows(mechanism.off()).items():
            moves = [
                100 * (after.value / row.value - 1) for row, after in zip(before[group], rows, strict=True)
            ]
            most, expected = max(moves, key=abs), group in mechanism.groups
            if expected or any(moves):
                found.append(Shift(mechanism.name, group, most, expected))
    return found


def tell(is_json: bool) -> None:
    """Switch off each mechanism, and print the changes of rows."""
    with working("bench papers --ablations"):
        found = all_changes()
    print_changes(found, is_json)


def print_changes(found: Sequence[Shift], is_json: bool) -> None:
    """Print a line for each mechanism and group."""
    if is_json:
        print(json.dumps({"ablations": msgspec.to_builtins(list(found))}))
        return
    print("Without each mechanism, all else as it is: the largest change of rows, in percent")
    for mechanism in MECHANISMS:
        print(f"\n{mechanism.name}")
        for one in found:
            if one.mechanism == mechanism.name:
                says = "" if one.expected and one.percent else "  not as expected"
                print(f"  {one.group:20} {one.percent:+8.1f}{says}")
