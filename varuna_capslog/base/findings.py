"""What is known of a run before its workers start: what would stop it, and what its user should know.

Workloads and `start/readiness` make findings. `capslog check` prints all of them; `capslog train` ends with the first
that stops it, and shows the notes with its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from varuna_capslog.base.errors import CapslogError, DoesNotFit

__all__ = ["RunFinding", "findings_of", "settle"]


@dataclass(frozen=True)
class RunFinding:
    """One sentence about a run that has not begun.

    Attributes:
        kind: fact: what was looked at; note: the run goes on, and its user should know this; stops: it would stop
            there, or learn wrong things; does_not_fit: no plan keeps it within its memory, or its disk.
        part: of the run, such as "data"; "" where whoever asked knows it.
        error: what the run itself ends with.
    """

    text: str
    kind: Literal["fact", "note", "stops", "does_not_fit"] = "note"
    part: str = ""
    error: CapslogError | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of_error(cls, error: CapslogError) -> RunFinding:
        """What a run would end with."""
        return cls(str(error), "does_not_fit" if isinstance(error, DoesNotFit) else "stops", error=error)


def findings_of(*checks: Callable[[], Iterable[RunFinding] | None]) -> Iterator[RunFinding]:
    """What several checks find (None: nothing), each sentence once; one that ends with a CapslogError ends alone."""
    told: set[str] = set()
    for check in checks:
        for finding in _until_error(check):
            if finding.text not in told:
                told.add(finding.text)
                yield finding


def _until_error(check: Callable[[], Iterable[RunFinding] | None]) -> Iterator[RunFinding]:
    try:
        yield from check() or ()
    except CapslogError as error:
        yield RunFinding.of_error(error)


def settle(findings: Iterable[RunFinding]) -> list[str]:
    """The notes, a line each. Raises the CapslogError of the first finding that stops the run; it counts the others."""
    known = list(findings)
    errors = [one.error or CapslogError(one.text) for one in known if one.kind in ("stops", "does_not_fit")]
    if len(errors) > 1:
        raise CapslogError(f"{errors[0]} (and {len(errors) - 1} more: capslog check lists all)") from errors[0]
    if errors:
        raise errors[0]
    return [one.text for one in known if one.kind == "note"]
