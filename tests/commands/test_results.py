"""`capslog evaluate`: the table of scores."""

from __future__ import annotations

from varuna_capslog.commands.results import _scores_table


def test_a_score_of_a_size_that_no_object_has_is_a_dash_with_a_note() -> None:
    """`capslog evaluate` printed `AP_large None` for data without large objects: pycocotools' -1, no score of 0."""
    scores = {"AP": 0.5, "AP_large": None, "images": 12, "AP_small": 0.0, "per_class": {"cell": None}}
    table = _scores_table("scores of runs/a", scores)
    assert table.rows == [["AP", "0.5000"], ["AP_large", "-"], ["images", "12"], ["AP_small", "0.0000"]]
    (note,) = table.notes
    assert "no object of this size" in note
    assert not _scores_table("", {"AP": 0.5, "per_class": {"cell": None}}).notes
