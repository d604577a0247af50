"""One leg: a POST to a worker, and what its failure means."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from msgspec import Raw

from kvstore.errors import InvalidRequest, UpstreamFailed
from kvstore.protocol import RequestType, ScheduleStyle
from router.bodies import error_body, is_openai_error, worker_message
from router.cluster import Cluster
from router.front_door import JSON, ClientRequest
from router.http_client import Answer, ExchangeFailed, Unreachable
from router.metrics import LegMetrics
from router.worker import Worker

EVENT_STREAM = b"text/event-stream; charset=utf-8"
_WRITE_WHOLE = 64 * 1024  # bytes up to which joining the parts is cheaper than a gathered write


class LegRefused(Exception):
    """A worker's 4xx: the client's business, and never tried elsewhere."""

    def __init__(self, worker: Worker, answer: Answer) -> None:
        super().__init__(f"{worker.role_name} worker {worker.address} answered {answer.status}")
        self.worker = worker
        self.answer = answer

    def pass_on(self, client: ClientRequest) -> None:
        pass_on_error(client, self.worker, self.answer)


class LegFailed(UpstreamFailed):
    """A worker that could not be reached, broke off, or answered neither 200 nor 4xx: another one may do better."""

    unreachable = False  # the worker never saw the request

    def __init__(self, worker: Worker, leg: LegMetrics, message: str, answer: Answer | None = None) -> None:
        super().__init__(f"{worker.role_name} worker {worker.address}: {message}")
        self.worker = worker
        self.leg = leg
        self.answer = answer

    def pass_on(self, client: ClientRequest) -> None:
        if client.started or self.answer is None or not 500 <= self.answer.status < 600:
            client.fail(self)
        else:
            pass_on_error(client, self.worker, self.answer)


def pass_on_error(client: ClientRequest, worker: Worker, answer: Answer) -> None:
    """A worker's error: unchanged if it is OpenAI's object, else its status with an object around its message."""
    retry_after = answer.header(b"retry-after")
    headers = client.request_id_line() + (b"retry-after: %b\r\n" % retry_after if retry_after else b"")
    body = answer.body or b""
    if is_openai_error(body):
        client.respond(answer.status, body, answer.header(b"content-type") or JSON, headers)
        return
    text = worker_message(body) or f"{worker.role_name} worker rejected the request with status {answer.status}"
    error = InvalidRequest(text) if answer.status < 500 else UpstreamFailed(text)
    client.respond(answer.status, error_body(error), headers=headers)


def leg_request(
    worker: Worker, client: ClientRequest | None, body: Sequence[bytes | Raw], path: bytes = b"", headers: bytes = b""
) -> list[bytes]:
    """The request's bytes; a large body stays in parts. `headers` are further lines, each with its line end."""
    parts = [part if isinstance(part, bytes) else bytes(part) for part in body]
    size = sum(map(len, parts))
    extra = headers
    if client is not None:
        path, extra = client.path, headers + client.request_id_line() + client.trace_lines
        if client.wants_metrics:
            extra += b"x-trtllm-return-metrics: 1\r\n"
    head = b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n" % (
        path,
        worker.address.encode(),
        size,
        extra,
    )
    return [b"".join([head, *parts])] if size <= _WRITE_WHOLE else [head, *parts]


async def post_leg(cluster: Cluster, leg: LegMetrics, worker: Worker, request: Sequence[bytes]) -> Answer:
    """A 2xx answer. Raises LegRefused for 4xx, LegFailed for everything else."""
    leg.total_requests += 1
    started = time.monotonic()
    try:
        answer = await worker.pool.request(request)
    except ExchangeFailed as error:
        leg.error_requests += 1
        failure = LegFailed(worker, leg, str(error))
        failure.unreachable = isinstance(error, Unreachable)
        cluster.suspect(worker, str(error), failure.unreachable)
        cluster.failed(worker, str(error))
        raise failure from None
    elapsed = time.monotonic() - started
    if worker.failures and 200 <= answer.status < 500:
        cluster.worked(worker)
    if answer.status == 200:
        leg.first_token_latency.observe(elapsed)
        if answer.body is not None:
            leg.complete_latency.observe(elapsed)
            leg.completed_requests += 1
        return answer
    leg.error_requests += 1
    if 400 <= answer.status < 500:
        raise LegRefused(worker, answer)
    if answer.status == 503:
        cluster.suspect(worker, "answers 503", unreachable=False)
    cluster.failed(worker, f"answered {answer.status}")
    raise LegFailed(worker, leg, f"answered {answer.status}", answer)


def follow_params(context: Worker, handoff_id: int) -> dict[str, Any] | None:
    """`disaggregated_params` of a generation leg beside the context leg; None if there is nothing to follow it by."""
    told = context.info.disaggregated_params
    endpoint = told.get("ctx_info_endpoint")
    if isinstance(endpoint, list):
        endpoint = endpoint[0] if endpoint else None
    if not isinstance(endpoint, str) or not endpoint:
        return None
    params = {
        "request_type": RequestType.GENERATION_ONLY,
        "ctx_request_id": handoff_id,
        "disagg_request_id": handoff_id,
        "schedule_style": int(ScheduleStyle.GENERATION_FIRST),
        "ctx_info_endpoint": endpoint,
    }
    if told.get("ctx_dp_rank") is not None:
        params["ctx_dp_rank"] = told["ctx_dp_rank"]
    return params


def first_cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of both legs' failures the one that came first."""
    first = failures.exceptions[0]
    return first_cause(first) if isinstance(first, BaseExceptionGroup) else first


def holds_pages(context: Worker, error: BaseException) -> bool:
    """Whether the context worker may still hold pages for a request that `error` ended."""
    if isinstance(error, LegFailed):
        return not (error.worker is context and error.unreachable)
    return not (isinstance(error, LegRefused) and error.worker is context)


def timing_line(client: ClientRequest, context: Answer | None, generation: Answer | None) -> bytes:
    """`Server-Timing`: the legs' entries under the prefixes ctx_ and gen_, and the router's under disagg_ (ms)."""
    entries = [] if context is None else [*_prefixed("ctx_", context)]
    if generation is not None:
        entries += _prefixed("gen_", generation)
    elapsed = (time.monotonic() - client.arrived) * 1000
    entries += [f"disagg_queue;dur={client.queued * 1000:.3f}", f"disagg_ttft;dur={elapsed:.3f}"]
    return b"server-timing: %b\r\n" % ", ".join(entries).encode()


def _prefixed(prefix: str, answer: Answer) -> list[str]:
    entries = answer.header(b"server-timing").decode("latin-1").split(",")
    named = (entry.strip() for entry in entries)
    return [entry if entry.startswith(prefix) else prefix + entry for entry in named if entry]
