"""A trace served with tokens by the engine: arrivals in virtual time, every bit computed.

A block's tokens are drawn by its number, so that equal blocks are equal tokens. Prompts of requests without
known blocks are drawn by the request's number. Lengths and blocks are divided by `shrink`, because a small
pod has a short context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xdeepserve.engine.dp.events import Assigned, Observed, Sent, StepEnded, TEJoined
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.errors import InputError
from xdeepserve.llm import LLM, RequestOutput
from xdeepserve.platform.service_report import Outcome
from xdeepserve.platform.traces import TracedRequest

RESERVED = 3  # token ids that may end or begin a text; prompts have none of them


def prompts_of(
    requests: Sequence[TracedRequest], block: int, shrink: int, vocab_size: int
) -> list[list[int]]:
    """Make the token ids of each request's prompt, its length divided by `shrink`, at least one."""
    size = max(1, block // shrink)
    known: dict[int, list[int]] = {}

    def drawn(seed: tuple[int, int], count: int) -> list[int]:
        ids: list[int] = np.random.default_rng(seed).integers(RESERVED, vocab_size, count).tolist()
        return ids

    prompts = []
    for number, request in enumerate(requests):
        length = max(1, request.input_length // shrink)
        ids: list[int] = []
        for name in request.blocks[: -(-length // size)]:
            if name not in known:
                known[name] = drawn((1, name), size)
            ids += known[name]
        prompts.append((ids + drawn((2, number), max(0, length - len(ids))))[:length])
    return prompts


def check_lengths(requests: Sequence[TracedRequest], shrink: int, max_model_len: int) -> None:
    """Raise InputError, with working alternatives, for a request that is longer than the context."""
    longest = max(requests, key=lambda each: each.input_length + each.output_length)
    number = requests.index(longest)
    need = max(1, longest.input_length // shrink) + max(1, longest.output_length // shrink)
    if need > max_model_len:
        whole = longest.input_length + longest.output_length
        raise InputError(
            f"{longest.said(number)} has {longest.input_length} + {longest.output_length} tokens, and the "
            f"pod's context {max_model_len}; try --shrink {-(-whole // max(1, max_model_len - 2))}"
        )


class Replayed(NamedTuple):
    """Outputs and outcomes of a trace's requests, in its order; and the TEs, each with its busy time [ns]."""

    outputs: list[RequestOutput]
    outcomes: list[Outcome]
    names: list[str]
    busy_ns: list[float]


class _TracedTEs:
    """Notes which TEs have had a sequence, and how long each TE was busy with steps."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.first: dict[int, int] = {}  # TEs by sequence
        self.last: dict[int, int] = {}
        self.busy_ns: list[float] = []
        self._until_ns: list[int] = []

    def number_of(self, te: str) -> int:
        """Return the number of a TE; a new one for a TE that has come since."""
        if te not in self.names:
            self.names.append(te)
            self.busy_ns.append(0.0)
            self._until_ns.append(0)
        return self.names.index(te)

    def see(self, event: Observed) -> None:
        """Take in an event. Steps of a TE come by their ends."""
        match event:
            case Assigned(seq_id=seq_id, te=te):
                self.last[seq_id] = self.number_of(te)
                self.first.setdefault(seq_id, self.number_of(te))
            case TEJoined(te=te):
                self.number_of(te)
            case Sent(seq_id=seq_id, te=te):
                self.last[seq_id] = self.number_of(te)
            case StepEnded(group=group, start_ns=start_ns, end_ns=end_ns) if group.te in self.names:
                number = self.number_of(group.te)
                self.busy_ns[number] += max(0, end_ns - max(start_ns, self._until_ns[number]))
                self._until_ns[number] = end_ns


def replayed(
    llm: LLM, requests: Sequence[TracedRequest], block: int, shrink: int = 1, keep_logits: bool = True
) -> Replayed:
    """Serve all requests on an engine."""
    check_lengths(requests, shrink, llm.engine.max_model_len)
    prompts = prompts_of(requests, block, shrink, llm.engine.plan.config.vocab_size)
    params = [
        SamplingParams(max_tokens=max(1, each.output_length // shrink), temperature=0.0, ignore_eos=True)
        for each in requests
    ]
    watch = _TracedTEs()
    for te in llm.engine.je.tes:
        watch.number_of(te.plan.name)
    llm.engine.observe(watch.see)
    begin = llm.virtual_ns
    arrivals = [each.at_ns for each in requests]
    outputs = llm.generate(prompts, params, keep_logits=keep_logits, arrivals_ns=arrivals)
    by_arrival = sorted(range(len(requests)), key=lambda number: arrivals[number])
    seq_of = dict(zip(by_arrival, sorted(watch.first), strict=True))
    outcomes = []
    for number, output in enumerate(outputs):
        metrics, seq_id = output.metrics, seq_of[number]
        assert metrics is not None
        assert metrics.ttft_ns is not None
        assert metrics.last_token_ns is not None
        outcomes.append(
            Outcome(
                watch.last[seq_id], metrics.arrival_ns - begin, metrics.ttft_ns, metrics.tpot_ns,
                metrics.last_token_ns - begin, len(prompts[number]), metrics.num_tokens,
                metrics.num_cached_tokens, watch.first[seq_id],
            )
        )  # fmt: skip
    return Replayed(outputs, outcomes, watch.names, watch.busy_ns)
