"""The HTTP application of a generation worker, and of an aggregated one: all that a context worker has, and requests
that go on from another worker's prefill.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from starlette.applications import Starlette

from context_worker import app as context_app
from context_worker.app import Worker
from engine.messages import HandoffFetched
from generation_worker.acknowledge import Acknowledger
from generation_worker.follow import Follower
from generation_worker.ingest import Ingest
from kvstore.protocol import RequestType


def create_app(worker: Worker, acknowledger: Acknowledger | None = None) -> Starlette:
    """The application's lifespan owns the acknowledger."""
    worker.request_types[RequestType.GENERATION_ONLY] = Ingest(worker.service)
    acknowledger = acknowledger or Acknowledger()

    def on_fetched(report: HandoffFetched) -> None:
        worker.metrics.handoff_fetched(report)
        acknowledger.send(report)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        async with acknowledger, Follower(worker.engine) as follower:
            worker.engine.on_handoff_fetched = on_fetched
            worker.engine.on_handoff_wanted = follower.take
            try:
                yield
            finally:
                worker.engine.on_handoff_fetched = worker.engine.on_handoff_wanted = None

    return context_app.create_app(worker, lifespan)
