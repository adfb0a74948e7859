"""Lockstep: all dies of a step at once leave the same bytes in the same places as a task for each.

But for scratch that no later layer reads (`SCRATCH`), and experts' answers on one die in one call, which are
rounded where experts left them.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest

from tests.engine.lockstep import (
    GREEDY,
    KEPT_FLOAT,
    PRECISIONS,
    PROMPTS,
    SLOTS,
    Model,
    check_apart,
    check_colocated,
    compare,
    serve,
    skip,
    variant,
    with_float,
)
from tests.engine.pods import SHAPES, overrides
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.run.lockstep import colocated, dimensions, disaggregated
from xdeepserve.engine.run.lockstep.heads import Heads
from xdeepserve.engine.run.lockstep.kernels import one_die
from xdeepserve.engine.run.lockstep.kernels import sync as sync_kernels
from xdeepserve.engine.run.lockstep.kernels.attention import FEW, MANY, SCRATCH
from xdeepserve.engine.run.lockstep.lockstep import Lockstep
from xdeepserve.engine.run.lockstep.shares import Contribution, RowCounts
from xdeepserve.errors import DeploymentError, XDeepServeError
from xdeepserve.llm import LLM, build_engine, digest
from xdeepserve.step.frame import Batch, Ends, Frame


def run(precision: str, shape: tuple[int, ...], *more: str) -> tuple[str, dict[tuple[int, str], bytes], int]:
    """The same of a `moe-attention` pod."""
    return serve("tiny-random", "moe-attention", precision, overrides(shape, *more))


@pytest.mark.thin(3)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("dies", "mtp"), [(1, 2), (2, 1), (3, 2), (4, 0), (5, 1), (6, 0), (7, 2), (8, 0)])
def test_colocated_leaves_the_same_bytes(precision: str, dies: int, mtp: int) -> None:
    """Experts that do not divide evenly, and more dies than prompts."""
    check_colocated(precision, f"dies={dies}", f"mtp={mtp}")


# More rows of a die than it takes through attention together, and the rest of a block.
LONG = [[5 + i, *range(10, 10 + length)] for i, length in enumerate((2 * MANY + 2 * FEW + 3, MANY, 3))]
ROOM = ("max_model_len=256", "scheduler.max_num_batched_tokens=224")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_many_rows_leave_the_same_bytes(precision: str) -> None:
    check_colocated(precision, "dies=2", *ROOM, prompts=LONG)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_many_rows_of_microbatches_leave_the_same_bytes(precision: str) -> None:
    check_apart(precision, (1, 1, 2, 1, 2), *ROOM, "threads=2", prompts=LONG)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_rows_on_one_die_in_one_call(precision: str, threads: int) -> None:
    check_monolithic(precision, *ROOM, threads=threads, prompts=LONG)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("threads", [1, 2])
def test_many_rows_that_fill_tiles(precision: str, threads: int) -> None:
    """Of a matrix unit, where there is one: of the second die of two, and of one die in one call."""
    model = variant(qk_rope_head_dim=32)
    check_colocated(precision, "dies=2", f"threads={threads}", *ROOM, model=model, prompts=LONG)
    check_monolithic(precision, *ROOM, threads=threads, model=model, prompts=LONG)


@pytest.mark.parametrize("more", [(), ("lockstep=true",)])
@pytest.mark.parametrize(
    ("deployment", "settings"),
    [
        ("monolithic", ("mtp=2",)),
        ("colocated", ("dies=3", "mtp=1", "scheduler.max_num_seqs=3", "scheduler.max_num_batched_tokens=9")),
        ("moe-attention", overrides(SHAPES[0], "mtp=1")),
    ],
)
def test_scratch_is_read_by_no_later_step(
    deployment: str, settings: Sequence[str], more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in it before each step, or 0xA5 in integers, changes no bit of any result."""
    settings = ["max_model_len=64", *settings, *(more or ["lockstep=false"] * (deployment == "monolithic"))]
    expected = serve("tiny-random", deployment, "int8", settings)
    launch, filled = DPGroup.launch, set()

    def poisoned(group: DPGroup, *args: Any) -> None:
        for die in group.dies:
            for name, region in die.memory.app.regions.items():
                if name in SCRATCH:
                    filled.add(name)
                    die.memory.write(region.offset, (b"\xa5" if name == "q8" else b"\xff") * region.nbytes)
        launch(group, *args)

    monkeypatch.setattr(DPGroup, "launch", poisoned)
    found = serve("tiny-random", deployment, "int8", settings)
    assert filled >= {"x", "y", "q8", "q8_scale", "kv", "q_a", "q", "q_lat", "o_lat", "o", "gate_logits"}
    assert (found[0], found[2]) == (expected[0], expected[2])


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_dies_without_rows_take_part(num_prompts: int) -> None:
    check_colocated("int8", "dies=8", "mtp=2", prompts=PROMPTS[:num_prompts])


def test_prompts_in_chunks_and_preempted() -> None:
    """Many more sequences than there are blocks for: dies with long chunks beside dies that decode.

    Each group gets its sequences on arrival: which one is free first depends on times, and tasks have others.
    """
    prompts = [[5 + i, *range(10, 10 + 3 * i)] for i in range(16)]
    tight = ("cache.num_blocks=4", "scheduler.max_num_seqs=3", "scheduler.max_num_batched_tokens=9")
    tight = (*tight, "scheduler.dispatch=two-level")
    check_colocated("int8", "dies=3", "mtp=1", *tight, prompts=prompts)
    check_colocated("int8", "dies=3", "execution.overlap=true", "threads=2", *tight, prompts=prompts)


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("precision", "dies"), [("int8", 1), ("int8", 3), pytest.param("fp32", 3, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "changes",
    [{"n_shared_experts": 0}, {"n_shared_experts": 2}, {"first_k_dense_replace": 99}, {"q_lora_rank": None}],
    ids=str,
)
def test_other_models(precision: str, dies: int, changes: dict[str, object]) -> None:
    """Without a shared expert, with two, without routed experts, without a low rank for queries."""
    check_colocated(precision, f"dies={dies}", model=variant(**changes))


@pytest.mark.parametrize("dies", [1, 2])
def test_int8_attention_of_colocated_dies(dies: int) -> None:
    check_colocated("int8", f"dies={dies}", "mtp=1", model=variant(int8_attention=frozenset({0, 2, 4})))


@pytest.mark.thin(3)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("dies", "mtp"), [(2, 2), (3, 1), (5, 0)])
def test_replicas_leave_the_same_bytes(precision: str, dies: int, mtp: int) -> None:
    check_colocated(precision, f"dies={dies}", f"mtp={mtp}", *SLOTS)


def test_replicas_that_nobody_counts_leave_the_same_bytes() -> None:
    check_colocated("int8", "dies=4", "experts.redundant_slots=1")


@pytest.mark.thin(3)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "settings",
    [
        ("dies=4", "experts.shared_dies=1", "mtp=1"),
        ("dies=5", "experts.shared_dies=2", "mtp=2", *SLOTS),
        ("dies=20", "experts.shared_dies=2", *SLOTS),  # two dies have slots alone
    ],
    ids=str,
)
def test_dies_of_the_shared_expert_leave_the_same_bytes(precision: str, settings: tuple[str, ...]) -> None:
    check_colocated(precision, *settings)


# In fp32 a minute to compile: `make long` has those of dies apart, whose rows of that type are pushed, too.
@pytest.mark.thin(3)
@pytest.mark.parametrize("precision", ["int8", pytest.param("fp32", marks=pytest.mark.campaign)])
@pytest.mark.parametrize(
    "settings",
    [
        ("dies=2", "mtp=2"),
        ("dies=5", "mtp=1", "threads=3"),
        ("dies=8",),
        ("dies=3", "mtp=1", *SLOTS),
        ("dies=5", "experts.shared_dies=2", "mtp=2", *SLOTS),
    ],
    ids=str,
)
def test_exchanges_by_push_leave_the_same_bytes(precision: str, settings: tuple[str, ...]) -> None:
    check_colocated(precision, "exchange=push", *settings)


def test_dies_without_rows_take_part_in_exchanges_by_push() -> None:
    check_colocated("int8", "exchange=push", "dies=8", "mtp=2", prompts=PROMPTS[:2])


@pytest.mark.thin(5)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_exchanges_by_push_on_dies_apart_leave_the_same_bytes(precision: str, shape: tuple[int, ...]) -> None:
    check_apart(precision, shape, "exchange=push", "mtp=1", *(SLOTS if shape[2] > 1 else ()))


@pytest.mark.parametrize(
    "settings",
    [
        ("dies=3", "mtp=2", "threads=2"),
        ("dies=4", "exchange=push", "mtp=1"),
        ("dies=5", "experts.shared_dies=2", *SLOTS),
        ("dies=5", "experts.shared_dies=2", "exchange=push"),
    ],
    ids=str,
)
def test_int8_answers_leave_the_same_bytes(settings: tuple[str, ...]) -> None:
    """Rows with scales between dies, and rounded outputs where nothing travels (xDeepServe 4.7)."""
    check_colocated("int8", "combine=int8", *settings)


@pytest.mark.thin(3)
@pytest.mark.parametrize("exchange", ["pull", "push"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[2] > 1])
def test_int8_answers_on_dies_apart_leave_the_same_bytes(shape: tuple[int, ...], exchange: str) -> None:
    check_apart("int8", shape, "combine=int8", f"exchange={exchange}", "mtp=1")


@pytest.mark.parametrize("threads", [1, 3])
def test_int8_answers_on_one_die_in_one_call(threads: int) -> None:
    check_monolithic("int8", "combine=int8", "mtp=1", threads=threads)


@pytest.mark.thin(4)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[2] > 1])
def test_replicas_on_dies_apart_leave_the_same_bytes(precision: str, shape: tuple[int, ...]) -> None:
    check_apart(precision, shape, "mtp=1", *SLOTS)


FLOAT_GROUPS = [*([group] for group in KEPT_FLOAT), [*KEPT_FLOAT]]
APART = [group for group in KEPT_FLOAT if group != "shared up"]  # a shared expert's dies take INT8 rows
FLOAT_APART = [*([group] for group in APART), APART]


@pytest.mark.thin(3)
@pytest.mark.parametrize("dies", [1, 3])
@pytest.mark.parametrize("groups", FLOAT_GROUPS, ids=str)
def test_layers_that_int8_keeps_in_float(groups: list[str], dies: int) -> None:
    check_colocated("int8", f"dies={dies}", "mtp=1", model=with_float(*groups))


def test_layers_share_stages_and_what_these_cost_if_they_are_alike() -> None:
    """Dense, MoE three times, and MTP's: layers 1, 2 and 3 have a matrix each in floating point, or none."""
    kinds = []
    for model in (variant(), with_float("inputs of MLA")):
        with LLM(model, "colocated", "int8", overrides=["dies=2", "mtp=1", "max_model_len=64"]) as llm:
            programs = [id(program) for program in llm.engine.je.tes[0].executors[0].traversal.programs]
        kinds.append([programs.index(program) for program in programs])
    assert kinds == [[0, 1, 1, 1, 1], [0, 1, 2, 3, 4]]


@pytest.mark.thin(5)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mtp", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bytes_as_a_task_for_each_die(precision: str, shape: tuple[int, ...], mtp: int) -> None:
    check_apart(precision, shape, f"mtp={mtp}")


@pytest.mark.thin(3)
@pytest.mark.parametrize("groups", FLOAT_APART, ids=str)
def test_layers_that_int8_keeps_in_float_on_dies_apart(groups: list[str]) -> None:
    check_apart("int8", SHAPES[0], "mtp=1", model=with_float(*groups))


def test_int8_attention_where_a_layer_bears_it() -> None:
    model = variant(int8_attention=frozenset({0, 2, 4}))
    digests = {
        serve(model, "moe-attention", "int8", overrides(SHAPES[0], "mtp=1", *more))[0]
        for more in ([], ["lockstep=true"])
    }
    (found,) = digests
    assert found != serve(variant(), "moe-attention", "int8", overrides(SHAPES[0], "mtp=1"))[0]


@pytest.mark.parametrize("light", [dimensions.LIGHT, 0], ids=["by dies", "by columns"])
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_matter(threads: int, light: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share dies or, where weights are many, the columns of each product."""
    one = run("int8", SHAPES[0], "lockstep=true")
    monkeypatch.setattr(dimensions, "LIGHT", light)
    assert run("int8", SHAPES[0], "lockstep=true", f"threads={threads}") == one


@pytest.mark.parametrize("threads", [2, 9])
def test_threads_do_not_matter_to_colocated_dies(threads: int) -> None:
    settings = ["max_model_len=64", "dies=5", "mtp=1", "lockstep=true"]
    one = serve("tiny-random", "colocated", "int8", settings)
    assert one == serve("tiny-random", "colocated", "int8", [*settings, f"threads={threads}"])


def check_monolithic(
    precision: str,
    *settings: str,
    threads: int = 1,
    model: Model = "tiny-random",
    num_prompts: int = 9,
    prompts: list[list[int]] | None = None,
) -> None:
    """One call for all layers against kernel by kernel: digest, virtual time, and every byte that stays."""
    prompts = prompts or [[5 + i, *range(10, 10 + 3 * i)] for i in range(num_prompts)]
    settings = ("max_model_len=64", "scheduler.max_num_batched_tokens=48", *settings)
    expected, expected_image, expected_ns = serve(
        model, "monolithic", precision, [*settings, "lockstep=false"], prompts
    )
    together = [*settings, f"threads={threads}", "lockstep=true"]
    found, image, found_ns = serve(model, "monolithic", precision, together, prompts)
    assert (found, found_ns) == (expected, expected_ns)
    compare(image, expected_image, [*settings, "dies=1"])


@pytest.mark.thin(3)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("threads", "mtp", "num_prompts"),
    [(1, 0, 9), (1, 2, 9), (2, 1, 9), (3, 2, 9), (11, 0, 9), (2, 0, 1), (3, 2, 2), (2, 1, 4), (11, 0, 3)],
)
def test_one_die_in_one_call(precision: str, threads: int, mtp: int, num_prompts: int) -> None:
    check_monolithic(precision, f"mtp={mtp}", threads=threads, num_prompts=num_prompts)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.thin(3)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [
        {"first_k_dense_replace": 9, "num_nextn_predict_layers": 0},
        {"q_lora_rank": None, "n_shared_experts": 0},
        {"n_shared_experts": 2, "kv_lora_rank": 24, "v_head_dim": 12, "moe_intermediate_size": 20},
        {"int8_attention": frozenset({1})},
    ],
)
def test_other_models_on_one_die(changes: dict[str, object], threads: int, precision: str) -> None:
    for num_prompts in (2, 9):
        check_monolithic(precision, threads=threads, model=variant(**changes), num_prompts=num_prompts)


@pytest.mark.thin(3)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("groups", FLOAT_GROUPS, ids=str)
def test_layers_that_int8_keeps_in_float_on_one_die(groups: list[str], threads: int) -> None:
    check_monolithic("int8", "mtp=1", threads=threads, model=with_float(*groups))


@pytest.mark.thin(2)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (variant(n_shared_experts=0), ()),
        (variant(n_shared_experts=2, moe_intermediate_size=20), ()),
        (variant(), ("combine=int8",)),
        ("float", ()),
    ],
    ids=["none shared", "two shared", "int8 answers", "kept float"],
)
def test_threads_that_take_whole_experts(model: Model, settings: tuple[str, ...], threads: int) -> None:
    """Of rows so many that experts have some each."""
    model = with_float(*KEPT_FLOAT) if model == "float" else model
    check_monolithic("int8", *ROOM, *settings, threads=threads, model=model, prompts=LONG)


@pytest.mark.parametrize(
    ("sizes", "most"), [([5, 0, 9, 4, 2, 0], 11), ([20, 0, 0, 0, 0, 0], 20), ([3] * 6, 9)]
)
def test_experts_are_dealt_to_threads(sizes: list[int], most: int) -> None:
    """Those with most rows first, to whoever has least."""
    taker, bounds = np.empty(6, np.int64), np.append(0, np.cumsum(sizes)).astype(np.int32)
    assert numba.njit(lambda *args: one_die.deal(*args))(taker, bounds, 2) == most
    assert max(np.bincount(taker, weights=sizes)) == most


def test_threads_that_lose_each_other_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*args: object) -> None:
        sync = args[-3]
        assert isinstance(sync, np.ndarray)
        sync[sync_kernels.LOST] = 1

    monkeypatch.setattr(one_die, "run_together", lose)
    with (
        LLM("tiny-random", "monolithic", overrides=["threads=2", "lockstep=true"]) as llm,
        pytest.raises(XDeepServeError, match="2 threads of a step have lost each other"),
    ):
        llm.generate([[1, 2, 3]], GREEDY)


def test_nobody_waits_for_a_thread_that_is_lost() -> None:
    @numba.njit
    def come(sync: np.ndarray) -> None:
        sync_kernels.wait(sync, 2)

    sync = np.zeros(sync_kernels.SYNC_SIZE, np.int64)
    sync[sync_kernels.LOST] = 1
    come(sync)  # alone
    assert sync[sync_kernels.CAME] == 1
    assert sync[sync_kernels.LOST] == 2


def test_a_thread_that_fails_ends_the_rounds_of_all() -> None:
    after: list[int] = []

    def fails(worker: int, num: int) -> None:
        if worker == 1:
            raise ValueError("broken")

    def follows(worker: int, num: int) -> None:
        after.append(worker)

    def lingers(worker: int, num: int) -> None:
        if worker == 2:
            time.sleep(0.2)
            after.append(worker)

    lockstep = object.__new__(colocated.ColocatedLockstep)  # its threads alone
    lockstep.num_threads, lockstep.pool, lockstep.sync = 3, None, sync_kernels.new_sync()
    with pytest.raises(ValueError, match="broken"):
        lockstep.spread([(lingers, ()), (fails, ())], [(follows, ())])
    assert after == [2]  # nobody is under way
    after.clear()
    lockstep.spread([(follows, ())], [(follows, ())])
    lockstep.threads.shutdown()
    assert sorted(after) == [0, 0, 1, 1, 2, 2]  # of the second time


def test_a_platform_whose_threads_cannot_yield() -> None:
    program = """if True:
        import os
        del os.sched_yield
        import numba
        import numpy as np
        from xdeepserve.engine.run.lockstep.kernels import sync as sync_kernels
        assert not sync_kernels.HAS_TEAMS
        come = numba.njit(lambda sync: sync_kernels.wait(sync, 1))
        sync = np.zeros(sync_kernels.SYNC_SIZE, np.int64)
        come(sync)
        assert sync[sync_kernels.CAME] == 1
        assert not any("sched_yield" in code for code in come.inspect_llvm().values())
        """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize(
    ("deployment", "override", "is_large", "is_lockstep"),
    [
        ("monolithic", "seed=0", True, True),
        ("monolithic", "seed=0", False, False),
        ("monolithic", "execution.mode=op", True, True),
        ("monolithic", "lockstep=false", True, False),
        ("monolithic", "lockstep=true", False, True),
        ("colocated", "seed=0", True, True),
        ("colocated", "seed=0", False, False),
        ("colocated", "tp=2", True, False),
        ("colocated", "pipeline.microbatches=2", True, False),
        ("colocated", "experts.redundant_slots=1", True, True),
        ("moe-attention", "seed=0", True, False),
    ],
)
def test_large_models_run_in_lockstep(
    deployment: str, override: str, is_large: bool, is_lockstep: bool
) -> None:
    config = variant(vocab_size=1_000_000 if is_large else 100).config
    (sizes,) = fit(resolve(deployment, [override]), config)
    assert sizes.walk.is_lockstep is is_lockstep


def test_disaggregated_prefill_hands_over_to_a_lockstep() -> None:
    digests = set()
    for more in ([], ["lockstep=true"]):
        with LLM("tiny-random", "transformerless", "int8", overrides=["max_model_len=64", *more]) as llm:
            digests.add(digest(llm.generate(PROMPTS, GREEDY, keep_logits=True)))
    assert len(digests) == 1


@pytest.mark.parametrize("more", [[], ["mtp=1"]], ids=str)
def test_listed_tes_run_in_lockstep(tmp_path: Path, more: list[str]) -> None:
    file, digests = tmp_path / "mixed.toml", set()
    tes = ("dies=2", "dies=4\ntp=2", "role='prefill'\ndies=2", "role='decode'\ndies=3\ncount=2")
    file.write_text("kind='mixed'\n" + "".join(f"[[te]]\n{te}\n" for te in tes))
    for lockstep in (False, True):
        settings = ["max_model_len=64", f"lockstep={str(lockstep).lower()}", *more]
        with LLM("tiny-random", str(file), "int8", overrides=settings) as llm:
            found = [te.sizes.walk.is_lockstep for te in llm.engine.plan.tes]
            assert found == [lockstep and te.sizes.place.role != "prefill" for te in llm.engine.plan.tes]
            digests.add(digest(llm.generate(PROMPTS, GREEDY, keep_logits=True)))
    assert len(digests) == 1


def test_trace_shows_the_streams_of_all_dies() -> None:
    with LLM(
        "tiny-random", "moe-attention", "int8", overrides=overrides(SHAPES[0], "lockstep=true"), trace=True
    ) as llm:
        llm.generate(PROMPTS, GREEDY)
        spans = llm.engine.plan.pod.trace.spans
    lanes = {(span.lane, span.name) for span in spans}
    assert {("AIC", "MLA"), ("XCCL", "A2E"), ("XCCL", "E2A'"), ("AIC", "Experts")} <= lanes
    assert {"A2E receive", "MoE", "E2A send"} <= {lane for lane, _ in lanes}
    for die in {span.node for span in spans}:
        for lane in ("AIC", "A2E receive", "MoE", "E2A send"):
            mine = sorted((s.start_ns, s.end_ns) for s in spans if (s.node, s.lane) == (die, lane))
            assert all(first[1] <= second[0] for first, second in itertools.pairwise(mine)), lane


def test_trace_of_colocated_dies() -> None:
    settings = ["max_model_len=64", "dies=4", "lockstep=true"]
    with LLM("tiny-random", "colocated", "int8", overrides=settings, trace=True) as llm:
        llm.generate(PROMPTS, GREEDY)
        spans = llm.engine.plan.pod.trace.spans
    wanted = {
        ("AIC", "MLAProlog"),
        ("AIV", "Gate"),
        ("XCCL", "dispatch"),
        ("AIC", "Experts"),
        ("XCCL", "combine"),
    }
    for die in range(4):
        mine = [span for span in spans if span.node == die and span.lane != "steps"]
        assert wanted | {("AIC", "SharedExpert")} <= {(span.lane, span.name) for span in mine}
        times = sorted((span.start_ns, span.end_ns) for span in mine)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(times))


MEMBERS = [("moe-attention", overrides(SHAPES[0]), "attention 2"), ("colocated", ["dies=4"], "rank 2")]


@pytest.mark.parametrize(("deployment", "settings", "name"), MEMBERS)
def test_a_die_that_does_not_come_is_named(
    monkeypatch: pytest.MonkeyPatch, deployment: str, settings: list[str], name: str
) -> None:
    attend = Lockstep.attend

    async def absent(self: Lockstep, rank: int, share: Contribution) -> None:
        if rank == 2:
            await self.clock.sleep(10**12)
        await attend(self, rank, share)

    monkeypatch.setattr(Lockstep, "attend", absent)
    with (
        LLM("tiny-random", deployment, "int8", overrides=[*settings, "lockstep=true"]) as llm,
        pytest.raises(XDeepServeError, match=f"lockstep.*{name}"),
    ):
        llm.generate(PROMPTS, GREEDY)


def leave_out(monkeypatch: pytest.MonkeyPatch, module: ModuleType, stage: str) -> None:
    """Of the kernels that follow each other in a run all but one are called, one by one."""
    monkeypatch.setattr(module, stage, skip)
    if not hasattr(module, "run_layers"):
        return
    monkeypatch.setattr(module, "run_layers", module.run_layers.py_func)
    monkeypatch.setattr(module, "wait", skip)
    monkeypatch.setattr(module, "are_lost", skip)
    for name in ("layer", "dispatch", "expert", "combine"):
        monkeypatch.setattr(module, f"{name}_part", getattr(module, f"{name}_stage"))


@pytest.mark.parametrize(
    ("deployment", "module", "stage", "message"),
    [
        ("moe-attention", disaggregated.ends, "post_stage", "A2E: expert 0"),
        ("moe-attention", disaggregated.twin, "e2a_stage", "E2A': attention 0"),
        ("colocated", colocated.d, "dispatch_stage", "dispatch: rank 0"),
        ("colocated", colocated.d, "expert_stage", "combine: rank 0"),
    ],
)
def test_a_field_of_another_event_is_an_error(
    monkeypatch: pytest.MonkeyPatch, deployment: str, module: ModuleType, stage: str, message: str
) -> None:
    leave_out(monkeypatch, module, stage)
    with (
        LLM("tiny-random", deployment, "int8", overrides=["max_model_len=64", "lockstep=true"]) as llm,
        pytest.raises(XDeepServeError, match=f"{message} finds another event's field in event 1"),
    ):
        llm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize(
    ("deployment", "stage", "message"),
    [
        ("colocated", "dispatch_stage", "fused dispatch: rank 0 finds another event's field"),
        ("colocated", "expert_stage", "fused combine: rank 0 finds a token that not all of its experts have"),
        ("moe-attention", "forward_stage", "A2E': expert 0 finds another event's field"),
        ("moe-attention", "expert_stage", "E2A: expert 0 finds a token that not all of its experts have"),
    ],
)
def test_a_push_that_does_not_come_is_an_error(
    monkeypatch: pytest.MonkeyPatch, deployment: str, stage: str, message: str
) -> None:
    leave_out(monkeypatch, colocated.p, stage)
    settings = ["max_model_len=64", "lockstep=true", "exchange=push"]
    with (
        LLM("tiny-random", deployment, "int8", overrides=settings) as llm,
        pytest.raises(XDeepServeError, match=message),
    ):
        llm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize(
    ("model", "deployment", "override", "reason"),
    [
        ("tiny-random", "eaas", "lockstep=true", "expert services take each client by itself"),
        ("tiny-random", "superpod", "mtp=0", "experts.routed_dies=256 is more than the model's 16"),
        ("tiny-r1", "superpod", "fabric=ub", "UB does not leave the pod"),
        ("tiny-r1", "superpod", "attention.dies=161", "a SuperPod has 768 dies, this deployment needs 771"),
        ("tiny-r1", "superpod", "prefill.max_num_seqs=0", "prefill.max_num_seqs must be at least 1"),
        ("tiny-r1", "superpod", "prefill.max_num_seqs=512", "prefill.max_num_batched_tokens=256 cannot hold"),
    ],
)
def test_what_cannot_be_is_refused(model: str, deployment: str, override: str, reason: str) -> None:
    with pytest.raises(DeploymentError, match=reason):
        build_engine(model, resolve(deployment, override.split()), "int8")


def test_the_superpod_fills_its_dies_and_has_prefill_beside() -> None:
    prefill, decode = build_engine("tiny-r1", resolve("superpod"), "int8").plan.tes
    assert len(decode.dies) == 480
    assert len(decode.expert_dies) == 288
    assert decode.dies[0] == 0
    assert decode.expert_dies[-1] == 767
    assert prefill.dies == tuple(range(768, 784))
    assert np.diff(decode.dies).max() == 1
    assert [te.sizes.steps.num_mtp_layers for te in (prefill, decode)] == [1, 1]  # xDeepServe 7.1


@pytest.mark.campaign
def test_forty_eight_dies_of_the_tiny_r1_model() -> None:
    shape = (3, 10, 16, 2, 2)
    prompts = [[5 + i % 9, 9] for i in range(60)]
    more = ["max_model_len=32", "scheduler.max_num_seqs=2", "scheduler.max_num_batched_tokens=8"]
    more += ["cache.block_size=16", "cache.num_blocks=4", "lockstep=true"]
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    with LLM("tiny-r1", "moe-attention", "int8", overrides=[*overrides(shape), *more]) as llm:
        found = llm.generate(prompts, params, keep_logits=True)
    with LLM("tiny-r1", "monolithic", "int8", overrides=["max_model_len=32"]) as llm:
        expected = llm.generate(prompts[:9], params, keep_logits=True)
    for i, output in enumerate(found):
        assert digest([output]) == digest([expected[i % 9]])


def test_heads_do_without_the_weights_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be lost by then, though their rows are there: whoever makes the logits uses its own."""
    run, run_all, given = Heads.run, Heads.run_all, []

    def noted(self: Heads, rank: int, f: Frame) -> None:
        run(self, rank, f)
        assert all(ends is f.ends for ends in given)
        given.clear()

    def alone(self: Heads, frames: Sequence[Frame], ends: Ends) -> None:
        given.append(ends)
        *others, mine = frames
        kept = [each.ends.head.w.copy() for each in others]
        for each in others:
            each.ends.head.w[:] = 0
        run_all(self, frames, mine.ends)
        for each, before in zip(others, kept, strict=True):
            each.ends.head.w[:] = before

    settings = ["dies=3", "lockstep=true", "max_model_len=64"]
    with LLM("tiny-random", "colocated", overrides=settings) as llm:
        expected = digest(llm.generate(PROMPTS, GREEDY, keep_logits=True))
    monkeypatch.setattr(Heads, "run", noted)
    monkeypatch.setattr(Heads, "run_all", alone)
    with LLM("tiny-random", "colocated", overrides=settings) as llm:
        assert digest(llm.generate(PROMPTS, GREEDY, keep_logits=True)) == expected


def test_one_die_makes_the_logits_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that have rows; all from the weights of one, which are those of all."""
    run_all, num_dies = Heads.run_all, []

    def counted(self: Heads, frames: Sequence[Frame], ends: Ends) -> None:
        num_dies.append(len(frames))
        run_all(self, frames, ends)

    monkeypatch.setattr(Heads, "run_all", counted)
    settings = ["dies=4", "lockstep=true", "max_model_len=64"]
    with LLM("tiny-random", "colocated", overrides=settings) as llm:
        llm.generate(PROMPTS[:4], GREEDY)
        assert num_dies == [4] * GREEDY.max_tokens
        num_dies.clear()
        llm.generate(PROMPTS[:3], GREEDY)
        assert num_dies == [3] * GREEDY.max_tokens
        llm.engine.check_integrity()
        mine, *others = (executor.weights.head.w for executor in llm.engine.je.tes[0].executors)
        others[1][-1] += 1
        assert np.array_equal(mine, others[0])
        with pytest.raises(XDeepServeError, match="rank 2 holds other bytes of head than rank 0"):
            llm.engine.check_integrity()


def test_tokens_drawn_for_all_dies_are_those_that_each_die_draws() -> None:
    """Of requests that are sampled, each by its own numbers; edited logits are left to their die."""
    params = [
        SamplingParams(max_tokens=4, ignore_eos=True, seed=i, temperature=0.5 * (i % 3), top_k=5 * (i % 2),
                       top_p=1 - 0.1 * (i % 2), logit_bias={7: 3.0} if i % 4 == 3 else {},
                       logprobs=2 if i % 5 == 4 else None)
        for i in range(len(PROMPTS))
    ]  # fmt: skip
    found = []
    for lockstep in ("true", "false"):
        settings = ["dies=4", f"lockstep={lockstep}", "max_model_len=64"]
        with LLM("tiny-random", "colocated", "int8", overrides=settings) as llm:
            found.append(digest(llm.generate(PROMPTS, params, keep_logits=True)))
    assert found[0] == found[1]


def test_counts_of_all_dies_are_those_of_their_batches() -> None:
    rng, shares, cuts, expected = np.random.default_rng(3), [], [], []
    tables = np.zeros((3, 1), np.int32)
    for num_rows in rng.integers(0, 9, 40).tolist():
        seq_of = np.sort(rng.integers(0, 3, num_rows)).astype(np.int32)
        positions = rng.integers(0, 5, num_rows).astype(np.int32)
        batch = Batch.of(positions, positions, seq_of, tables)
        lo, hi = sorted(rng.integers(0, num_rows + 1, 2).tolist())
        part = batch.part(slice(lo, hi))
        shares.append(Contribution(np.zeros((num_rows, 1), np.float32), list, batch))
        cuts.append((lo, hi))
        expected.append((part.num_tokens, part.context, part.kv_tokens))
    found = RowCounts.of(shares, np.array(cuts))
    assert [found.few[at] for at in found.of_die.tolist()] == expected
    assert len(found.few) < len(shares)
