"""Acknowledgements: a context worker is told that its pages were read, so that it need not keep them."""

from __future__ import annotations

import asyncio
import logging

import httpx

from engine.messages import HandoffFetched
from kvstore.protocol import RELEASE_PATH

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_CONNECTIONS = 16


class Acknowledger:
    """Sends in the background, at most 16 at once. A lost acknowledgement is logged; the lease frees the pages then.

    Use as an async context manager: on exit, what is under way gets its time-out to finish.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None) -> None:
        limits = httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS)
        self._client = httpx.AsyncClient(timeout=_TIMEOUT_S, limits=limits, transport=transport, trust_env=False)
        self._group = asyncio.TaskGroup()
        self._open = False

    async def __aenter__(self) -> Acknowledger:
        await self._group.__aenter__()
        self._open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        try:
            await self._group.__aexit__(None, None, None)
        finally:
            await self._client.aclose()

    def send(self, report: HandoffFetched) -> None:
        """On the event loop; returns at once."""
        if not self._open:
            logger.warning("hand-off %d: not acknowledged, this worker is closing", report.handoff_id)
            return
        self._group.create_task(self._post(report))

    async def _post(self, report: HandoffFetched) -> None:
        body = {"disagg_request_id": report.handoff_id, "incarnation": report.incarnation}
        try:
            response = await self._client.post(f"http://{report.endpoint}{RELEASE_PATH}", json=body)
            response.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            logger.warning(
                "hand-off %d: %s did not take the acknowledgement (%s); its lease ends it",
                report.handoff_id,
                report.endpoint,
                error or type(error).__name__,
            )
