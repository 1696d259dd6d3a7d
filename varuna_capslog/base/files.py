"""Files of a run that survive a crash: whole files that appear at once or not at all, and line files that only grow.
Files may come from an untrusted source, so every reader has a size limit.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import hashlib
import itertools
import json
import logging
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from varuna_capslog.base.errors import CapslogError, DiskFailed
from varuna_capslog.base.units import format_bytes

__all__ = [
    "Tail",
    "append_jsonl",
    "cache_home",
    "digest_of",
    "expanded",
    "is_full",
    "last_lines",
    "no_link",
    "parse_json",
    "read_bytes",
    "read_json",
    "read_jsonl",
    "read_text",
    "refuse_link",
    "sync_folder",
    "whole_file",
    "write_failure",
    "write_json",
    "write_text",
]

_log = logging.getLogger(__name__)
_serial = itertools.count()
MOST_BYTES = 32 << 20
"""Most bytes of a file that is read whole. The largest files of runs are plans with actions: at 16 bytes per action,
two million actions fit. A JSON text of that size becomes at most 800 MiB of Python objects."""
MOST_LEVELS = 100
"""Most levels of nested objects and lists in a JSON text; files of this project have fewer than ten."""
_MOST_DIGITS = 308
"""Most digits of a whole number: no float can hold more."""
_MOST_LINE_BYTES, _MOST_LINES = 1 << 30, 10_000_000
"""Most bytes and lines of a line file: 300 epochs of COCO in minibatches of 16 are 2.2 million lines of 250 bytes."""
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def is_full(error: OSError) -> bool:
    """True where no process can write to the file system (full, over quota, read-only)."""
    return error.errno in _FULL


def cache_home() -> Path | None:
    """Return the user's folder for caches: $XDG_CACHE_HOME (ignored if relative, as the XDG specification says), else
    ~/.cache; None for a user without a home, as in containers.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return the path with the home folder for `~`. Raises CapslogError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise CapslogError(
            f"{path} names a home folder that is not known here; write the whole path, or set HOME"
        ) from error


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write: after the block, a reader finds the old file or the whole new one, also after a power cut.

    The new file is written beside `path` under another name, synced and renamed over `path`; then the folder is synced.
    After an error the old file is untouched. Raises OSError.
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
    """Sync a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` (UTF-8) as a `whole_file`, and make missing folders. Raises CapslogError naming the file (DiskFailed
    where the disk is full); the old file is then untouched.
    """
    target = Path(path)
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise CapslogError(
            f"{target} cannot be written: {text[error.start : error.start + 20]!a} is no text of UTF-8; name "
            "files and layers in UTF-8"
        ) from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as file:
            file.write(encoded)
    except OSError as error:
        raise write_failure(f"{target} cannot be written", error) from error


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON with `write_text`. Raises CapslogError for NaN and infinities."""
    write_text(path, _dumps(path, value, indent=1) + "\n")


def read_bytes(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> bytes:
    """Return the bytes of a regular file, or of a pipe under /dev, such as the user's `<(command)`. Other pipes are
    refused: in an untrusted folder they could block the reader. Raises CapslogError naming the file if unreadable or
    larger than `most_bytes`.
    """
    with _opened(path) as file:
        about = os.fstat(file.fileno())
        size = about.st_size if stat.S_ISREG(about.st_mode) else MOST_BYTES
        try:
            data = file.read(min(max(size, 1 << 16), most_bytes) + 1)
        except OSError as error:
            raise _unreadable(path, error) from error
    if len(data) > most_bytes:
        raise CapslogError(f"{path} holds more than {format_bytes(most_bytes)}, the most that is read; check the path")
    return data


def _opened(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading. Raises CapslogError where that fails, or for a pipe or a device outside /dev."""
    try:
        # opening a pipe that nobody writes to would wait for ever
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        if not os.fspath(path).startswith("/dev/"):
            file.close()
            raise CapslogError(f"{path} is a pipe or a device, and no file; give another path")
        os.set_blocking(file.fileno(), True)
    return file


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file. Raises OSError."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_text(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a UTF-8 file, read with `read_bytes`. Raises CapslogError naming the file."""
    try:
        text = read_bytes(path, most_bytes).decode()
    except UnicodeDecodeError as error:
        raise _unreadable(path, error) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the value in a JSON file, within the bounds of `read_bytes` and `parse_json`, with their errors."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str | bytes, where: str) -> Any:
    """Return the value of an untrusted JSON text; the value can be walked recursively and written again as JSON.

    Refuses more than MOST_BYTES characters, more than MOST_LEVELS nested objects and lists, numbers that no float can
    hold (NaN, Infinity, 1e400, whole numbers of 309 digits), halves of surrogate pairs, and bytes that are not UTF-8.
    Raises CapslogError that begins with `where`, and names the line where the text is not JSON.
    """
    try:
        if len(text) > MOST_BYTES:
            raise ValueError(f"it has more than {format_bytes(MOST_BYTES)}")
        text = text if isinstance(text, str) else text.decode()
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole)
        if _HALF_PAIR.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise CapslogError(
            f"{where} is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}; mend the file or "
            "remove it"
        ) from error
    except UnicodeEncodeError as error:
        raise CapslogError(f"{where} is not valid JSON: it holds half of a surrogate pair, which is no text") from error
    except UnicodeDecodeError as error:
        raise CapslogError(f"{where} is not valid JSON: it is not UTF-8 text") from error
    except RecursionError as error:
        raise _too_deep(where) from error
    except ValueError as error:
        raise CapslogError(f"{where} is not valid JSON: {error}") from error
    containers: list[Any] = [[value]]
    for _ in range(MOST_LEVELS + 1):
        containers = [
            inner
            for outer in containers
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not containers:
            return value
    raise _too_deep(where)


def _too_deep(where: str) -> CapslogError:
    return CapslogError(f"{where} is nested more than {MOST_LEVELS} deep, the most that is read; check the file")


def no_link(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file that a run writes or appends to; also an `opener` for `open`. Raises OSError for a pipe, and for a
    link, which in an untrusted folder may lead to any file of the user's.
    """
    name = os.path.basename(path)
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{name} is a link, through which no run writes", str(path)) from None
        raise
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ELOOP, f"{name} is a pipe, into which no run writes", str(path))
    return descriptor


def refuse_link(folder: Path) -> None:
    """Raise CapslogError where a folder that a run empties or writes into is a link."""
    if folder.is_symlink():
        raise CapslogError(f"{folder} is a link, and what it leads to may not be this run's; remove the link")


def append_jsonl(path: str | os.PathLike[str], record: dict[str, Any]) -> None:
    """Append a JSON object as a line, under the file's lock, so that lines of several processes do not mix.

    Not synced (a step must not wait for the disk): a killed process loses nothing, a power cut may lose the last lines.
    An incomplete last line from an earlier crash gets a line end first. Raises CapslogError naming the file (DiskFailed
    where the disk is full).
    """
    line = (_dumps(path, record, indent=None) + "\n").encode()
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        descriptor = no_link(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
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
    """Return the complete objects in a line file's last `size` bytes, oldest first. Raises CapslogError."""
    with _opened(path) as file:
        try:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return list(objects_in(file.read(size)))
        except OSError as error:
            raise _unreadable(path, error) from error


def objects_in(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the objects in a part of a line file, without incomplete lines."""
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            value = parse_json(line, "the line")
            if isinstance(value, dict):
                yield value


class Tail:
    """Reads the lines that are added to a line file from now on; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of the complete lines that were added since the last call."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._at)
                data = file.read()
        except OSError:
            return
        length = data.rfind(b"\n") + 1
        self._at += length
        yield from objects_in(data[:length])


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the objects of a line file, oldest first. Incomplete lines, and JSON that is no object, are skipped with a
    warning in the log. Raises CapslogError where the file cannot be read.
    """
    data = read_bytes(path, _MOST_LINE_BYTES)
    if data.count(b"\n") > _MOST_LINES:
        raise CapslogError(f"{path} has more than {_MOST_LINES} lines, the most that are read; check the file")
    lines = data.split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        # A line is one object, and no proper prefix of an object is JSON: a line that does not parse is incomplete.
        objects = list(objects_in(line))
        if not objects:
            _log.warning("%s: line %d is torn, or no object, and left out", path, number)
        records += objects
    return records


def write_failure(sentence: str, error: OSError) -> CapslogError:
    """Return the error for a failed write: DiskFailed if no process can write to the file system."""
    kind = DiskFailed if is_full(error) else CapslogError
    mends = {errno.EROFS: "make the file system writable", errno.ELOOP: "remove it"}
    mend = mends.get(error.errno or 0, "free space")
    return kind(f"{sentence}: {error.strerror or error}; {mend} or choose another path")


def _unreadable(path: str | os.PathLike[str], error: OSError | ValueError) -> CapslogError:
    reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None)
    return CapslogError(f"{path} cannot be read: {reason or error}; {_advice(path, error)}")


def _advice(path: str | os.PathLike[str], error: OSError | ValueError) -> str:
    """Return the advice for a path that cannot be read: an existing path of a similar name, else to check the path."""
    if isinstance(error, FileNotFoundError):
        missing = Path(path)
        with contextlib.suppress(OSError):
            while not missing.parent.exists():
                missing = missing.parent
            for near in difflib.get_close_matches(missing.name, os.listdir(missing.parent), cutoff=0.7):
                meant = missing.with_name(near) / Path(path).relative_to(missing)
                if meant.exists():
                    return f"did you mean {meant}?"
    return "check the path"


def _dumps(path: str | os.PathLike[str], value: Any, indent: int | None) -> str:
    try:
        return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise CapslogError(
            f"{path}: JSON cannot hold this value: {error}; write null for a number that is not finite"
        ) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits[:50]} is more than a number can be")
    return number


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"{digits[:20]}... has {len(digits)} digits, more than a number can have")
    return int(digits)
