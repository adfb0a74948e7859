"""`bench plan` beside what MegaScale-Infer publishes."""

from xdeepserve.bench import plan


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


def test_dbrx_peaks_at_eight_attention_nodes() -> None:
    two, three = plan.dbrx()
    assert round(two.value) == 8
    assert two.published is not None
    assert three.value < two.value


def test_a_deployment_is_predicted_and_run() -> None:
    (row,) = plan.of_deployment("tiny", "colocated", 100)
    assert "bound of 5 %: kept" in row.note
