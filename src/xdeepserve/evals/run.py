"""Run a model over held-out text through a deployment and count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from xdeepserve.corpus import Sample
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.serving.record import RequestMetrics
from xdeepserve.errors import InputError, RequestError
from xdeepserve.evals.scoring import is_json, score, wants_json
from xdeepserve.llm import LLM
from xdeepserve.model.canonical import Array
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.tokenizer import load_tokenizer, require_tokenizer
from xdeepserve.model.weights import Recipe
from xdeepserve.quant.job import REPORT_FILE, Report

MAX_ANSWER = 224  # tokens
MAX_LEN = 768

# How a model with two MTP layers can draft; with one, only the first.
DRAFTING = {
    "one layer": ["mtp=1"],
    "one layer, used twice": ["mtp=2", "mtp_reuse=true"],
    "two layers": ["mtp=2"],
}

Progress = Callable[[int, int], None]


class Subject(msgspec.Struct, frozen=True):
    """A column of the table: a checkpoint in one recipe."""

    title: str
    checkpoint: Checkpoint
    recipe: Recipe


class DomainResult(msgspec.Struct):
    """Figures of a domain of text."""

    domain: str
    num_samples: int
    num_tokens: int  # of answers
    perplexity: float
    agreement: float | None  # share of places where the most likely token is the first subject's
    score: float | None  # share of right answers, greedy
    valid_json: float | None  # share of well-formed answers where JSON is asked for
    acceptance: float | None  # share of MTP drafts, one a step, that the main model agrees with
    tokens_per_step: dict[str, float] | None  # of decoding, by way of drafting


class Result(msgspec.Struct):
    """Figures of a subject. All figures outside of `domains` and `errors` are over all answers of all
    domains."""

    title: str
    perplexity: float
    agreement: float | None
    domains: list[DomainResult]
    tokens_per_step: dict[str, float] | None = None
    errors: dict[str, float] | None = None  # of a quantised checkpoint, from its report: see `mean_errors`


def evaluate(
    subjects: Sequence[Subject],
    samples: Sequence[Sample],
    *,
    deployment: str = "monolithic",
    progress: Progress = lambda done, total: None,
) -> list[Result]:
    """Measure all subjects on the same samples; the first is the baseline of the others. Raises
    InputError."""
    total = len(subjects) * len(samples) * 2
    num_tokens = _check_tokenizers(subjects, samples)
    for subject in subjects:
        limit = min(subject.checkpoint.config.max_position_embeddings, MAX_LEN)
        if num_tokens > limit:
            raise InputError(
                f"{subject.title}: the longest sample has {num_tokens} tokens, "
                f"but the context holds {limit} here"
            )
    baseline: list[Array] | None = None
    results = []
    for number, subject in enumerate(subjects):
        examiner = _Examiner(subject, samples, deployment, number * len(samples) * 2, total, progress)
        results.append(examiner.result(baseline))
        baseline = examiner.best if baseline is None else baseline
    return results


def _check_tokenizers(subjects: Sequence[Subject], samples: Sequence[Sample]) -> int:
    """Return the tokens of the longest sample.

    Subjects are compared token by token, so they must cut text into the same tokens. Raises InputError
    otherwise.
    """
    first: list[list[int]] | None = None
    for directory in dict.fromkeys(subject.checkpoint.directory for subject in subjects):
        tokenizer = require_tokenizer(load_tokenizer(directory), directory.name)
        found = [tokenizer.encode(one.prompt + one.answer) for one in samples]
        first = found if first is None else first
        if found != first:
            raise InputError(
                f"{directory.name} has another tokenizer than {subjects[0].checkpoint.name}: "
                "their tokens cannot be compared"
            )
    return max(map(len, first or []), default=0)


def mean_errors(directory: Path) -> dict[str, float] | None:
    """Read quantisation's mean errors of linear layers' outputs on calibration text, by cause; None without a
    report."""
    path = directory / REPORT_FILE
    if not path.is_file():
        return None
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except msgspec.DecodeError:  # somebody else's file of that name
        return None
    layers = [one for reports in report.layers.values() for one in reports]
    fields = ("weights", "activations", "both", "original")
    return {field: float(np.mean([getattr(one, field) or 0.0 for one in layers])) for field in fields}


def token_losses(logits: Array, token_ids: Sequence[int]) -> Array:
    """Compute -log p of each token, float64 [n]; `logits` [n, vocab] are those that predict it."""
    logits = logits.astype(np.float64)
    peak = logits.max(axis=-1, keepdims=True)
    log_sum = np.log(np.exp(logits - peak).sum(axis=-1)) + peak[:, 0]
    found: Array = log_sum - logits[np.arange(len(token_ids)), token_ids]
    return found


class _Examiner:
    """Examiner of a subject: perplexity by teacher forcing, then greedy answers."""

    def __init__(
        self,
        subject: Subject,
        samples: Sequence[Sample],
        deployment: str,
        done: int,
        total: int,
        progress: Progress,
    ) -> None:
        self.subject, self.samples = subject, samples
        config = subject.checkpoint.config
        length = min(MAX_LEN, config.max_position_embeddings)
        num_mtp = min(config.num_nextn_predict_layers, 2)
        settings = [f"max_model_len={length}", "scheduler.max_num_batched_tokens=256"]
        self.losses: list[Array] = []  # of each sample's answer tokens
        self.best: list[Array] = []  # the most likely token at the same places
        self.answers: list[str] = []
        with LLM(subject.checkpoint, deployment, subject.recipe, overrides=settings) as llm:
            tokenizer = require_tokenizer(llm.tokenizer, subject.checkpoint.name)
            prompts = [tokenizer.encode(one.prompt) for one in samples]
            for i, (prompt, one) in enumerate(zip(prompts, samples, strict=True)):
                self._teacher_force(llm, prompt, tokenizer.encode(one.answer))
                progress(done + i + 1, total)
            params = SamplingParams(max_tokens=MAX_ANSWER, temperature=0.0)
            try:
                outputs = llm.generate(prompts, params)
            except RequestError as error:
                raise InputError(f"{subject.title}: {error}") from None
            self.answers = [output.outputs[0].text for output in outputs]
        ways = list(DRAFTING)[: (0, 1, 3)[num_mtp]]
        self.drafts = {way: self._speculate(deployment, [*settings, *DRAFTING[way]], prompts) for way in ways}
        progress(done + 2 * len(samples), total)

    def _teacher_force(self, llm: LLM, prompt: list[int], answer: list[int]) -> None:
        logits = llm.logits([*prompt, *answer])[len(prompt) - 1 : -1]
        self.losses.append(token_losses(logits, answer))
        self.best.append(logits.argmax(axis=-1))

    def _speculate(
        self, deployment: str, settings: list[str], prompts: list[list[int]]
    ) -> list[RequestMetrics]:
        """Answer all prompts greedily with a way of drafting; return the requests' metrics."""
        params = SamplingParams(max_tokens=MAX_ANSWER, temperature=0.0)
        with LLM(self.subject.checkpoint, deployment, self.subject.recipe, overrides=settings) as llm:
            outputs = llm.generate(prompts, params)
        return [output.metrics for output in outputs if output.metrics is not None]

    def result(self, baseline: list[Array] | None) -> Result:
        everything = range(len(self.samples))
        return Result(
            title=self.subject.title,
            perplexity=self._perplexity(everything),
            agreement=self._agreement(everything, baseline),
            tokens_per_step=self._tokens_per_step(everything),
            errors=mean_errors(self.subject.checkpoint.directory),
            domains=[
                self._domain(domain, [i for i in everything if self.samples[i].domain == domain], baseline)
                for domain in dict.fromkeys(one.domain for one in self.samples)
            ],
        )

    def _domain(self, domain: str, chosen: Sequence[int], baseline: list[Array] | None) -> DomainResult:
        marks = [score(self.samples[i], self.answers[i]) for i in chosen]
        json_answers = [is_json(self.answers[i]) for i in chosen if wants_json(self.samples[i])]
        acceptance = None
        if self.drafts:
            taken = [self.drafts["one layer"][i] for i in chosen]
            acceptance = sum(one.num_accepted for one in taken) / max(sum(one.num_drafts for one in taken), 1)
        return DomainResult(
            domain=domain,
            num_samples=len(chosen),
            num_tokens=sum(len(self.losses[i]) for i in chosen),
            perplexity=self._perplexity(chosen),
            agreement=self._agreement(chosen, baseline),
            score=None if None in marks else sum(map(bool, marks)) / len(marks),
            valid_json=sum(json_answers) / len(json_answers) if json_answers else None,
            acceptance=acceptance,
            tokens_per_step=self._tokens_per_step(chosen),
        )

    def _tokens_per_step(self, chosen: Sequence[int]) -> dict[str, float] | None:
        """Compute tokens per step by way of drafting, without each answer's first token, which prefill
        makes."""
        found = {}
        for way, metrics in self.drafts.items():
            num_tokens = sum(metrics[i].num_tokens - 1 for i in chosen)
            found[way] = num_tokens / max(sum(metrics[i].num_steps - 1 for i in chosen), 1)
        return found or None

    def _perplexity(self, chosen: Sequence[int]) -> float:
        return float(np.exp(np.concatenate([self.losses[i] for i in chosen]).mean()))

    def _agreement(self, chosen: Sequence[int], baseline: list[Array] | None) -> float | None:
        if baseline is None:
            return None
        return float(np.concatenate([self.best[i] == baseline[i] for i in chosen]).mean())
