"""A second process compiles what a first token needs, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.cli import compile_ahead


def test_what_is_compiled_ahead_is_what_a_model_calls() -> None:
    with LLM("tiny-random", "monolithic", "int8") as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    for kernel, types in compile_ahead.signatures():
        assert types in kernel.signatures


def test_a_helper_ends_with_who_asked_for_it() -> None:
    with compile_ahead.helper() as process:
        assert process.poll() is None
    assert process.returncode is not None


@pytest.mark.campaign
def test_a_first_token_without_any_cache(tmp_path: Path) -> None:
    command = "-m xdeepserve.cli generate --model tiny-random --prompt-ids 5 --max-tokens 1"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, *command.split()], env=environment, check=True, capture_output=True)
    names = {path.name.partition(".")[0] for path in tmp_path.rglob("*.nbc")}
    assert {"mla", "sampling", "gemm_int8"} <= names
