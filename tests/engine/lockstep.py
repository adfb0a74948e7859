"""Lockstep and a task for each die, run on the same requests and compared byte for byte."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from tests.engine.pods import overrides
from xdeepserve.engine.balance.reconfigure import Reconfiguration
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.run.lockstep.kernels.attention import SCRATCH
from xdeepserve.llm import LLM, digest
from xdeepserve.model.presets import PRESET_DIRECTORY, TinyCheckpoint
from xdeepserve.model.seeded import SeededCheckpoint

# The kernels of a whole step take up to two minutes to compile, for each recipe anew: `make test` tries one.
PRECISIONS = ("int8", pytest.param("fp32", marks=pytest.mark.long))
GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
PROMPTS = [[5 + i, *range(10, 10 + i % 5)] for i in range(7)]
Model = str | SeededCheckpoint
Image = dict[tuple[int, str], bytes]


def serve(
    model: Model, deployment: str, precision: str, settings: list[str], prompts: list[list[int]] = PROMPTS
) -> tuple[str, dict[tuple[int, str], bytes], int]:
    """Digest, every byte of all dies' memories by region (metadata also at the end), and virtual time."""
    with LLM(model, deployment, precision, overrides=settings) as llm:
        for te in llm.engine.je.tes:
            if te.reconfiguration is not None:
                fill_slots(te.reconfiguration)
        result = digest(llm.generate(prompts, GREEDY, keep_logits=True))
        llm.engine.check_integrity()
        pod, image = llm.engine.plan.pod, {}
        for die in pod.dies:
            memory = pod.memory(die)
            for area in (memory.metadata, memory.managed, memory.app):
                for name, region in area.regions.items():
                    image[die, name] = bytes(memory.read(region.offset, region.nbytes))
        now = pod.clock.now
    for die in pod.dies:
        memory = pod.memory(die)
        for name, region in memory.metadata.regions.items():
            image[die, f"{name}, stopped"] = bytes(memory.read(region.offset, region.nbytes))
    return result, image, now


def fill_slots(reconfiguration: Reconfiguration) -> None:
    """Before the first step, as its phases would: every redundant slot but each third holds some expert."""
    storage, phy2log = reconfiguration.storage, [list(row) for row in reconfiguration.phy2log]
    placed, memories = reconfiguration.experts, reconfiguration.pod.memories
    for layer, row in enumerate(phy2log):
        for holder, (_, mem) in enumerate(reconfiguration.holders):
            for slot, physical in enumerate(placed.free_slots[holder]):
                assert mem.redundant is not None
                expert = (7 * layer + 5 * holder + 3 * slot) % storage.config.n_routed_experts
                if expert in [row[at] for at in mem.slots] or (holder + slot) % 3 == 2:
                    continue
                row[physical] = expert
                for (at, nbytes), array in zip(
                    mem.redundant.pieces(layer, slot), storage.read(layer, expert), strict=True
                ):
                    assert array.nbytes == nbytes
                    memories.write(at, array.tobytes())
                mem.redundant.experts[layer, slot] = expert
    for _, gate in reconfiguration.gates:
        assert gate.replicas is not None
        gate.replicas.set_map(phy2log)


def compare(image: Image, expected: Image, settings: Sequence[str]) -> None:
    """All regions but scratch that nobody reads after its layer. `settings` are of the pod."""
    answers = {"expert_out"} if {"dies=1", "combine=int8"} <= {*settings} else set()  # rounded in place
    assert image.keys() == expected.keys()
    excluded = SCRATCH | answers
    assert not [
        key for key in image if image[key] != expected[key] and key[1].rpartition("/")[2] not in excluded
    ]


def check_apart(
    precision: str,
    shape: tuple[int, ...],
    *more: str,
    model: Model = "tiny-random",
    prompts: list[list[int]] = PROMPTS,
) -> None:
    """The same of a `moe-attention` pod."""
    settings = overrides(shape, *more)
    expected, expected_image, expected_ns = serve(model, "moe-attention", precision, settings, prompts)
    found, image, found_ns = serve(model, "moe-attention", precision, [*settings, "lockstep=true"], prompts)
    assert found == expected
    compare(image, expected_image, settings)
    # Exchanges are priced as a whole here, and die by die there.
    assert 0.6 * expected_ns < found_ns < 1.1 * expected_ns


def check_colocated(
    precision: str,
    *settings: str,
    model: Model = "tiny-random",
    prompts: list[list[int]] = PROMPTS,
) -> None:
    """The digest, and every byte of every region but scratch: weights, caches, fields, rows and results."""
    settings = ("max_model_len=64", *settings)
    expected, expected_image, expected_ns = serve(model, "colocated", precision, [*settings], prompts)
    found, image, found_ns = serve(model, "colocated", precision, [*settings, "lockstep=true"], prompts)
    assert found == expected
    compare(image, expected_image, settings)
    # Exchanges are priced as a whole here, and die by die there; stages are compared in test_one_clock.py.
    assert 0.85 * expected_ns < found_ns < 1.1 * expected_ns


def variant(**changes: object) -> SeededCheckpoint:
    """The random model with another configuration."""
    config = msgspec.structs.replace(TinyCheckpoint().config, **changes)
    return SeededCheckpoint("variant", PRESET_DIRECTORY / "tiny-random", config, seed=7)


ATTENTION_LAYERS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
KEPT_FLOAT = {  # modules by layer: of the dense one, of MoE layers, and 4 is MTP's
    "attention": {layer: [f"self_attn.{name}" for name in ATTENTION_LAYERS] for layer in (0, 2, 4)},
    "inputs of MLA": {
        1: ["self_attn.q_a_proj"],
        2: ["self_attn.q_b_proj"],
        3: ["self_attn.kv_a_proj_with_mqa"],
    },
    "outputs of MLA": {0: ["self_attn.o_proj"], 3: ["self_attn.o_proj"]},
    "up": {0: ["mlp.gate_proj", "mlp.up_proj"]},
    "down": {0: ["mlp.down_proj"]},
    "shared up": {1: ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"]},
    "shared down": {2: ["mlp.shared_experts.down_proj"], 4: ["mlp.shared_experts.down_proj"]},
}


def with_float(*groups: str) -> SeededCheckpoint:
    """The random model, whose INT8 recipe keeps these layers in floating point."""
    return variant(
        kept_float=frozenset(
            f"model.layers.{layer}.{module}"
            for group in groups
            for layer, modules in KEPT_FLOAT[group].items()
            for module in modules
        )
    )


SLOTS = ("experts.redundant_slots=2", "experts.balance_interval=1000")  # counted, and left as they are


def skip(*args: object) -> None:
    """A kernel that does nothing."""


TWO = "pipeline.microbatches=2"
