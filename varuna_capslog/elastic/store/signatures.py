"""Signatures of the values that a run writes into a store that is not its own, where others may write as well.

`etcd_gateway` signs every value for its key, so that a value is worth nothing under another key or in another run, and
does not use unsigned values. An older value of the same key keeps its signature: anyone with write access there can put
it back.
"""

from __future__ import annotations

import hmac
import logging

from varuna_capslog.base.trust.secret import Secret

__all__ = ["Signatures", "unsigned"]

_log = logging.getLogger(__name__)
_DIGITS = 64


class Signatures:
    """Signs and checks with a run's secret.

    Args:
        address: of the store, for the warning about a wrong signature.
    """

    def __init__(self, secret: Secret, address: str) -> None:
        self._key, self._address = secret.key("etcd"), address
        self._named: set[str] = set()

    def sign(self, key: str, value: str | bytes) -> bytes:
        """The value with its signature in front."""
        data = value.encode() if isinstance(value, str) else value
        return self._code(key, data) + b":" + data

    def opened(self, key: str, stored: bytes) -> bytes | None:
        """The value; None, and a line in the log once for each key, where its signature is wrong."""
        code, data = stored[:_DIGITS], stored[_DIGITS + 1 :]
        if hmac.compare_digest(code, self._code(key, data)) and stored[_DIGITS : _DIGITS + 1] == b":":
            return data
        if key not in self._named:
            self._named.add(key)
            _log.warning(
                "%s in the store at %s is not signed with this run's secret and is ignored; somebody else writes there",
                key,
                self._address,
            )
        return None

    def _code(self, key: str, data: bytes) -> bytes:
        return hmac.new(self._key, key.encode() + b"\0" + data, "sha256").hexdigest().encode()


def unsigned(stored: bytes) -> bytes:
    """The value, with any signature or none of this run's."""
    return stored[_DIGITS + 1 :]
