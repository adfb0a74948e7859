"""Describe a way to serve the prompts of the matrix, with the settings that many cases share."""

from __future__ import annotations

from typing import Literal

import msgspec

from xdeepserve.engine.deploy.deployment import Kind
from xdeepserve.engine.deploy.roles import sections
from xdeepserve.history import History, TEChange
from xdeepserve.hw.faults import Fault
from xdeepserve.model.config import ModelConfig

NUM_COMPANIONS = 20
Subject = Literal["plain", "structured", "int8-combine"]  # a matrix for each, with digests of its own
LATE = "execution.pin_cores=false"  # launches are late at random


class Case(msgspec.Struct, frozen=True):
    """A row of the matrix: a deployment, its settings, its load, and the events that must happen on the
    way."""

    deployment: str
    variant: str
    overrides: tuple[str, ...] = ()
    alone: bool = False  # one prompt after the other
    crowded: bool = False  # among NUM_COMPANIONS others
    repeated: bool = False  # a second time, when the first has filled the prefix cache
    life: tuple[TEChange, ...] = ()  # TEs that come and go meanwhile
    reconfigurations: int = 0  # times, at least, that replicas of experts change meanwhile
    faults: tuple[Fault, ...] = ()  # a die that is lost costs its TE, and nothing else does
    servers_lost: int = 0  # of these dies, expert servers, whose TEs go on
    clients_lost: int = 0  # clients of expert servers likewise
    servers_back: int = 0  # of these, those in whose place another one has come
    rollbacks: int = 0  # times, at least, that steps are run again meanwhile
    pool: History | Literal["own"] | None = None  # a memory pool, filled by this, or by the case itself
    evicts: bool = False  # that has no room for more
    beside: str | None = None  # the deployment of a second model that serves on the same pod
    arrivals: int | None = None  # seed of random arrival times, else all come at once
    form: bool = False  # answers are JSON of a schema; needs a tokenizer
    clock_seed: int | None = None

    @property
    def num_lost(self) -> int:
        """Number of dies lost by the case's faults."""
        return sum(fault.kind == "lost" for fault in self.faults)

    @property
    def subject(self) -> Subject:
        """Name of the row's matrix.

        JSON answers have a matrix of their own, and so has the INT8 combine, whose arithmetic gives other
        bits.
        """
        if self.form:
            return "structured"
        return "int8-combine" if "combine=int8" in self.overrides else "plain"


def few_blocks(config: ModelConfig) -> tuple[str, ...]:
    """Settings with so few KV blocks that sequences are preempted."""
    length = min(config.max_position_embeddings, 256)
    return f"max_model_len={length}", f"cache.num_blocks={-(-length // 16)}"


def few_tes(kind: Kind, dies: int) -> tuple[str, ...]:
    """Settings of `prefill_and_decode` for a kind of deployment that has both sections, else none."""
    return prefill_and_decode(dies) if {"prefill", "decode"} <= sections(kind) else ()


def prefill_and_decode(dies: int) -> tuple[str, str]:
    """Settings of `pd`: prefill on one die, decode on two dies if the model has experts for two."""
    return "prefill.dies=1", f"decode.dies={min(2, dies)}"
