"""Decode steps of growing pods."""

from xdeepserve.bench import superpod_steps


def test_a_small_pod_is_measured_and_checked() -> None:
    rows = {
        name: value for name, value, _ in superpod_steps.measure((2, 4, 1), superpod_steps.expected_logits())
    }
    assert set(rows) == {"load", "step", "peak_memory", "virtual_step"}
    assert all(value > 0 for value in rows.values())
