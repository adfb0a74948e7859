"""What faults permit, from the plan alone: not from what then happened."""

from __future__ import annotations

import re
from collections.abc import Sequence

from xdeepserve.engine.job.roster import can_serve
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.hw.error_codes import ERROR_CODES
from xdeepserve.hw.faults import Fault

# What an error must tell: who is lost, or who waits for whom.
NAMED = re.compile(
    r"die \d+ .*is lost|waits for peer|no .* (can be reached|is left)|heartbeat|silent|die \d+ reports"
)


def _is_lasting(fault: Fault) -> bool:
    """Whether a glitch has a code after which running again is not tried."""
    return fault.code is not None and not ERROR_CODES[fault.code].is_transient


def permits_errors(faults: Sequence[Fault], tes: Sequence[TEPlan]) -> bool:
    """Whether requests may end with an error: those TEs that lose no die could not serve between them.

    A stall is no reason: it is shorter than any deadline. Neither is a glitch after which a TE runs its steps
    again; others cost it all of its dies.
    """
    lost = {fault.die for fault in faults if fault.kind == "lost" or _is_lasting(fault)}
    return not can_serve(te for te in tes if lost.isdisjoint(te.every_die))
