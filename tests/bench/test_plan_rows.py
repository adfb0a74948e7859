"""`bench plan` beside what MegaScale-Infer publishes."""

from pathlib import Path

import pytest

from xdeepserve.bench.papers import plan
from xdeepserve.bench.report import Row
from xdeepserve.errors import InputError


def test_tables_and_identities_are_exact() -> None:
    rows = [*plan.table_3(), *plan.identities()]
    assert len(rows) == 18
    for row in rows:
        assert row.error_pct is not None, row.name
        assert abs(row.error_pct) < 0.5, row.name  # Table 3 has three digits


def test_ratios_of_microbatches_are_within_four_percent() -> None:
    for row in plan.microbatches():
        assert row.error_pct is not None
        assert abs(row.error_pct) <= plan.RATIO_BOUND
        assert "NOT KEPT" not in row.note


def test_an_error_that_rounds_to_zero_has_no_minus() -> None:
    row = Row("plan/x/T_iter", 1.0, "ms", "predicted")
    assert plan.bounded(row, -0.04, 5).note == "+0.0 %; bound of 5 %: kept"


def test_dbrx_peaks_at_eight_attention_nodes() -> None:
    two, three = plan.dbrx()
    assert round(two.value) == 8
    assert two.published is not None
    assert three.value < two.value


def test_a_deployment_is_predicted_and_run() -> None:
    row = plan.of_deployment("tiny", "colocated", 100)
    assert "bound of 5 %: kept" in row.note


@pytest.mark.parametrize(("length", "blocks"), [(736, 46), (736, 92), (100, 7)])
def test_a_file_is_run_with_the_requests_that_it_has_room_for(
    tmp_path: Path, length: int, blocks: int
) -> None:
    """By default two tokens before the greatest length, which a whole number of blocks holds, too."""
    file = tmp_path / "plan.toml"
    file.write_text(
        f'kind = "colocated"\nmax_model_len = {length}\ndies = 4\n[cache]\nnum_blocks = {blocks}\n'
    )
    row = plan.of_deployment("tiny", str(file), None)
    assert "bound of 5 %: kept" in row.note
    with pytest.raises(InputError, match=f"decode after 1 to {length - 2} positions; try {length - 2}"):
        plan.of_deployment("tiny", str(file), length)
