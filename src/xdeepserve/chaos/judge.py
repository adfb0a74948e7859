"""Verdicts on schedules: the judge compares bits, errors and leftovers with the permitted ones."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Literal

import msgspec

from xdeepserve.chaos.aftermath import Aftermath, endure
from xdeepserve.chaos.fault_schedule import Asked, FaultSchedule, asked
from xdeepserve.chaos.permitted import NAMED
from xdeepserve.errors import InputError, XDeepServeError
from xdeepserve.llm import LLM, digest
from xdeepserve.model.checkpoint import Checkpoint, KeptCheckpoint

Verdict = Literal["equal", "named error", "hang", "lost request", "leak", "wrong"]
BUGS: tuple[Verdict, ...] = ("hang", "lost request", "leak", "wrong")


class Finding(msgspec.Struct, frozen=True):
    """Verdict on a schedule with its reason, the TEs given up while others went on, and counts of recovery
    stages."""

    verdict: Verdict
    why: str = ""
    lost: tuple[str, ...] = ()
    stages: Counter[str] = Counter()

    @property
    def is_bug(self) -> bool:
        return self.verdict in BUGS


class Judge:
    """Judge of schedules; knows every request's bits on a single die without faults."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = KeptCheckpoint(checkpoint)
        self._reference = LLM(checkpoint, "monolithic", "int8", overrides=["max_model_len=64"])
        self._known: dict[tuple[str, str], str] = {}

    def __enter__(self) -> Judge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._reference.close()

    def judge(self, schedule: FaultSchedule, twice: bool = False) -> Finding:
        """Run a schedule and judge it. With `twice` it is run again, and must give the same events at the
        same times.

        Raises InputError if there can be no such pod, or no such faults on it.
        """
        try:
            after = endure(schedule, self.checkpoint)
        except InputError:
            raise
        except Exception as error:  # whatever it is: an engine does not raise while it is built and stopped
            return Finding("wrong", f"{type(error).__name__}: {error}")
        finding = self._finding(schedule, after)
        if after.again is not None and not finding.is_bug:
            finding = self._pool_finding(schedule, after, after.again) or finding
        if twice and not finding.is_bug and endure(schedule, self.checkpoint).log != after.log:
            return Finding("wrong", "the same seed gave other events")
        return finding

    def _finding(self, schedule: FaultSchedule, after: Aftermath) -> Finding:
        lost, errors = tuple(after.lost), []
        for number, (what, end) in enumerate(zip(asked(schedule), after.ends, strict=True)):
            if end is None:
                last = after.log[-1] if after.log else "nothing has happened"
                return Finding("hang", f"request {number} has no end; {last}", lost)
            if isinstance(end, XDeepServeError):
                errors.append(str(end))
                if not after.permits_errors:
                    return Finding("lost request", f"request {number}, which others could serve: {end}", lost)
                if not NAMED.search(str(end)):
                    return Finding("lost request", f"request {number}: whom does it name? {end}", lost)
            elif digest([end]) != self.expected(what):
                return Finding("wrong", f"request {number} has other bits", lost)
        if after.leaks:
            return Finding("leak", "; ".join(after.leaks), lost)
        if errors:
            return Finding("named error", errors[0], lost, after.stages)
        return Finding("equal", "", lost, after.stages)

    def _pool_finding(self, schedule: FaultSchedule, after: Aftermath, again: Aftermath) -> Finding | None:
        """Judge the memory pool left behind by a schedule; None if it is sound."""
        if after.pool_damage:
            return Finding("wrong", f"the memory pool is damaged: {after.pool_damage}")
        later = self._finding(schedule, again)
        if later.verdict == "equal":
            return None
        return Finding(later.verdict, f"with the pool that is left: {later.why}")

    def expected(self, what: Asked) -> str:
        """Return the digest of a request's output without faults."""
        key = str(what.prompt), str(what.params)
        if key not in self._known:
            outputs = self._reference.generate([what.prompt], what.params, keep_logits=True)
            self._known[key] = digest(outputs)
        return self._known[key]
