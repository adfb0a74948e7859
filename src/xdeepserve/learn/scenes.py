"""Parts of the pod at work, small enough to run for every check. Each scene returns arrays by name."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.exchange.rows import Float32, Int32
from xdeepserve.comm.p2p.handle import PointToPoint
from xdeepserve.comm.p2p.layout import RingLayout
from xdeepserve.comm.p2p.message_end import Engine
from xdeepserve.comm.trampoline.a2e import AttentionSide, ExpertSide
from xdeepserve.comm.trampoline.layout import A2ELayout, Sides
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.ways import arithmetic
from xdeepserve.errors import XDeepServeError
from xdeepserve.golden.transfers import distflow
from xdeepserve.hw.faults import Fault
from xdeepserve.hw.pod import Pod
from xdeepserve.learn import by_hand
from xdeepserve.llm import LLM, RequestOutput
from xdeepserve.loop import run
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.reference import Reference

Bits = Mapping[str, Any]

RING = RingLayout(num_ranks=2, num_cores=3, slot_nbytes=32, num_slots=4)
MESSAGES: tuple[tuple[int, Engine], ...] = (
    (250, "mte"),
    (32, "mte"),
    (320, "dma"),
    (100, "mte"),
)  # bytes, by what
SIDES = Sides((32, 33, 34), Group((0, 1), expert_rank=(0, 0, 1, 1, 0, 1, 1, 0)))
TRAMPOLINE = A2ELayout(SIDES, max_tokens=6, top_k=4, hidden=32)
NUM_TOKENS = (6, 0, 5)  # of each attention rank
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8])


def send_and_receive() -> Bits:
    """Send four messages from rank 0 to rank 1, on two dies, chunk by chunk through a ring of four slots.

    AIV cores send three of them; the DMA engines send one, several chunks at a time.
    """

    async def main() -> Bits:
        pod, dies = Pod(), (0, 16)
        for die in dies:
            plan = pod.plan(die)
            RING.plan(plan)
            plan.app.alloc("buffer", 320)
        pod.materialise()
        sender, receiver = (PointToPoint(pod.dies[die], rank, dies, RING) for rank, die in enumerate(dies))
        rng, found = np.random.default_rng(1), {}

        async def send() -> None:
            memory = sender.die.memory
            for event, (nbytes, engine) in enumerate(MESSAGES, start=1):
                at = memory.app.regions["buffer"].offset
                memory.write(at, rng.bytes(nbytes))
                await sender.send(at, nbytes, 1, event, cores=3, engine=engine)

        async def receive() -> None:
            memory = receiver.die.memory
            for event, (nbytes, engine) in enumerate(MESSAGES, start=1):
                buffer = memory.app.regions["buffer"]
                await receiver.receive(buffer.offset, nbytes, 0, event, cores=3, engine=engine)
                found[f"message {event}"] = memory.view(buffer, np.uint8, nbytes).copy()

        await asyncio.gather(sender.die.spawn(send()), receiver.die.spawn(receive()))
        return found

    return run(main())


def tokens_of(rank: int) -> tuple[Float32, Int32, Float32]:
    """Draw x [T, H], topk_idx [T, K] and topk_weights [T, K] of an attention rank; its first token is
    zeros."""
    rng, shape = np.random.default_rng(rank), (NUM_TOKENS[rank], TRAMPOLINE.top_k)
    x = rng.standard_normal((shape[0], TRAMPOLINE.hidden)).astype(np.float32)
    x[:1] = 0
    num_experts = len(SIDES.experts.expert_rank)
    chosen = [rng.permutation(num_experts)[: shape[1]] for _ in range(shape[0])]
    return x, np.array(chosen, np.int32).reshape(shape), rng.random(shape, np.float32)


def through_trampolines() -> Bits:
    """Send tokens of three attention dies to eight experts on two dies, and their answers back."""

    async def attend(side: AttentionSide) -> np.ndarray[Any, Any]:
        await side.a2e(*tokens_of(side.rank), 1)
        return (await side.e2a(1)).copy()

    async def serve(side: ExpertSide) -> None:
        got = await side.a2e(1)
        x = got.payload * got.scale[:, None]
        out = np.tanh(x * (1 + got.expert_idx[:, None])).astype(np.float32)
        await side.e2a(np.ascontiguousarray(out), 1)

    async def main() -> Bits:
        pod = Pod()
        for die in SIDES.attention:
            TRAMPOLINE.plan_attention(pod.plan(die))
        for die in SIDES.experts.dies:
            TRAMPOLINE.plan_expert(pod.plan(die))
        pod.materialise()
        # By its name, so that what stands in for it is found.
        how: Any = {"quantize": lambda x: arithmetic.quantize_rows(x)}
        sides = [
            AttentionSide(pod.dies[die], rank, TRAMPOLINE, **how) for rank, die in enumerate(SIDES.attention)
        ]
        experts = [
            ExpertSide(pod.dies[die], rank, TRAMPOLINE, **how) for rank, die in enumerate(SIDES.experts.dies)
        ]
        tasks = [side.die.spawn(attend(side)) for side in sides]
        tasks += [side.die.spawn(serve(side)) for side in experts]
        found = await asyncio.gather(*tasks)
        return {f"rank {rank}, answers": found[rank] for rank in range(len(sides))}

    answers = run(main())
    by_hand.packed()
    by_hand.sums()
    by_hand.quantised()
    return answers


@functools.cache
def served(deployment: str, *overrides: str) -> list[RequestOutput]:
    """Serve the prompts on a pod, and return the answers with the logits of every token."""
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with LLM("tiny-random", deployment, overrides=list(overrides)) as llm:
        return llm.generate(list(PROMPTS), params, keep_logits=True)


def forward_pass() -> Bits:
    """Compute logits by the NumPy forward pass. XDeepServeError, with the place, if the pod's differ."""
    reference, found = Reference(resolve_model("tiny-random"), "int8"), {}
    for number, (prompt, output) in enumerate(zip(PROMPTS, served("transformerless"), strict=True)):
        choice = output.outputs[0]
        assert choice.logits is not None
        logits = reference.logits([*prompt, *choice.token_ids[:-1]])[len(prompt) - 1 :]
        if not np.array_equal(logits, choice.logits):
            position, entry = np.argwhere(logits != choice.logits)[0].tolist()
            raise XDeepServeError(
                f"request {number}, position {len(prompt) + position}, logit {entry}: expected "
                f"{choice.logits[position, entry]}, the forward pass has {logits[position, entry]}"
            )
        found[f"request {number}, logits"] = logits
    by_hand.gates()
    by_hand.attentions(resolve_model("tiny-random"))
    return found


def tokens(
    prompts: list[Any],
    params: SamplingParams,
    model: str,
    deployment: str,
    *overrides: str,
    faults: Sequence[Fault] = (),
) -> Bits:
    """Serve prompts on a pod, and return the token ids of each choice."""
    with LLM(model, deployment, overrides=list(overrides), faults=faults) as llm:
        outputs = llm.generate(prompts, params)
    return {
        f"request {number}, choice {choice.index}": np.array(choice.token_ids)
        for number, output in enumerate(outputs)
        for choice in output.outputs
    }


def choices_that_share_blocks() -> Bits:
    """Serve three choices for each prompt: they share the prompt's blocks, and write after it."""
    params = SamplingParams(max_tokens=12, n=3, temperature=1.0, seed=1, ignore_eos=True)
    found = tokens([*PROMPTS, *(prompt * 4 for prompt in PROMPTS)], params, "tiny-random", "monolithic")
    by_hand.copies()
    return found


def drafts_of_two() -> Bits:
    """Serve a trained model with drafts two tokens ahead, which are right now and then."""
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True)
    prompts = ["Once upon a time", "def scale(x):", "A fox called Mia"]
    found = tokens(prompts, params, "tiny", "monolithic", "mtp=2")
    by_hand.confirmed()
    return found


def kv_goes_to_decode() -> Bits:
    """Transfer differently cut bytes among four dies, then serve on a prefill and a decode TE, which hand
    over KV."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    moved = distflow(None).recording.outputs
    found = tokens([prompt * 5 for prompt in PROMPTS], params, "tiny-random", "pd")
    by_hand.pairs()
    return {**moved, **found}


def replicas_move() -> Bits:
    """Serve on four dies with redundant slots, which count tokens and move replicas of hot experts."""
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts = [*(prompt * 4 for prompt in PROMPTS), [5] * 20, [7] * 20]
    settings = ("dies=4", "experts.redundant_slots=2", "experts.balance_interval=0.002")
    found = tokens(prompts, params, "tiny-random", "colocated", *settings)
    by_hand.placements()
    return found


def a_die_that_fails_twice() -> Bits:
    """Serve on a die with drafts that has two glitches, each after it has overwritten states that drafts came
    from."""
    faults = [Fault(at_us, 0, "glitch", code="aicore-exception") for at_us in (4000.0, 8500.0)]
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    found = tokens(list(PROMPTS), params, "tiny-random", "monolithic", "mtp=2", faults=faults)
    return {**found, **by_hand.steps_undone()}
