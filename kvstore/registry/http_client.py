"""A worker's record in the storage of a router, over its HTTP routes."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlencode, urlsplit

from kvstore.protocol import WorkerRecord
from kvstore.registry.records import encode_record, record_key
from kvstore.registry.registration import RegistryUnavailable

_ANSWER_TIMEOUT = 1.5  # seconds, for a connection and for each read


class HttpRecordWriter:
    """One connection a call: heartbeats are seconds apart, and a router may close idle connections at any time."""

    def __init__(self, url: str, cluster_name: str, record: WorkerRecord, ttl: float) -> None:
        self._url = urlsplit(url)
        self._key, self._value = record_key(cluster_name, record.worker_id), encode_record(record)
        # Upstream's routes read whole seconds.
        self._ttl: float = int(ttl) if float(ttl).is_integer() else ttl

    def write(self) -> None:
        # Overwriting: the answer to an earlier write may have been lost.
        body = {"key": self._key, "value": self._value, "ttl": self._ttl, "overwrite_if_exists": True}
        if not self._call("POST", "/set", body):
            raise RegistryUnavailable(f"{self._url.geturl()}/set refused the record")

    def refresh(self) -> bool:
        return bool(self._call("GET", "/expire?" + urlencode({"key": self._key, "ttl": self._ttl})))

    def remove(self) -> None:
        self._call("DELETE", "/delete?" + urlencode({"key": self._key}))

    def close(self) -> None:
        pass

    def _call(self, method: str, target: str, body: dict[str, Any] | None = None) -> Any:
        """The result; falsy for "no" (400 with a result). RegistryUnavailable for anything but such an answer."""
        secure = self._url.scheme == "https"
        connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = connect(self._url.hostname or "", self._url.port, timeout=_ANSWER_TIMEOUT)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, target, data, {} if data is None else {"content-type": "application/json"})
            response = connection.getresponse()
            text = response.read(1 << 20)
        except (http.client.HTTPException, OSError) as error:
            raise RegistryUnavailable(f"{self._url.geturl()}: {error or type(error).__name__}") from error
        finally:
            connection.close()
        if response.status not in (200, 400):
            raise RegistryUnavailable(f"{self._url.geturl()}{target.partition('?')[0]}: status {response.status}")
        try:
            return json.loads(text)["result"]
        except (ValueError, KeyError, TypeError):
            raise RegistryUnavailable(f"{self._url.geturl()} does not host cluster storage") from None
