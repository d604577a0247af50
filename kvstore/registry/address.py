"""`cluster_uri`: which registry, and where."""

from __future__ import annotations

import dataclasses
import enum
from urllib.parse import SplitResult, urlsplit

from kvstore.errors import SettingsError
from kvstore.protocol import join_address

ALLOWED = "redis://[user:password@]host:port/db, rediss://…, redis://embedded[:port], http(s)://host:port"
_FIELD = "disagg_cluster.cluster_uri"
_REDIS_PORT = 6379


class Backend(enum.Enum):
    REDIS = "redis"
    EMBEDDED = "embedded"
    HTTP = "http"


@dataclasses.dataclass(frozen=True)
class ClusterAddress:
    """`url` is what a client connects to and may hold a password; `str()` of this hides it."""

    backend: Backend
    url: str
    host: str
    port: int | None  # None only for redis://embedded

    def __str__(self) -> str:
        return redacted(self.url)


def redacted(url: str) -> str:
    """`url` with its password replaced, for logs and messages."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return parts._replace(netloc=f"{parts.username or ''}:***@{parts.netloc.rpartition('@')[2]}").geturl()


def parse_cluster_uri(text: str) -> ClusterAddress:
    """SettingsError names the field, the value without its password, and what is allowed."""
    parts, port = _split(text)
    host = parts.hostname
    if parts.scheme == "etcd":
        raise _refused(text, "etcd:// is not in this build")
    if parts.scheme not in ("redis", "rediss", "http", "https"):
        raise _refused(text, "not a registry address")
    if not host or parts.query or parts.fragment:
        raise _refused(text, "not a registry address")
    if parts.scheme in ("http", "https"):
        if port is None or parts.path.strip("/") or parts.username is not None:
            raise _refused(text, "must be scheme, host and port, nothing else")
        return ClusterAddress(Backend.HTTP, f"{parts.scheme}://{join_address(host, port)}", host, port)
    database = parts.path.strip("/")
    if database and not database.isdecimal():
        raise _refused(text, f"database {database!r} is not a number")
    if parts.scheme == "redis" and host == "embedded":
        url = text if port is None else f"redis://127.0.0.1:{port}/{database or 0}"
        return ClusterAddress(Backend.EMBEDDED, url, "127.0.0.1", port)
    url = parts._replace(netloc=_netloc(parts, host, port or _REDIS_PORT), path=f"/{database or 0}").geturl()
    return ClusterAddress(Backend.REDIS, url, host, port or _REDIS_PORT)


def _netloc(parts: SplitResult, host: str, port: int) -> str:
    credentials, at, _ = parts.netloc.rpartition("@")
    return credentials + at + join_address(host, port)


def _split(text: str) -> tuple[SplitResult, int | None]:
    if not isinstance(text, str):  # YAML gives whatever was written
        raise SettingsError([(_FIELD, f"{text!r}: not text; allowed: {ALLOWED}")])
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise SettingsError([(_FIELD, f"{error}; allowed: {ALLOWED}")]) from None
    if port == 0:
        raise _refused(text, "port 0 is no address")
    return parts, port


def _refused(text: str, reason: str) -> SettingsError:
    return SettingsError([(_FIELD, f"{redacted(text)!r}: {reason}; allowed: {ALLOWED}")])
