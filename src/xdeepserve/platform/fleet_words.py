"""Records of a fleet: TEs, requests served, and decisions."""

from __future__ import annotations

from typing import Literal, NamedTuple

from xdeepserve.engine.balance.te_policies import Floats
from xdeepserve.platform.service_report import Outcome
from xdeepserve.platform.step_te import StepLimits
from xdeepserve.prices.step_price import StepPrice

TERole = Literal["both", "prefill", "decode"]


class KVTransfer(NamedTuple):
    """Times [ns] of a prompt's KV on its way from where it was computed to where it is decoded.

    ask_ns    messages of both sides, from when decode has room until bytes may move
    start_ns  startup of the engine of a decode group, which moves one prompt after the other
    block_ns  a KV block: its pieces, which the engine issues
    port_ns   its bytes, at the port of the die that it comes from: for one prompt after the other, too
    tell_ns   the message by which prefill hears that its blocks are free
    """

    ask_ns: float = 0.0
    start_ns: float = 0.0
    block_ns: float = 0.0
    port_ns: float = 0.0
    tell_ns: float = 0.0


class FleetTE(NamedTuple):
    """A TE of a fleet.

    Prefill and decode may share its dies, or have a half each (`apart`); or the TE does one of them, beside
    TEs with the other (`role`).
    """

    name: str
    price: StepPrice
    limits: StepLimits
    apart: tuple[StepPrice, StepLimits] | None = None  # of its decode half
    transfer: KVTransfer = KVTransfer()
    role: TERole = "both"

    @property
    def is_apart(self) -> bool:
        """Whether requests are prefilled on some dies and decoded on others."""
        return self.apart is not None or self.role != "both"


class ServedRequest(NamedTuple):
    """A request served, with times in ns of virtual time. `te` made its last token, `first_te` its first."""

    number: int
    te: int
    at_ns: int
    first_ns: float
    last_ns: float
    num_prompt: int
    num_output: int
    num_cached: int
    first_te: int
    begun_ns: float  # when the prompt first took part in a step

    @property
    def ttft_ns(self) -> float:
        return self.first_ns - self.at_ns

    @property
    def tpot_ns(self) -> float | None:
        """Time per output token [ns]; None for an answer of one token."""
        return (self.last_ns - self.first_ns) / (self.num_output - 1) if self.num_output > 1 else None

    def outcome(self) -> Outcome:
        """Return the request's outcome for a report."""
        return Outcome(
            self.te, self.at_ns, self.ttft_ns, self.tpot_ns, self.last_ns,
            self.num_prompt, self.num_output, self.num_cached, self.first_te,
        )  # fmt: skip


class Decision(NamedTuple):
    """A routing decision: the request, its TE, and the scores of all TEs; infinite for TEs that take none."""

    number: int
    te: int
    keys: Floats
    num_predicted: float
