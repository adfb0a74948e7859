"""A second process compiles what a first token needs, and nothing else."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xdeepserve import LLM, SamplingParams, compile_ahead


def test_what_is_compiled_ahead_is_what_a_model_calls() -> None:
    with LLM("tiny-random", "monolithic", "int8") as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    for kernel, types in compile_ahead.signatures():
        assert types in kernel.signatures


@pytest.mark.skipif(not compile_ahead.is_worth_it(), reason="needs a second core")
def test_a_second_process_is_started_once_and_ends_with_the_first() -> None:
    program = (
        "import os, signal; from xdeepserve import compile_ahead as ahead; ahead.begin(); ahead.begin();"
        "print(*(each.pid for each in ahead.begun), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    # The second process has none of the pipes of this one: only its pid is read.
    run = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60)
    (pid,) = run.stdout.split()
    for _ in range(600):
        if not os.path.exists(f"/proc/{pid}"):
            return
        time.sleep(0.1)
    raise AssertionError("the second process goes on")


def test_the_end_is_awaited() -> None:
    compile_ahead.begin()
    compile_ahead.end()
    assert compile_ahead.begun == []


@pytest.mark.campaign
def test_a_first_token_without_any_cache(tmp_path: Path) -> None:
    command = "-m xdeepserve generate --model tiny-random --prompt-ids 5 --max-tokens 1"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, *command.split()], env=environment, check=True, capture_output=True)
    names = {path.name.partition(".")[0] for path in tmp_path.rglob("*.nbc")}
    assert {"mla", "sampling", "gemm_int8"} <= names
