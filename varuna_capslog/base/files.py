"""Files that survive a crash: whole files that appear at once or not at all, and line files that only grow.

Everything a run writes (profiles, plans, checkpoints' indexes, metrics, events) goes through here. Never rewrites a
line file and never leaves a half-written file under its final name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from varuna_capslog.base.errors import CapslogError, DiskFailed

__all__ = [
    "append_jsonl",
    "cache_home",
    "expanded",
    "is_full",
    "last_lines",
    "objects_in",
    "read_json",
    "read_jsonl",
    "read_text",
    "sync_folder",
    "whole_file",
    "write_failure",
    "write_json",
    "write_text",
]

_log = logging.getLogger(__name__)
_serial = itertools.count()
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def is_full(error: OSError) -> bool:
    """Whether the error means that no process can write to the file system (full, over quota, read-only)."""
    return error.errno in _FULL


def cache_home() -> Path | None:
    """The user's folder for caches: $XDG_CACHE_HOME, else ~/.cache; None for a user without a home, as in containers.

    The XDG specification says that a relative value is to be ignored.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with the home folder for `~`. Raises CapslogError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise CapslogError(
            f"{path} names a home folder that is not known here; write the whole path, or set HOME"
        ) from error


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write: when the block ends, a reader finds the old file or the whole new one, also after a power cut.

    It lies beside `path` under another name, is synced, renamed over `path`, and the folder is synced. After an error
    the old file is untouched. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_serial)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    # Without this the rename itself may be lost in a power cut.
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Puts a folder's entries on the disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` (UTF-8) as a `whole_file`; folders on the way are made.

    Raises CapslogError naming the file (DiskFailed where the disk is full); the old file is then untouched.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as file:
            file.write(text.encode())
    except OSError as error:
        raise write_failure(f"{target} cannot be written", error) from error


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON with `write_text`. Raises CapslogError for NaN and infinities."""
    write_text(path, _dumps(path, value, indent=1) + "\n")


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a UTF-8 file. Raises CapslogError naming the file where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the value in a JSON file. Raises CapslogError naming the file, and the line where the text is not JSON."""
    text = read_text(path)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise CapslogError(
            f"{path} is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}; mend the file or "
            "remove it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CapslogError(f"{path} is not valid JSON: {error}") from error


def append_jsonl(path: str | os.PathLike[str], record: dict[str, Any]) -> None:
    """Append one JSON object as one line, under the file's lock, so that lines of several processes do not mix.

    Not synced (a step must not wait for the disk): a killed process loses nothing, a power cut may lose the last lines.
    A torn last line that an earlier crash left is closed first. Raises CapslogError naming the file (DiskFailed
    where the disk is full).
    """
    line = (_dumps(path, record, indent=None) + "\n").encode()
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            # Another process may be writing its line at this moment; it must not be treated as an incomplete line.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            while line:
                line = line[os.write(descriptor, line) :]
        finally:
            os.close(descriptor)
    except OSError as error:
        raise write_failure(f"{path} cannot be appended to", error) from error


def last_lines(path: str | os.PathLike[str], size: int = 1 << 16) -> list[dict[str, Any]]:
    """Return the objects in the last `size` bytes of a line file, oldest first; incomplete lines are left out.

    Raises CapslogError where the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return list(objects_in(file.read()))
    except OSError as error:
        raise _unreadable(path, error) from error


def objects_in(data: bytes) -> Iterator[dict[str, Any]]:
    """The objects in a part of a line file; incomplete lines are left out."""
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            value = _value_of(line)
            if isinstance(value, dict):
                yield value


def _value_of(line: bytes) -> Any:
    """The value that a line holds. Raises ValueError where it is damaged: no JSON, or text that cannot be written."""
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
        if b"\\ud" in line.lower():  # half of a surrogate pair is no text
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError(str(error)) from error
    return value


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the objects of a line file, oldest first; lines that a crash tore are left out with a warning in the log.

    Raises CapslogError where the file cannot be read or a whole line is JSON but not an object.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise _unreadable(path, error) from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = _value_of(line)
        except ValueError:
            # A line is one object, and no proper beginning of an object is JSON: what does not parse was torn.
            _log.warning("%s: line %d is torn and left out", path, number)
            continue
        if not isinstance(record, dict):
            raise CapslogError(f"{path}: line {number} is not a JSON object; this is not a file of this library")
        records.append(record)
    return records


def write_failure(what: str, error: OSError) -> CapslogError:
    """The error for a failed write: DiskFailed if no process can write to the file system."""
    kind = DiskFailed if is_full(error) else CapslogError
    mend = "make the file system writable" if error.errno == errno.EROFS else "free space"
    return kind(f"{what}: {error.strerror or error}; {mend} or choose another path")


def _unreadable(path: str | os.PathLike[str], error: OSError | UnicodeDecodeError) -> CapslogError:
    reason = error.strerror or error if isinstance(error, OSError) else "it is not UTF-8 text"
    return CapslogError(f"{path} cannot be read: {reason}; check the path")


def _dumps(path: str | os.PathLike[str], value: Any, indent: int | None) -> str:
    try:
        return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)
    except ValueError as error:
        raise CapslogError(
            f"{path}: JSON cannot hold this value: {error}; write null for a number that is not finite"
        ) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
