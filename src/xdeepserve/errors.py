"""Every error this package raises on purpose.

XDeepServeError
├── InputError              the caller's fault; the command line exits 2, the endpoint answers 4xx
│   ├── CheckpointError     a model directory that cannot be loaded
│   ├── DeploymentError     a deployment that cannot be built
│   └── RequestError        a request that cannot be served (names the offending parameter)
│       └── OverloadedError too many requests wait already; the same request may be served later
├── TransferError           a request whose KV cannot be brought from prefill to decode
├── HardwareError           a program used the virtual hardware wrongly
│   ├── LostDieError        an access to a die that has failed
│   ├── LinkError           an access by a link that is down
│   ├── GlitchError         a kernel or transfer of a die has ended with an error code
│   │   └── DriverReport    something on a die must be put right before its work runs again
│   │       └── PageLostError   a page of the die's memory has lost what it held
│   ├── AddressError        out of bounds, misaligned or overlapping
│   └── OutOfMemoryError    an area of a die's memory is full
└── ProtocolError           dies disagreed
    ├── IntegrityError      bytes that are not those that were sent
    ├── FieldError          a field in a die's memory says what cannot be
    ├── DeadlineError       a wait ended at its deadline in virtual time
    └── DeadlockError       a wait that nothing can ever end
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any


def meant(name: object, known: Iterable[str]) -> str:
    """Return a hint to add to the refusal of an unknown name: the most similar known name, if any."""
    names = {each.lower(): each for each in known}
    nearest = get_close_matches(str(name)[:100].lower(), names, n=1)
    return f" (did you mean {names[nearest[0]]}?)" if nearest else ""


class XDeepServeError(Exception):
    """Base of all errors below.

    `outputs`, if `LLM.generate` raises it, holds what there is of every prompt: of those that were completed
    all, of the others what was generated before the error.
    """

    outputs: Sequence[Any] = ()


def as_named(error: Exception, where: str = "") -> XDeepServeError:
    """Return an error of this project: `error` itself, or one that names it.

    `where` begins the message of the latter, which has the original as its cause.
    """
    if isinstance(error, XDeepServeError):
        return error
    named = XDeepServeError(f"{where}{error!r}")
    named.__cause__ = error
    return named


class InputError(XDeepServeError):
    """Impossible request of a caller, told in one clear line."""


class CheckpointError(InputError):
    """Model directory that cannot be loaded."""


class DeploymentError(InputError):
    """Deployment that cannot be built."""


class RequestError(InputError):
    """Request that cannot be served. `param` names the offending parameter, as OpenAI's errors do."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class OverloadedError(RequestError):
    """Too many requests wait already; the same request may be served later."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="engine_overloaded")


class TransferError(XDeepServeError):
    """A request whose KV cannot be brought from prefill to any decode TE. Others are served."""


class HardwareError(XDeepServeError):
    """Wrong use of the virtual hardware."""


class LostDieError(HardwareError):
    """Access to the memory of a failed die."""


class LinkError(HardwareError):
    """Access by a link that is down."""


class GlitchError(HardwareError):
    """A kernel or transfer of a die has ended with an error code; the die's memory has stayed."""

    def __init__(self, die: int, code: str, meaning: str) -> None:
        super().__init__(f"die {die} reports {code}: {meaning}")
        self.die, self.code = die, code


class DriverReport(GlitchError):
    """A die's driver reports, also while the die rests, what must be put right before its work runs again."""


class PageLostError(DriverReport):
    """A page of a die's memory has lost what it held: `nbytes` from `offset` on. It can be used again."""

    def __init__(self, die: int, code: str, meaning: str, offset: int, nbytes: int) -> None:
        super().__init__(die, code, f"{meaning}, bytes {offset} to {offset + nbytes}")
        self.offset, self.nbytes = offset, nbytes

    @property
    def stop(self) -> int:
        """Offset of the first byte behind the page."""
        return self.offset + self.nbytes


class AddressError(HardwareError):
    """Out of bounds, misaligned or overlapping memory access."""


class OutOfMemoryError(HardwareError):
    """An area of a die's memory is full."""


class ProtocolError(XDeepServeError):
    """Disagreement of dies about the next transition of a protocol."""


class IntegrityError(ProtocolError):
    """Bytes that have arrived differ from the bytes that were sent."""


class FieldError(ProtocolError):
    """Impossible value in a field of a die's memory, which `peer` should have written and `rank` reads."""

    def __init__(
        self, message: str, *, op: str, rank: object, peer: object, field: str, expected: object, seen: object
    ) -> None:
        super().__init__(message)
        self.op, self.rank, self.peer = op, rank, peer
        self.field, self.expected, self.seen = field, expected, seen


class WaitError(ProtocolError):
    """Failed wait: names the waiting rank, the peer, the field, and the expected and the seen values."""

    kind = "wait failed"

    def __init__(
        self, *, op: str, rank: object, peer: object, field: str, expected: object, seen: object, at_ns: int
    ) -> None:
        super().__init__(
            f"{op}: {self.kind} at {at_ns} ns: rank {rank} waits for peer {peer}, "
            f"field {field}: expected {expected}, seen {seen}"
        )
        self.op, self.rank, self.peer = op, rank, peer
        self.field, self.expected, self.seen, self.at_ns = field, expected, seen, at_ns


class DeadlineError(WaitError):
    """Wait that ended at its deadline in virtual time; for a process, after `real_s` seconds of real time."""

    kind = "deadline passed"

    def __init__(self, *, real_s: float | None = None, **wait: Any) -> None:
        super().__init__(**wait)
        if real_s is not None:
            self.args = (f"{self}, after {real_s:.1f} s of this computer's time",)


class DeadlockError(WaitError):
    """Wait that nothing in the pod can end."""

    kind = "deadlock"


def abridged(value: object, limit: int = 40) -> str:
    """Abridge a value for a message: JSON, as clients write it, not much longer than `limit` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # no JSON, or an integer of some thousand digits
        text = _shown(value)
    text = text.encode("utf-8", "backslashreplace").decode()  # half of a surrogate pair is no UTF-8
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _shown(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):
        return "what has too many digits or levels"
