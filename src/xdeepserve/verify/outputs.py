"""Serve the matrix's seeded prompts: on a deployment, as a case says, and through the NumPy reference."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, get_args

import msgspec
import numpy as np

from xdeepserve.engine.deploy.deployment import Role
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.llm import LLM, CompletionOutput, RequestOutput, digest
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.reference import Reference
from xdeepserve.model.sampling import philox4x32, sample
from xdeepserve.model.weights import Recipe
from xdeepserve.verify.case import NUM_COMPANIONS, Case, Subject, TEChange
from xdeepserve.verify.forms import FORM, FORM_TOKENS, form_grammars, masks
from xdeepserve.verify.pools import pool_of

SECOND_MODEL = "tiny-r1"
SECOND_PROMPTS = [[1, 2, 3], [4, 5]]
PROMPT_LENGTHS = (1, 17, 130)
NEW_TOKENS = 12
TEMPERATURES = (0.0, 0.8)
ARRIVAL_SPAN_NS = 20_000_000  # about as long as the prompts take


def prompts(config: ModelConfig) -> list[list[int]]:
    """Seeded prompts of several lengths, each once per temperature."""
    room = min(config.max_position_embeddings, 256) - NEW_TOKENS
    lengths = [max(1, min(length, room)) for length in PROMPT_LENGTHS]
    return [_seeded_ids(config, i, length) for i, length in enumerate(lengths) for _ in TEMPERATURES]


def _seeded_ids(config: ModelConfig, stream: int, length: int) -> list[int]:
    return [_random(0, 2, i, stream) % config.vocab_size for i in range(length)]


def _random(seed: int, purpose: int, index: int, stream: int = 0) -> int:
    return philox4x32((index, stream, 0, purpose), (seed, 0))[0]


def _params(index: int, form: bool = False) -> SamplingParams:
    if form:
        return SamplingParams(
            max_tokens=FORM_TOKENS, temperature=index % 2, seed=index, structured_outputs=FORM
        )
    return SamplingParams(
        max_tokens=NEW_TOKENS,
        temperature=TEMPERATURES[index % len(TEMPERATURES)],
        seed=index,
        ignore_eos=True,
    )


class Served(NamedTuple):
    """Outputs and counters of a case."""

    outputs: list[RequestOutput]  # of the prompts, without their companions
    num_reconfigurations: int
    num_pooled: int  # tokens of prompts that came from the memory pool
    num_evicted: int  # copies in DRAM that others came for
    num_lost: int  # TEs that have failed
    num_rollbacks: int
    num_masked: int  # expert servers that the monitor holds for lost
    num_missed: int  # clients of expert servers that their TEs go on without
    second: str | None  # digest of what a second model answered beside it, if there was one


def run_case(checkpoint: Checkpoint, recipe: Recipe, case: Case) -> Served:
    """Serve the prompts the way `case` says, and return outputs and counters."""
    wanted = prompts(checkpoint.config)
    params = [_params(i, case.form) for i in range(len(wanted))]

    answers: list[RequestOutput] = []  # of a second model

    def fill(deployment: str, overrides: tuple[str, ...]) -> None:
        with LLM(checkpoint, deployment, recipe, overrides=overrides) as llm:
            llm.generate(wanted, params)

    with (
        pool_of(case, fill) as overrides,
        LLM(
            checkpoint,
            case.deployment,
            recipe,
            overrides=overrides,
            clock_seed=case.clock_seed,
            faults=case.faults,
        ) as llm,
    ):
        if case.evicts and llm.engine.plan.pool_use is not None:
            llm.engine.plan.pool_use.crowd()
        if case.repeated:
            llm.generate(wanted, params)
            # So many that what is kept in HBM goes, where there are few blocks; the pool has it still.
            count = 4 if case.pool is None else 4 * len(llm.engine.groups)
            llm.generate([_seeded_ids(checkpoint.config, 50 + i, 90) for i in range(count)], _params(0))
        if case.alone:
            outputs = [
                llm.generate([ids], [one], keep_logits=True)[0]
                for ids, one in zip(wanted, params, strict=True)
            ]
        else:
            others: list[list[int]] = []
            if case.crowded:
                others = [_seeded_ids(checkpoint.config, 100 + i, 5 + 3 * i) for i in range(NUM_COMPANIONS)]
            half = len(others) // 2
            batch = [*others[:half], *wanted, *others[half:]]
            companions = [_params(0)] * half
            every = [*companions, *params, *companions][: len(batch)]
            arrivals = None
            if case.arrivals is not None:
                arrivals = [_random(case.arrivals, 3, i) % ARRIVAL_SPAN_NS for i in range(len(batch))]
            with contextlib.ExitStack() as stack:
                if case.beside is not None:
                    stack.enter_context(_second_model(llm, case.beside, answers))
                made = llm.generate(
                    batch,
                    every,
                    keep_logits=True,
                    arrivals_ns=arrivals,
                    meanwhile=partial(change_tes, case.life) if case.life else None,
                )
            outputs = made[half : half + len(wanted)]
        return _served(llm.engine, outputs, digest(answers) if case.beside is not None else None)


def _served(engine: Engine, outputs: list[RequestOutput], second: str | None) -> Served:
    """Collect the outputs with the counters of their engine, after a check of the engine's integrity."""
    engine.check_integrity()
    stats = engine.stats()
    return Served(
        outputs,
        stats.num_reconfigurations,
        stats.pool_hits,
        stats.pool.get("dram evictions", 0),
        len(engine.lost),
        stats.num_recoveries["3"],
        sum(len(te.members.lost_servers) for te in engine.je.tes),
        sum(len(te.members.lost_clients) for te in engine.je.tes),
        second,
    )


async def change_tes(life: Sequence[TEChange], engine: Engine) -> None:
    """Add, drain and remove TEs and expert servers, each at its virtual time."""
    clock = engine.plan.pod.clock
    start = clock.now
    for change in life:
        await clock.sleep_until(max(clock.now, start + change.at_ns))
        match change.what:
            case "add":
                role: Role = next(role for role in get_args(Role) if role == change.te)
                await engine.add_te(role)
            case "drain":
                await engine.drain(change.te)
            case "remove":
                await engine.remove(change.te)
            case "add server":
                for _ in range(10_000):  # how soon its place is free depends on the model
                    seats = {seat.server: seat.presence for seat in engine.servers()}
                    if seats[change.server] != "there":
                        break
                    await clock.sleep(100_000)
                await engine.add_server(change.te, change.server)
            case "remove server":
                await engine.remove_server(change.te, change.server)


@contextlib.contextmanager
def _second_model(llm: LLM, deployment: str, answers: list[RequestOutput]) -> Iterator[None]:
    """Serve another model on the same pod meanwhile, and add its answers to `answers`."""
    with LLM(SECOND_MODEL, deployment, beside=llm) as second, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(second.generate, SECOND_PROMPTS, _params(0), keep_logits=True)
        yield
        answers += serving.result()


@functools.cache
def second_alone() -> str:
    """Digest of the second model's answers on a pod of its own."""
    with LLM(SECOND_MODEL) as llm:
        return digest(llm.generate(SECOND_PROMPTS, _params(0), keep_logits=True))


def in_the_arithmetic_of(subject: Subject, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint for the reference of a matrix.

    For the INT8 combine it is a copy with `int8_answers` set.
    """
    if subject != "int8-combine":
        return checkpoint
    other = copy.copy(checkpoint)
    other.config = msgspec.structs.replace(checkpoint.config, int8_answers=True)
    return other


def reference_outputs(
    checkpoint: Checkpoint, recipe: Recipe, outputs: Sequence[RequestOutput], subject: Subject = "plain"
) -> list[RequestOutput]:
    """Run the NumPy reference over the same prompts, teacher-forced with `outputs`, and sample from its own
    logits.

    For answers with a form, the logits go through the form's masks before they are sampled.
    """
    form = subject == "structured"
    reference = Reference(in_the_arithmetic_of(subject, checkpoint), recipe)
    grammars = form_grammars(checkpoint) if form else None
    results = []
    for index, output in enumerate(outputs):
        p, forced = _params(index, form), output.outputs[0].token_ids
        prompt = output.prompt_token_ids
        logits = reference.logits([*prompt, *forced[:-1]])[len(prompt) - 1 :]
        drawn = list(logits)
        if grammars is not None:
            drawn = [
                np.where(mask, row, -np.inf)
                for row, mask in zip(logits, masks(grammars, forced), strict=False)
            ]
        tokens = [
            sample(row, p.temperature, p.top_k, p.top_p, p.min_p, index, 0, len(prompt) + i)
            for i, row in enumerate(drawn)
        ]
        choice = CompletionOutput(
            index=0, text="", token_ids=tokens, finish_reason="length", logits=np.ascontiguousarray(logits)
        )
        results.append(
            RequestOutput(request_id="reference", prompt=None, prompt_token_ids=prompt, outputs=[choice])
        )
    return results
