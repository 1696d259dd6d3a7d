"""Standard output and errors to which writing never fails: a run is worth more than its lines.

The command and its workers write through these from their beginning; output of data sets goes there, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

__all__ = ["LastingStream", "lasting_output"]

_READER_GONE = (errno.EPIPE, errno.EIO)
"""The errors of a pipe without a reader (head, less), and of a terminal that was closed."""


class LastingStream:
    """A text stream that drops text without an error, from the first write on that fails.

    Args:
        stream: the stream below, which has all other attributes.
        lost: called with a sentence about the first error, unless the reader has merely gone away.

    Attributes:
        gone: whether there was an error.
    """

    def __init__(self, stream: TextIO, lost: Callable[[str], object] = lambda sentence: None) -> None:
        self._stream, self._lost = stream, lost
        self.gone = False

    def write(self, text: str) -> int:
        """Write like `TextIO.write`."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write like `TextIO.writelines`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush like `TextIO.flush`."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: OSError) -> None:
        """Redirect the stream to the null device, for its buffered text and for programs that are started later."""
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        first, self.gone = not self.gone, True
        if first and error.errno not in _READER_GONE:
            with contextlib.suppress(OSError):  # the receiver of the sentence may be gone as well
                self._lost(f"standard output cannot be written: {error.strerror}; what follows is not shown")


@contextlib.contextmanager
def lasting_output(lost: Callable[[str], object] = lambda sentence: None) -> Iterator[None]:
    """Make this process write to lasting streams in the block; `lost` is that of standard output."""
    before: Any = sys.stdout, sys.stderr  # None where the shell has closed them
    lasting: Any = before[0] and LastingStream(before[0], lost), before[1] and LastingStream(before[1])
    sys.stdout, sys.stderr = lasting
    try:
        yield
    finally:
        for stream in filter(None, lasting):
            stream.flush()
        sys.stdout, sys.stderr = before
