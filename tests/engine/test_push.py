"""`exchange=push`: FusedDispatch and FusedCombine wherever dispatch and combine are (CloudMatrix 4.2.1)."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from tests.engine.lockstep import GREEDY, PROMPTS
from tests.engine.pods import SHAPES, overrides
from tests.tools import one_die
from xdeepserve.comm.cost import FORMULAS
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.exchange_choices import EXCHANGES
from xdeepserve.engine.deploy.deployment import Exchange
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.deploy.rules import without_effect
from xdeepserve.engine.run.lockstep.choice import TWINS
from xdeepserve.engine.ways.among.real import ENDS
from xdeepserve.errors import DeploymentError
from xdeepserve.history import History, Told, serve
from xdeepserve.hw.memory import MemoryPlan
from xdeepserve.llm import digest
from xdeepserve.model.presets import TinyCheckpoint
from xdeepserve.model.weights import Recipe

SLOTS = ("experts.redundant_slots=1", "experts.balance_interval=0.001", "experts.balance_slices=1")


def served(deployment: str, precision: Recipe, *settings: str, is_timing_only: bool = False) -> Told:
    history = History(deployment, ("max_model_len=64", *settings), PROMPTS, GREEDY, precision=precision)
    return serve(replace(history, is_timing_only=is_timing_only), is_traced=True)


def check(deployment: str, precision: Recipe, *settings: str) -> None:
    """The digest of one die, by operators that push, and by none that pull."""
    expected = digest(one_die(PROMPTS, GREEDY, precision, max_model_len=64))
    told = served(deployment, precision, *settings, "exchange=push")
    assert told.digest == expected
    names = {span.name for span in told.trace.spans}
    assert not {name for name in names if name.startswith(("dispatch", "combine"))}
    if deployment in ("colocated", "pd"):
        assert {"fused dispatch 1", "fused combine 3"} <= names
    else:
        assert {"A2E' 1", "E2A 3"} <= names


@pytest.mark.thin(3)
@pytest.mark.parametrize("precision", ["int8", "fp32"])
@pytest.mark.parametrize(
    "settings",
    [
        ("dies=2", "mtp=2"),
        ("dies=5", "mtp=1"),
        ("dies=4", "tp=2"),
        ("dies=4", "tp=2", "tp_mode=sp-tp-sp"),
        ("dies=3", "pipeline.microbatches=2", "mtp=1"),
        ("dies=4", "tp=2", "pipeline.microbatches=2", "pipeline.overlap=engines"),
        ("dies=4", *SLOTS),
        ("dies=5", "experts.shared_dies=2", "mtp=2", *SLOTS),
        ("dies=18", *SLOTS),
    ],
    ids=str,
)
def test_dies_with_attention_and_experts(precision: Recipe, settings: tuple[str, ...]) -> None:
    check("colocated", precision, *settings)


@pytest.mark.thin(3)
@pytest.mark.parametrize("precision", ["int8", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_expert_dies_among_themselves(precision: Recipe, shape: tuple[int, ...]) -> None:
    """The second stage of A2E and the first of E2A; trampolines forward INT8 tokens as they got them."""
    check("moe-attention", precision, *overrides(shape, "mtp=1"))


@pytest.mark.parametrize("deployment", ["pd", "transformerless"])
def test_prefill_and_decode(deployment: str) -> None:
    check(deployment, "int8", "mtp=2")


@pytest.mark.parametrize(
    ("deployment", "settings"),
    [("colocated", ("dies=4",)), ("colocated", ("dies=18", *SLOTS)), ("moe-attention", ())],
)
def test_it_takes_its_own_time_where_only_time_passes(deployment: str, settings: tuple[str, ...]) -> None:
    """Each way is priced by its own steps; few rows are there sooner if nobody has to come for them."""
    ends = []
    for exchange in ("pull", "push"):
        told = served(deployment, "int8", *settings, f"exchange={exchange}", is_timing_only=True)
        spans = told.trace.spans
        ends.append(max(span.end_ns for span in spans))
        if deployment == "colocated":
            assert any(span.name == "fused combine" for span in spans) is (exchange == "push")
    assert 0.95 * ends[0] < ends[1] < ends[0]


@pytest.mark.parametrize("exchange", get_args(Exchange)[1:])
@pytest.mark.parametrize("deployment", ["colocated", "moe-attention", "eaas"])
def test_each_value_has_a_way_of_its_own_or_is_refused(exchange: str, deployment: str) -> None:
    """No value is another one in silence: same tokens at other times, or a refusal by name."""
    pulled, told, refusal = served(deployment, "int8"), None, ""
    try:
        told = served(deployment, "int8", f"exchange={exchange}")
    except DeploymentError as error:
        refusal = str(error)
    if told is None:
        assert f"exchange={exchange}" in refusal
    else:
        assert told.digest == pulled.digest
        assert told.trace.digest() != pulled.trace.digest()


def test_each_value_has_a_row_in_every_table() -> None:
    """Traits, layout and handle, and formulas; and a twin, unless lockstep refuses it."""
    values = {*get_args(Exchange)}
    assert {*EXCHANGES} == {*ENDS} == {*FORMULAS} == values
    assert {value for value in values if EXCHANGES[value].has_twin} == {*TWINS}


@pytest.mark.parametrize("exchange", get_args(Exchange))
def test_each_region_has_cells(exchange: Exchange) -> None:
    """And they are as large as it is, up to its alignment."""
    group, plan = Group((0, 1, 2), (0, 0, 1, 2)), MemoryPlan(0)
    layout = ENDS[exchange].layout.for_group(group, 5, top_k=3, hidden=40)
    layout.plan(plan)
    planned = {name: each.nbytes for area in plan.areas for name, each in area.regions.items()}
    told = {
        name: math.prod((cells.dtype.itemsize, *(n for _, n in cells.dims)))
        for name, cells in layout.cells().items()
    }
    assert told == planned


@pytest.mark.parametrize(
    ("traits", "kind", "settings", "said"),
    [
        ({"has_twin": False}, "colocated", ["lockstep=true"], "lockstep has no twin of exchange=push"),
        (
            {"is_apart": False},
            "eaas",
            [],
            "with attention and experts, and eaas has them apart",
        ),
        ({"waits_for": "a nod"}, "moe-attention", ["dataflow=true"], "exchange=push waits for a nod, and"),
    ],
)
def test_refusals_follow_from_traits(
    traits: dict[str, Any], kind: str, settings: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EXCHANGES, "push", EXCHANGES["push"]._replace(**traits))  # type: ignore[arg-type]
    with pytest.raises(DeploymentError, match=said):
        fit(resolve(kind, ["exchange=push", *settings]), TinyCheckpoint().config)


def test_what_cannot_be_is_refused_in_one_line() -> None:
    config, names = TinyCheckpoint().config, ", ".join(sorted(get_args(Exchange)))
    with pytest.raises(DeploymentError, match=f"exchange must be one of {names}, found 'both'"):
        resolve("colocated", ["exchange=both"])
    with pytest.raises(DeploymentError, match="exchange=push waits for a flag of every die, and dataflow"):
        fit(resolve("moe-attention", ["exchange=push", "dataflow=true"]), config)


def test_one_die_exchanges_with_nobody() -> None:
    ((key, reason),) = without_effect(resolve("monolithic", ["exchange=push"]), ["exchange=push"])
    assert key == "exchange"
    assert "one die" in reason
