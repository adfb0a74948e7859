"""Serve the matrix's seeded prompts: on a deployment, as a case says, and through the NumPy reference."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.history import History, Told, serve
from xdeepserve.llm import LLM, CompletionOutput, RequestOutput, digest
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.reference import Reference
from xdeepserve.model.sampling import philox4x32, sample
from xdeepserve.model.weights import Recipe
from xdeepserve.verify.case import NUM_COMPANIONS, Case, Subject
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


def run_case(checkpoint: Checkpoint, recipe: Recipe, case: Case) -> tuple[Told, str | None]:
    """Serve the prompts the way `case` says; return what came of them, without their companions.

    The second value is the digest of what a second model answered beside them, None if there was none.
    """
    config = checkpoint.config
    wanted = prompts(config)
    params = [_params(i, case.form) for i in range(len(wanted))]
    others: list[list[int]] = []
    if case.crowded:
        others = [_seeded_ids(config, 100 + i, 5 + 3 * i) for i in range(NUM_COMPANIONS)]
    half = len(others) // 2
    companions = [_params(0)] * half
    arrivals = None
    if case.arrivals is not None:
        count = len(others) + len(wanted)
        arrivals = [_random(case.arrivals, 3, i) % ARRIVAL_SPAN_NS for i in range(count)]
    answers: list[RequestOutput] = []  # of a second model

    def fill(writer: History) -> None:
        asked = {"prompts": wanted, "params": params, "precision": recipe, "model": checkpoint}
        serve(msgspec.structs.replace(writer, **asked))

    @contextlib.contextmanager
    def around(llm: LLM) -> Iterator[None]:
        if case.evicts and llm.engine.plan.pool_use is not None:
            llm.engine.plan.pool_use.crowd()
        if case.repeated:
            llm.generate(wanted, params)
            # So many that what is kept in HBM goes, where there are few blocks; the pool has it still.
            count = 4 if case.pool is None else 4 * len(llm.engine.groups)
            llm.generate([_seeded_ids(config, 50 + i, 90) for i in range(count)], _params(0))
        with contextlib.nullcontext() if case.beside is None else _second_model(llm, case.beside, answers):
            yield

    with pool_of(case, fill) as settings:
        history = History(
            case.deployment,
            settings,
            [*others[:half], *wanted, *others[half:]],
            [*companions, *params, *companions],
            arrivals_ns=arrivals,
            faults=case.faults,
            life=case.life,
            clock_seed=case.clock_seed,
            precision=recipe,
            model=checkpoint,
            in_turn=case.alone,
        )
        told = serve(history, around=around)
    told = told._replace(outputs=told.outputs[half : half + len(wanted)])
    return told, None if case.beside is None else digest(answers)


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
    return serve(History("monolithic", (), SECOND_PROMPTS, _params(0), model=SECOND_MODEL)).digest


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
