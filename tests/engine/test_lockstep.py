"""Lockstep: all dies of a step at once leave the same bytes in the same places as a task for each."""

from __future__ import annotations

import itertools
import re

import msgspec
import numpy as np
import pytest

from tests.engine.pods import SHAPES, overrides
from xdeepserve.engine.deployment import resolve
from xdeepserve.engine.lockstep import gang
from xdeepserve.engine.serving.request import SamplingParams
from xdeepserve.errors import DeploymentError, XDeepServeError
from xdeepserve.llm import LLM, build_engine, digest
from xdeepserve.model.presets import TinyCheckpoint

GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
PROMPTS = [[5 + i, *range(10, 10 + i % 5)] for i in range(7)]
FLAGS = {"doorbell", "A2E received", "experts done", "E2A sent"}


def run(precision: str, shape: tuple[int, ...], *more: str) -> tuple[str, dict[tuple[int, str], bytes], int]:
    """Digest, every byte that the exchange and the KV cache consist of, and virtual time."""
    with LLM("tiny-random", "moe-attention", precision, overrides=overrides(shape, *more)) as llm:
        result = digest(llm.generate(PROMPTS, GREEDY, keep_logits=True))
        pod = llm.engine.plan.pod
        image = {}
        for die in pod.dies:
            memory = pod.memory(die)
            for area in (memory.metadata, memory.managed, memory.app):
                for name, region in area.regions.items():
                    is_scratch = area.name == "app" and not name.startswith("kv/")
                    if name not in FLAGS and not is_scratch:
                        image[die, name] = bytes(memory.read(region.offset, region.nbytes))
        return result, image, pod.clock.now


@pytest.mark.parametrize("precision", ["int8", "fp32"])
@pytest.mark.parametrize("mtp", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bytes_as_a_task_for_each_die(precision: str, shape: tuple[int, ...], mtp: int) -> None:
    expected, expected_image, expected_ns = run(precision, shape, f"mtp={mtp}")
    found, image, found_ns = run(precision, shape, f"mtp={mtp}", "lockstep=true")
    assert found == expected
    assert image.keys() == expected_image.keys()
    different = [key for key in image if image[key] != expected_image[key]]
    assert not different
    # Exchanges are priced as a whole here, and die by die there.
    assert 0.6 * expected_ns < found_ns < 1.1 * expected_ns


def test_int8_attention_where_a_layer_bears_it() -> None:
    digests = set()
    for more in ([], ["lockstep=true"]):
        model = TinyCheckpoint()
        model.config = msgspec.structs.replace(model.config, int8_attention=frozenset({0, 2, 4}))
        with LLM(model, "moe-attention", "int8", overrides=overrides(SHAPES[0], "mtp=1", *more)) as llm:
            digests.add(digest(llm.generate(PROMPTS, GREEDY, keep_logits=True)))
    (found,) = digests
    assert found != run("int8", SHAPES[0], "mtp=1")[0]


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_matter(threads: int) -> None:
    assert run("int8", SHAPES[0], "lockstep=true") == run(
        "int8", SHAPES[0], "lockstep=true", f"threads={threads}"
    )


def test_disaggregated_prefill_hands_over_to_a_lockstep() -> None:
    digests = set()
    for more in ([], ["lockstep=true"]):
        with LLM("tiny-random", "transformerless", "int8", overrides=["max_model_len=64", *more]) as llm:
            digests.add(digest(llm.generate(PROMPTS, GREEDY, keep_logits=True)))
    assert len(digests) == 1


def test_trace_shows_the_streams_of_all_dies() -> None:
    with LLM(
        "tiny-random", "moe-attention", "int8", overrides=overrides(SHAPES[0], "lockstep=true"), trace=True
    ) as llm:
        llm.generate(PROMPTS, GREEDY)
        spans = llm.engine.plan.pod.trace.spans
    lanes = {(span.lane, span.name) for span in spans}
    assert {("AIC", "MLA"), ("XCCL", "A2E"), ("XCCL", "E2A"), ("A2E", "A2E"), ("AIC", "Experts")} <= lanes
    for die in {span.node for span in spans}:
        for lane in ("AIC", "A2E", "E2A"):
            mine = sorted((s.start_ns, s.end_ns) for s in spans if (s.node, s.lane) == (die, lane))
            assert all(first[1] <= second[0] for first, second in itertools.pairwise(mine)), lane


def test_a_die_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = gang.Gang.attend

    async def absent(self: gang.Gang, rank: int, share: gang.Share) -> None:
        if rank == 2:
            await self._clock.sleep(10**12)
        await attend(self, rank, share)

    monkeypatch.setattr(gang.Gang, "attend", absent)
    with (
        LLM("tiny-random", "moe-attention", "int8", overrides=overrides(SHAPES[0], "lockstep=true")) as llm,
        pytest.raises(XDeepServeError, match=r"lockstep.*attention 2"),
    ):
        llm.generate(PROMPTS, GREEDY)


def test_a_field_of_another_event_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(*args: object) -> None:
        """Attention dies post nothing."""

    monkeypatch.setattr(gang.a, "attention_stage", skip)
    with (
        LLM("tiny-random", "moe-attention", "int8", overrides=overrides(SHAPES[0], "lockstep=true")) as llm,
        pytest.raises(
            XDeepServeError, match=re.escape("A2E: expert 0 finds another event's field in event 1")
        ),
    ):
        llm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize(
    ("model", "deployment", "override", "reason"),
    [
        ("tiny-random", "colocated", "lockstep=true", "lockstep is for pods with dies for experts alone"),
        ("tiny-random", "superpod", "mtp=0", "experts.routed_dies=256 is more than the model's 16"),
        ("tiny-r1", "superpod", "fabric=ub", "UB does not leave the pod"),
        ("tiny-r1", "superpod", "attention.dies=161", "a SuperPod has 768 dies, this deployment needs 771"),
        ("tiny-r1", "superpod", "prefill.max_num_seqs=0", "prefill.max_num_seqs must be at least 1"),
        ("tiny-r1", "superpod", "prefill.max_num_seqs=512", "prefill.max_num_batched_tokens=256 cannot hold"),
    ],
)
def test_what_cannot_be_is_refused(model: str, deployment: str, override: str, reason: str) -> None:
    with pytest.raises(DeploymentError, match=reason):
        build_engine(model, resolve(deployment, [override]), "int8")


def test_the_superpod_fills_its_dies_and_has_prefill_beside() -> None:
    prefill, decode = build_engine("tiny-r1", resolve("superpod"), "int8").plan.tes
    assert len(decode.dies) == 480
    assert len(decode.expert_dies) == 288
    assert decode.dies[0] == 0
    assert decode.expert_dies[-1] == 767
    assert prefill.dies == tuple(range(768, 776))
    assert np.diff(decode.dies).max() == 1


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
