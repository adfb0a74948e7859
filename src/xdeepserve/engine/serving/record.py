"""Record of a request in virtual time, from which TTFT, TPOT and the like are computed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from xdeepserve.engine.dp.stats import summed


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Times (virtual ns) of the stages in a choice's life, and counts of its work.

    arrival_ns          submitted
    scheduled_ns        first took part in a step; None if it never did
    first_token_ns      handed out by the DP group; None if there was none
    last_token_ns
    num_tokens          generated
    num_steps           that generated tokens: with MTP a step may make several
    num_cached_tokens   of the prompt, found in the prefix cache when the request began; what is found after a
                        preemption does not count, nor what choices of a request share
    num_drafts          offered by MTP
    num_accepted        of these, accepted by the main model
    num_preemptions
    drafts_by_position    offered, by position in the step; the first is the number of steps with drafts
    accepted_by_position  of these, accepted; a draft counts only if all before it do
    """

    arrival_ns: int
    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    num_tokens: int = 0
    num_steps: int = 0
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    drafts_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()

    @classmethod
    def merged(cls, records: Sequence[RequestMetrics]) -> RequestMetrics:
        """Merge the records of a request's choices: first first token, last last token, sums of counts."""
        counts = [name for name in cls.__struct_fields__ if name.startswith("num_")]
        sums = {name: sum(getattr(r, name) for r in records) for name in counts}

        def known(name: str) -> list[int]:
            return [ns for r in records if (ns := getattr(r, name)) is not None]

        return cls(
            arrival_ns=min(r.arrival_ns for r in records),
            scheduled_ns=min(known("scheduled_ns"), default=None),
            first_token_ns=min(known("first_token_ns"), default=None),
            last_token_ns=max(known("last_token_ns"), default=None),
            drafts_by_position=summed([r.drafts_by_position for r in records]),
            accepted_by_position=summed([r.accepted_by_position for r in records]),
            **sums,
        )

    @property
    def queue_ns(self) -> int | None:
        """Time in the queue (ns): arrival to the first step."""
        return None if self.scheduled_ns is None else self.scheduled_ns - self.arrival_ns

    @property
    def ttft_ns(self) -> int | None:
        """Time to first token (ns): arrival to first token."""
        return None if self.first_token_ns is None else self.first_token_ns - self.arrival_ns

    @property
    def tpot_ns(self) -> float | None:
        """Time per output token (ns): (last token time - first token time) / (tokens - 1)."""
        if self.first_token_ns is None or self.last_token_ns is None or self.num_tokens < 2:
            return None
        return (self.last_token_ns - self.first_token_ns) / (self.num_tokens - 1)

    @property
    def e2e_ns(self) -> int | None:
        """End-to-end time (ns): arrival to last token."""
        return None if self.last_token_ns is None else self.last_token_ns - self.arrival_ns

    @property
    def tokens_per_step(self) -> float | None:
        """Mean number of tokens per step: 1 without MTP, 1 + p1 with one draft, 1 + p1 + p1 p2 with two. Here
        p1 and p2 are acceptance rates.

        The first step is left out, because it has no drafts; None if it was the only one.
        """
        return (self.num_tokens - 1) / (self.num_steps - 1) if self.num_steps > 1 else None
