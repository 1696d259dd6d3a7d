"""Notices by file: it appears, or changes, and says which hosts are to leave and when. For scripts and operators.

An empty file means "this host is to leave". Otherwise it is a JSON object with any of `kind` ("hint", "leave", "now"),
`seconds` (from when the file was written), `hosts`, `id` and `detail`; anything else is refused in the log.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from varuna_capslog.base import fields, files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.notices.interface import Clock, Deadline, Kind, Notice, PollingListener, Round, Unavailable

__all__ = ["FileListener"]

_log = logging.getLogger(__name__)

LARGEST_FILE = 1 << 16


class FileListener(PollingListener):
    """Reads `path` several times a second; a file that lies there at the start counts, too.

    Args:
        path: of the file. On a shared file system every host sees it: then it should name `hosts`.
        seconds: the budget where the file names none.
    """

    source: ClassVar[str] = "file"

    def __init__(
        self,
        path: str | os.PathLike[str],
        host: str = "",
        seconds: float = 30.0,
        interval: float = 0.2,
        clock: Clock = Clock(),  # noqa: B008
    ) -> None:
        super().__init__(host, interval=interval, clock=clock)
        self.path = Path(path)
        self.seconds = seconds
        self._seen: tuple[int, int, int] | None = None
        self._refused: tuple[int, int, int] | None = None

    def rounds(self) -> Sequence[Callable[[], Round]]:
        return (self.ask,)

    def ask(self) -> Round:
        """Reads the file once. A file that cannot be understood yet may be half written: it is read again."""
        try:
            status = os.stat(self.path)
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if version == self._seen:
                return Round((), self.interval)
        except FileNotFoundError:
            self._seen = None
            return Round((), self.interval)
        except OSError as error:
            raise Unavailable(str(error)) from error
        try:
            notice = self._notice(files.read_bytes(self.path, LARGEST_FILE), status.st_mtime, status.st_mtime_ns)
        except CapslogError as error:
            if version != self._refused:
                _log.warning("notice file %s is refused: %s", self.path, error)
            self._refused = version
            return Round((), self.interval)
        self._seen = version
        return Round((notice,), self.interval)

    def _notice(self, text: bytes, written: float, version: int) -> Notice:
        try:
            value = files.parse_json(text, "it") if text.strip() else {}
        except CapslogError as error:
            raise CapslogError(f"it holds no JSON: {text[:60]!r}") from error
        if not isinstance(value, dict):
            raise CapslogError("it must be empty or one JSON object of at most 64 KiB")
        fields.refuse_unknown(value, ["kind", "seconds", "hosts", "id", "detail"])
        names = {kind.name.lower(): kind for kind in Kind}
        kind = value.get("kind", "leave")
        if not isinstance(kind, str) or kind not in names:
            raise CapslogError(f"kind is {kind!r}; known: {', '.join(names)}")
        seconds = fields.seconds(value.get("seconds", self.seconds), "seconds")
        hosts = tuple(fields.text(host, "hosts") for host in fields.listed(value.get("hosts", [self.host]), "hosts"))
        # A file from the future (clocks of a shared file system) counts as written now.
        age = max(0.0, self.clock.wall() - written)
        deadline = Deadline(self.clock.monotonic() + max(0.0, seconds - age), f"{seconds:g} s from when it was written")
        name = fields.text(value.get("id", f"{self.path}@{version}"), "id")
        detail = fields.text(value.get("detail", self.path.name), "detail")
        return Notice(names[kind], self.source, name, hosts or (self.host,), deadline, detail=detail)
