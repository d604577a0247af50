"""A router between fake workers, ready to serve."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fake_worker import FakeWorker, fake_workers
from running_router import RunningRouter, eventually, running_router, static_config

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@contextlib.asynccontextmanager
async def cluster(
    contexts: int = 1,
    generations: int = 1,
    config: dict[str, Any] | None = None,
    context_info: dict[str, Any] | None = None,
    generation_info: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[RunningRouter, list[FakeWorker], list[FakeWorker]]]:
    ctx = [FakeWorker("context", **(context_info or {})) for _ in range(contexts)]
    gen = [FakeWorker("generation", **(generation_info or {})) for _ in range(generations)]
    async with (
        fake_workers(*ctx, *gen),
        running_router(static_config(ctx, gen, router, **(config or {})), **options) as running,
    ):
        await eventually(lambda: sum(worker.usable for worker in running.router.cluster.workers) == len(ctx + gen))
        yield running, ctx, gen
