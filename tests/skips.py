"""A pytest plugin: the tests that were skipped, one line per reason, at the end of every run.

On a machine without Varuna and without a GPU more than a hundred tests are skipped for a handful of reasons. Tests that
need outside data are named one by one, since a run without them has shown less than it seems.
"""

from __future__ import annotations

from collections.abc import Iterable

from _pytest.reports import BaseReport
from _pytest.terminal import TerminalReporter

__all__ = ["DATA_VARIABLE", "lines_by_reason"]

DATA_VARIABLE = "CAPSLOG_DATA"


def lines_by_reason(reports: Iterable[BaseReport]) -> list[str]:
    """Return a line per reason with its number of tests, largest first; names the tests that lack data.

    Args:
        reports: of skipped tests, and of modules that were skipped as a whole.
    """
    names: dict[str, list[str]] = {}
    for report in reports:
        where = report.longrepr
        reason = where[2] if isinstance(where, tuple) else str(where)
        names.setdefault(" ".join(reason.removeprefix("Skipped: ").split()), []).append(report.nodeid)
    rows = sorted(names.items(), key=lambda row: (-len(row[1]), row[0]))
    return [
        f"{len(tests):4}  {reason}" + (f": {', '.join(sorted(tests))}" if DATA_VARIABLE in reason else "")
        for reason, tests in rows
    ]


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Called by pytest at its end."""
    lines = lines_by_reason(terminalreporter.stats.get("skipped", ()))
    if lines:
        terminalreporter.section("skipped tests by reason", "-")
        for line in lines:
            terminalreporter.write_line(line)
