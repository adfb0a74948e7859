"""Benchmarks of wall time run and say what they measured; how fast is not asserted."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from xdeepserve.bench.wall import decode, generation, kernels, prefill, startup, step_limits
from xdeepserve.errors import XDeepServeError
from xdeepserve.llm import LLM
from xdeepserve.model.kernels import limits
from xdeepserve.model.presets import resolve_model


def test_decode_rate_subtracts_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a fake model moves: 5 s for the prompts, 0.5 s a step."""
    now = 0.0

    def generate(count: int) -> None:
        nonlocal now
        now += 5.0 + 0.5 * (count - 1)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert decode.decode_rate(generate, batch=8) == pytest.approx(8 / 0.5)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_kernels_are_not_measured_beside_a_blas_of_several_threads() -> None:
    """Only this thread's time is taken: NumPy would look twice as fast as it is."""
    script = "from xdeepserve.bench.wall import kernels; kernels.check_blas()"
    for threads in "1", "2":
        env = {**os.environ, "OPENBLAS_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
        assert (done.returncode == 0) == (threads == "1"), done.stderr
        assert ("OPENBLAS_NUM_THREADS=1" in done.stderr) == (threads == "2")


MEASURE_NOTHING = """
import importlib, sys
from xdeepserve.cli import main

def without_rows(name):
    module = find(name)
    if name == "xdeepserve.bench.wall.kernels":
        module.all_rows = lambda: module.check_blas() or []
    return module

find, importlib.import_module = importlib.import_module, without_rows
sys.exit(main(["bench", "kernels"]))
"""


def test_the_command_gives_blas_one_thread() -> None:
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", MEASURE_NOTHING], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_prompts_differ_and_avoid_special_tokens() -> None:
    prompts = generation.prompts(32, 320, 8)
    assert len({tuple(prompt) for prompt in prompts}) == 32
    assert all(10 <= token < 320 for prompt in prompts for token in prompt)


def test_no_prompt_begins_like_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill is timed with new prompts; a clock that a fake model moves: 2 ms a token."""
    now, seen = 0.0, []

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        nonlocal now
        assert num_tokens == 1
        seen.extend(prompts)
        now += 0.002 * sum(map(len, prompts))

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    rates = dict(prefill.rates(generate, 8192))
    assert len(rates) == 8
    assert list(rates.values()) == [pytest.approx(500)] * 8
    assert len({prompt[0] for prompt in seen}) == len(seen)


def test_seconds_is_the_median_of_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0.0, 0

    def call() -> None:
        nonlocal now, calls
        calls += 1
        now += 0.004

    monkeypatch.setattr(time, "thread_time", lambda: now)
    assert kernels.seconds(call) == pytest.approx(0.004)
    assert calls == 2 + kernels.REPEATS * 5


def test_a_decode_step_reads_what_a_die_holds() -> None:
    """All weights but the embedding once enough tokens choose experts, and the cache of each position."""
    config = resolve_model("tiny-random").config
    with LLM("tiny-random", "monolithic", overrides=["max_model_len=32", "cache.num_blocks=8"]) as llm:
        _, mem = llm.engine.plan.tes[0].all_memories[0]
        arrays = mem.weights()
        held = sum(array.nbytes for name, array in arrays.items() if name not in step_limits.NOT_READ)
        mtp = sum(array.nbytes for name, array in arrays.items() if name.startswith("mtp."))
        block, size = mem.kv.block_nbytes, mem.kv.sizes.block_size
    assert step_limits.step_nbytes(config, 10_000, 0) == pytest.approx(held - mtp)
    one, more = (step_limits.step_nbytes(config, 1, context) for context in (0, size))
    assert more - one == block
    assert one < step_limits.step_nbytes(config, 2, 0) < held
    assert list(step_limits.decode_rows(config, 2, (1,), 16)) == []


def test_a_row_of_a_prompt_takes_these_products() -> None:
    """Counted by hand from the shapes of `tiny-random`, which has one dense layer."""
    c = resolve_model("tiny-random").config
    hidden, heads, rank, rope = c.hidden_size, c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim
    nope, v_dim, taken = c.qk_nope_head_dim, c.v_head_dim, c.num_experts_per_tok + c.n_shared_experts
    assert (c.first_k_dense_replace, c.q_lora_rank) == (1, 96)
    mla = hidden * (96 + rank + rope) + 96 * heads * (nope + rope) + heads * v_dim * hidden
    mlp = 3 * hidden * (c.intermediate_size + (c.num_hidden_layers - 1) * taken * c.moe_intermediate_size)
    head, absorbed = hidden * c.vocab_size, c.num_hidden_layers * heads * rank * (nope + v_dim)
    ops, seen = step_limits.row_operations(c, 64), c.num_hidden_layers * heads * 65 / 2
    assert ops.int8 == pytest.approx(2 * (c.num_hidden_layers * mla + mlp + seen * rank))
    assert ops.bf16 == pytest.approx(2 * (absorbed + head / 64 + seen * (rank + rope)))
    assert list(step_limits.prefill_rows(c, 2, prefill.cases(), prefill.CHUNK)) == []


def test_limits_run() -> None:
    for run in (limits.dot_peak, limits.f32_peak):
        limits.OUT[:] = np.nan
        run()
        assert np.isfinite(limits.OUT).any(), "nothing was computed"


def test_a_failing_process_is_no_measurement() -> None:
    with pytest.raises(XDeepServeError, match="bench startup"):
        startup.seconds_of(("-c", "raise SystemExit('no')"))
