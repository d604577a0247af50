"""Who may call: API keys from a file that is read again when it changes, and web origins."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Sequence

from kvstore.errors import NotAuthenticated, SettingsError

logger = logging.getLogger(__name__)

LOOK_AGAIN = 1.0  # seconds


class ApiKeys:
    """One key a line; blank lines and those that begin with "#" are passed over. Only digests are kept."""

    def __init__(self, path: str) -> None:
        """Raises SettingsError for a file that cannot be read, or has no key in it."""
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._next_look = 0.0
        self._digests: frozenset[bytes] = frozenset()
        try:
            self._read()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError([("api_keys_file", f"{path}: {error}")]) from None
        if not self._digests:
            raise SettingsError([("api_keys_file", f"{path} has no key in it")])

    def __repr__(self) -> str:
        return f"<ApiKeys {self._path} keys={len(self._digests)}>"

    def check(self, authorization: bytes) -> None:
        """`authorization` is the header's value. Raises NotAuthenticated."""
        self._refresh()
        scheme, _, key = authorization.strip().partition(b" ")
        if not authorization:
            raise NotAuthenticated("an API key is needed: Authorization: Bearer KEY")
        if scheme.lower() != b"bearer" or hashlib.sha256(key.strip()).digest() not in self._digests:
            raise NotAuthenticated("the API key is not known here")

    def _refresh(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_AGAIN
        try:
            self._read()
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("api_keys_file: %s: %s; the keys read before stay", self._path, error)

    def _read(self) -> None:
        state = os.stat(self._path)
        version = state.st_mtime_ns, state.st_size
        if version == self._seen:
            return
        with open(self._path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
        self._seen = version
        keys = [line for line in lines if line and not line.startswith("#")]
        self._digests = frozenset(hashlib.sha256(key.encode()).digest() for key in keys)
        logger.info("api_keys_file: %s has %d keys", self._path, len(self._digests))


class Origins:
    """Web origins whose pages may read answers."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._any = "*" in allowed
        self._allowed = frozenset(origin.encode() for origin in allowed)

    def header_lines(self, origin: bytes) -> bytes:
        """For an answer to a page of `origin`: nothing where it may not read it."""
        if self._any:
            return b"access-control-allow-origin: *\r\n"
        if origin in self._allowed:
            return b"access-control-allow-origin: %b\r\nvary: origin\r\n" % origin
        return b""
