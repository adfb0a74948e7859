"""Decode steps of growing pods."""

import pytest

from xdeepserve.bench.wall import superpod_steps


@pytest.mark.campaign
def test_a_small_pod_is_measured_and_checked_without_replicas_and_with() -> None:
    rows = {row.name: row.value for row in superpod_steps.all_rows([(2, 4, 1)])}
    names = {"load", "step", "peak_memory", "virtual_step"}
    eplb = {f"eplb/{name}" for name in (*names, "reconfiguration", "over_without")}
    assert set(rows) == {f"steps/dies=11/{name}" for name in names | eplb}
    assert all(value > 0 for name, value in rows.items() if not name.endswith("reconfiguration"))
    step, balanced = rows["steps/dies=11/step"], rows["steps/dies=11/eplb/step"]
    assert rows["steps/dies=11/eplb/over_without"] == balanced / step
