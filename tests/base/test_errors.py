"""Findings of a run that has not begun: all are reported, and a run ends with the first that stops it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from varuna_capslog.base.errors import CapslogError, DoesNotFit, RunFinding, findings_of, settle


def wrong() -> Iterator[RunFinding]:
    yield RunFinding("two files are alike")
    raise CapslogError("a.png is missing; put it there")


def large() -> Iterator[RunFinding]:
    yield RunFinding("two files are alike")
    yield RunFinding("3 pictures", "fact")
    raise DoesNotFit("rank 0 needs 2 GiB of 1 GiB; add devices")


def test_a_check_that_ends_with_an_error_ends_alone_and_no_sentence_comes_twice() -> None:
    findings = list(findings_of(wrong, large, wrong))
    assert [(finding.kind, finding.text.partition(" ")[0]) for finding in findings] == [
        ("note", "two"),
        ("stops", "a.png"),
        ("fact", "3"),
        ("does_not_fit", "rank"),
    ]


def test_a_run_ends_with_the_first_error_and_hears_how_many_more_there_are() -> None:
    assert settle([RunFinding("12 pictures", "fact"), RunFinding("two files are alike")]) == ["two files are alike"]
    with pytest.raises(DoesNotFit, match=r"add devices$"):
        settle(findings_of(large))
    with pytest.raises(CapslogError, match=r"put it there \(and 1 more: capslog check lists all\)$"):
        settle(findings_of(wrong, large))
