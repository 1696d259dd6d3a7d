"""One page on what a run did: tables and pictures made from the files of a run directory.

`capslog report` calls `write_report`. This room only reads what a run wrote, never imports torch or a workload, and
never changes anything outside `report/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from varuna_capslog.reports.sizes import Rehearsal

__all__ = ["write_report"]


def write_report(run_dir: Path, rehearse: Rehearsal | None = None) -> Path:
    """Writes `run_dir/report/`, index.html with its pictures beside it, and returns the page's path.

    If a file of the run is missing or unreadable, the section that needs it says so. An earlier report
    in the folder is replaced; other files there stay.

    Args:
        rehearse: predicts the peaks of a cut list for given input shapes (`rehearsal.rehearse_config`), for a run whose
            peaks were measured at other sizes than the plan's predictions hold for; None: these are not compared then.

    Raises:
        CapslogError: no such folder, nothing in it that a run writes, or the report cannot be written.
    """
    from varuna_capslog.reports.run import read_run

    run = read_run(Path(run_dir))
    # drawing is slow to import, and a folder that is no run needs none of it
    from varuna_capslog.reports.page import write_page

    return write_page(run, rehearse)
