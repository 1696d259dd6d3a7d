"""One page on what a run did: tables and pictures made from the files of a run directory.

`capslog report` calls `write_report`. This room only reads what a run wrote, never imports torch or a workload, and
never changes anything outside `report/`.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_report"]


def write_report(run_dir: Path) -> Path:
    """Writes `run_dir/report/`, index.html with its pictures beside it, and returns the page's path.

    If a file of the run is missing or unreadable, the section that needs it says so. An earlier report
    in the folder is replaced; other files there stay.

    Raises:
        CapslogError: no such folder, nothing in it that a run writes, or the report cannot be written.
    """
    from varuna_capslog.reports.run import read_run

    run = read_run(Path(run_dir))
    # drawing is slow to import, and a folder that is no run needs none of it
    from varuna_capslog.reports.page import write_page

    return write_page(run)
