"""Secret of a run, known only to its processes: read from an environment variable, or from a file that the run's first
host makes.

Keys derived from the secret protect all sockets of the run and its entries in etcd. The secret never appears in a log,
a config, a command line, an error or an order to another process.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from varuna_capslog.base.errors import CapslogError

__all__ = ["FILE_VARIABLE", "VARIABLE", "Secret", "SecretMissing", "run_secret"]

VARIABLE = "CAPSLOG_SECRET"
"""Environment variable with the secret itself."""

FILE_VARIABLE = "CAPSLOG_SECRET_FILE"
"""Environment variable with the path of the secret's file; default: `secret` in the run's folder."""

_LEAST = 32
_MOST = 4096


class SecretMissing(CapslogError):
    """The file of the run's secret is not there yet."""


class Secret:
    """Secret that cannot be printed or pickled by mistake. Raises CapslogError unless it has 32 to 4096 characters."""

    __slots__ = ("_bytes",)

    def __init__(self, text: str, where: str = "the secret") -> None:
        encoded = text.strip().encode()
        if not _LEAST <= len(encoded) <= _MOST:
            raise CapslogError(
                f"{where} has {len(encoded)} characters; a secret has {_LEAST} to {_MOST}: use `openssl rand -hex 32`"
            )
        self._bytes = encoded

    @classmethod
    def new(cls) -> Secret:
        """Return a random secret of 256 bits."""
        return cls(secrets.token_hex(32))

    def key(self, purpose: str) -> bytes:
        """Return 32 bytes for one purpose; a key reveals neither the secret nor the keys of other purposes."""
        return hmac.digest(self._bytes, purpose.encode(), "sha256")

    def hand_over(self) -> bytes:
        """Return the secret itself, for the standard input of a process that this process starts."""
        return self._bytes

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled")


def run_secret(run_dir: Path | str, create: bool = False, environment: Mapping[str, str] = os.environ) -> Secret:
    """Return the secret of the run in a folder: the value of `VARIABLE`, else the file.

    Args:
        create: make the file where there is none; for the host that begins the run.

    Raises:
        SecretMissing: the file does not exist or is empty (still being written).
        CapslogError: other users may access the file, it cannot be read or made, or the secret has a wrong length.
    """
    if VARIABLE in environment:
        return Secret(environment[VARIABLE], f"the variable {VARIABLE}")
    path = Path(environment.get(FILE_VARIABLE) or Path(run_dir) / "secret")
    if create:
        _create(path)
    return _read(path)


def _create(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(file, secrets.token_hex(32).encode() + b"\n")
                os.fsync(file)
            finally:
                os.close(file)
    except OSError as error:
        raise CapslogError(
            f"the run's secret cannot be written to {path}: {error.strerror}; name another file in {FILE_VARIABLE}"
        ) from error


def _read(path: Path) -> Secret:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # no wait for a pipe: it reads as empty
        try:
            mode = stat.S_IMODE(os.fstat(file).st_mode)
            text = os.read(file, _MOST + 2).decode("utf-8", "replace")
        finally:
            os.close(file)
    except FileNotFoundError:
        text, mode = "", 0
    except OSError as error:
        raise CapslogError(f"the run's secret in {path} cannot be read: {error.strerror}; check the path") from error
    if mode & 0o077:
        raise CapslogError(
            f"others may read the run's secret in {path} (mode {mode:03o}); `chmod 600` it where nobody has read it, "
            f"delete it for a new one, or name a file that only you can read in {FILE_VARIABLE}"
        )
    if not text:
        raise SecretMissing(
            f"the run's secret is not in {path}, where the machine that begins the run makes it; if that is another "
            f"disk, copy the file to this machine and name it in {FILE_VARIABLE}"
        )
    return Secret(text, f"the run's secret in {path}")
