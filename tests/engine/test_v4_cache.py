"""Cache of DeepSeek-V4 wherever a step begins and ends: chunks, cached prefixes, blocks taken away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.model.hf_fixtures import V4
from xdeepserve import LLM, SamplingParams
from xdeepserve.errors import DeploymentError, InputError
from xdeepserve.llm import digest
from xdeepserve.model.checkpoint import DirectoryCheckpoint, open_checkpoint
from xdeepserve.model.reference import Reference
from xdeepserve.quant.job import quantize_checkpoint
from xdeepserve.quant.method import METHODS

FIXTURE = V4["v4-words-mtp"]  # windows of 4 and 16 positions, 8 seen as they are; blocks of 16
PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
PROMPT = FIXTURE.prompts[-1][:70]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> DirectoryCheckpoint:
    return open_checkpoint(FIXTURE.checkpoint_dir(tmp_path_factory.mktemp("v4")))


def logits_after(llm: LLM, prompt: list[int]) -> np.ndarray:
    (choice,) = llm.generate([prompt], PARAMS, keep_logits=True)[0].outputs
    assert choice.logits is not None
    return choice.logits[0]


@pytest.mark.long
def test_chunks_of_every_size(checkpoint: DirectoryCheckpoint) -> None:
    expected = Reference(checkpoint, "int8", 128).logits(PROMPT)[-1]
    for size in (*range(1, 18), 31, 32, 33):
        overrides = ["scheduler.max_num_seqs=1", f"scheduler.max_num_batched_tokens={size}"]
        with LLM(checkpoint, "monolithic", overrides=overrides) as llm:
            assert np.array_equal(logits_after(llm, PROMPT), expected), size


@pytest.mark.long
def test_prefix_hits_at_every_offset_from_a_windows_border(checkpoint: DirectoryCheckpoint) -> None:
    """A prompt goes another way behind a prefix that is cached in part, and is then cached whole."""
    reference = Reference(checkpoint, "int8", 128)
    with LLM(checkpoint, "monolithic") as llm:
        logits_after(llm, PROMPT)
        for shared in range(14, 52):
            prompt = [*PROMPT[:shared], (PROMPT[shared] + 1) % 120, *PROMPT[30:47]]
            expected = reference.logits(prompt)[-1]
            for _ in range(2):
                assert np.array_equal(logits_after(llm, prompt), expected), shared
        assert llm.engine.stats().prefix_cache_hits > 30 * 16
        llm.engine.check_integrity()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemption_in_the_middle_of_an_open_window(checkpoint: DirectoryCheckpoint, preemption: str) -> None:
    prompts, params = (
        [PROMPT[:n] for n in (33, 35, 38, 41, 46)],
        SamplingParams(max_tokens=40, ignore_eos=True),
    )
    with LLM(checkpoint, "monolithic") as llm:
        expected = digest(llm.generate(prompts, params, keep_logits=True))
    overrides = ["max_model_len=96", "cache.num_blocks=14", f"cache.preemption={preemption}"]
    overrides += ["cache.num_host_blocks=12"] if preemption == "swap" else []
    with LLM(checkpoint, "monolithic", overrides=overrides) as llm:
        assert digest(llm.generate(prompts, params, keep_logits=True)) == expected
        assert llm.engine.stats().num_preemptions > 0
        llm.engine.check_integrity()


@pytest.mark.parametrize(
    ("deployment", "setting", "message"),
    [
        ("monolithic", "mtp=1", "mtp=1 is not for deepseek_v4, whose MTP layer only the reference computes"),
        ("colocated", "lockstep=true", "lockstep is not for deepseek_v4"),
        (
            "colocated",
            "tp=2",
            "tp=2 is not for deepseek_v4, in which a die has its tokens' streams to itself",
        ),
        ("pd", "decode.o_proj_tp=2", "decode.o_proj_tp=2 is not for deepseek_v4"),
    ],
)
def test_what_is_refused(
    checkpoint: DirectoryCheckpoint, deployment: str, setting: str, message: str
) -> None:
    with pytest.raises(DeploymentError, match=message):
        LLM(checkpoint, deployment, overrides=["dies=2", setting] if deployment == "colocated" else [setting])


def test_quantize_says_that_it_does_not_do_it(checkpoint: DirectoryCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="deepseek_v4 is not quantised here"):
        quantize_checkpoint(checkpoint, tmp_path / "out", METHODS["rtn"], None)
    assert not (tmp_path / "out").exists()
