"""The HTTP application of a worker: OpenAI routes, the hand-off's control routes, what operators and routers read.

A context worker prefills for others and can serve whole requests; generation_worker.app adds the third request type.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from context_worker.drained import SETTINGS, DrainedLists
from context_worker.followed import FollowedHandoff
from context_worker.kv_events import EventStream
from context_worker.metrics import WorkerMetrics
from context_worker.prefill import Prefill
from kvstore.errors import InvalidRequest, NotReady, openai_error_body
from kvstore.handoff_auth import AUTH_HEADER, is_signed
from kvstore.protocol import FOLLOW_PATH, KV_EVENTS_PATH, RELEASE_PATH, SERVER_INFO_PATH, RequestType, ServerInfo
from openai_api.endpoint import JsonEndpoint, Scope, header
from openai_api.engine_port import Engine
from openai_api.intake import Intake, Job, ModelLimits
from openai_api.reasoning import FORMS
from openai_api.reply import Reply, retry_header
from openai_api.service import Service
from openai_api.several import Several
from openai_api.tokenizer import Tokenizer

RequestHandler = Callable[[Job, Reply], Awaitable[None]]

DISTRIBUTION = "trtllm-disagg"


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerOptions:
    role: str  # "context" | "generation" | "aggregated"
    served_name: str
    aliases: tuple[str, ...] = ()  # other names that requests may use
    max_batch_size: int | None = None
    fault_injection: bool = False
    endpoint: str = ""  # host:port under which other workers reach this one
    internal_request_auth_key: str | None = dataclasses.field(default=None, repr=False)
    block_reuse: bool = True
    reasoning_parser: str | None = None  # of openai_api.reasoning.FORMS
    kept_lists: tuple[str, ...] = tuple(SETTINGS)  # of statistics, see context_worker.drained


class Worker:
    """What the routes share. The server's life cycle sets `draining`, then `stopping`."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, options: WorkerOptions) -> None:
        self.engine = engine
        self.options = options
        self.draining = False  # no new work wanted: /health says so, requests are still served
        self.stopping = asyncio.Event()  # endless streams end
        self.clock_offset = 0.0
        self.created = int(time.time())
        self.metrics = WorkerMetrics(engine, options.served_name)
        self.drained = DrainedLists(engine, options.kept_lists)
        self.service = Service(engine, tokenizer, self.metrics)
        ready = engine.ready
        limits = ModelLimits(ready.max_seq_len, ready.vocab_size, ready.eos_token_ids)
        reasoning = FORMS[options.reasoning_parser] if options.reasoning_parser else None
        self.intake = Intake(tokenizer, limits, options.served_name, options.aliases, reasoning)
        self.request_types: dict[str, RequestHandler] = {
            RequestType.CONTEXT_ONLY: Prefill(self.service),
            RequestType.CONTEXT_AND_GENERATION: self.service.complete,
        }

    # ------------------------------------------------------------ OpenAI

    async def completion(self, scope: Scope, body: bytes, reply: Reply) -> None:
        await self._serve(scope, await self.intake.completion(body), reply)

    async def chat(self, scope: Scope, body: bytes, reply: Reply) -> None:
        await self._serve(scope, await self.intake.chat(body), reply)

    async def _serve(self, scope: Scope, job: Job, reply: Reply) -> None:
        self.drained.arrived(job.request_id, job.received)
        job.return_metrics = header(scope, b"x-trtllm-return-metrics") == "1"
        self._check_signature(scope, job)
        asked = job.params.request_type or RequestType.CONTEXT_AND_GENERATION
        handler = self.request_types.get(asked)
        if handler is None:
            raise InvalidRequest(
                f"disaggregated_params.request_type: {asked!r} is not for a {self.options.role} worker; "
                f"allowed: {', '.join(self.request_types)}",
                param="disaggregated_params.request_type",
            )
        if not job.others:
            await handler(job, reply)
            return
        if asked != RequestType.CONTEXT_AND_GENERATION:
            raise InvalidRequest(f"prompt: {len(job.others) + 1} prompts; {asked} takes one", param="prompt")
        await Several(self.service, [self.service.generation(each) for each in (job, *job.others)]).answer(reply)

    def _check_signature(self, scope: Scope, job: Job) -> None:
        """Without a key anyone who reaches this port may say where a hand-off is fetched from."""
        key, params = self.options.internal_request_auth_key, job.params
        if key is None:
            return
        if not is_signed(
            key, header(scope, AUTH_HEADER.encode()), params.ctx_info_endpoint, params.encoded_opaque_state
        ):
            raise InvalidRequest(f"disaggregated_params: not signed with this server's key ({AUTH_HEADER})")

    async def models(self, request: Request) -> Response:
        model = {"id": self.options.served_name, "object": "model", "created": self.created, "owned_by": DISTRIBUTION}
        return json_response({"object": "list", "data": [model]})

    # ------------------------------------------------------------ hand-off and cache

    async def release(self, scope: Scope, body: bytes, reply: Reply) -> None:
        wanted = _decode(body, _Release)
        self.engine.release_handoff(wanted.disagg_request_id, wanted.incarnation)
        await reply.json(b'{"released":true}')

    async def follow(self, scope: Scope, body: bytes, reply: Reply) -> None:
        await FollowedHandoff(self.engine, self.stopping, reply).run(_decode(body, _Follow).disagg_request_id)

    async def kv_events(self, scope: Scope, body: bytes, reply: Reply) -> None:
        if not self.options.block_reuse:  # a stream that never says anything would look like an empty cache
            raise InvalidRequest("this worker keeps no blocks: kv_cache_config.enable_block_reuse is false")
        await EventStream(self.engine, self.stopping, reply).run()

    # ------------------------------------------------------------ what this worker is, and how it does

    async def health(self, request: Request) -> Response:
        """200: a request would be served now."""
        if not self.engine.alive:
            return error_response(NotReady("the engine process has ended; this server is going down"))
        if self.draining:
            return error_response(NotReady("this server is shutting down"))
        return json_response({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return json_response({"version": version()})

    async def server_info(self, request: Request) -> Response:
        ready = self.engine.ready
        endpoints = [self.options.endpoint] if self.options.endpoint else []
        info = ServerInfo(
            disaggregated_params={"ctx_dp_rank": None, "ctx_info_endpoint": endpoints or None},
            max_batch_size=self.options.max_batch_size,
            tokens_per_block=ready.block_size,
            kv_cache_hash_algo=ready.kv_cache_hash_algo,
            engine=DISTRIBUTION,
            version=version(),
            role=self.options.role,
            model=self.options.served_name,
            accepts=[self.options.served_name, *self.options.aliases],
            incarnation=ready.incarnation,
            fingerprint=ready.fingerprint,
            max_seq_len=ready.max_seq_len,
            transfers=ready.transfers,
            transfer_choice=ready.transfer_choice,
        )
        return json_response(info)

    async def iteration_stats(self, request: Request) -> Response:
        return Response(self.drained.iterations(), media_type="application/json")

    async def perf_metrics(self, request: Request) -> Response:
        return Response(self.drained.requests(self.clock_offset), media_type="application/json")

    async def cache_events(self, scope: Scope, body: bytes, reply: Reply) -> None:
        await reply.json(self.drained.cache_events())

    async def prometheus(self, request: Request) -> Response:
        return Response(self.metrics.prometheus(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def read_clock(self, request: Request) -> Response:
        received = time.monotonic()
        return json_response({"receive_ts": received, "transmit_ts": time.monotonic()})

    async def set_clock(self, scope: Scope, body: bytes, reply: Reply) -> None:
        self.clock_offset = _decode(body, _ClockOffset).offset
        await reply.json(b"{}")

    async def set_delays(self, scope: Scope, body: bytes, reply: Reply) -> None:
        self.engine.set_delays(_decode(body, dict[str, float]))
        await reply.json(b"{}")

    def routes(self) -> list[Route]:
        def post(path: str, handler: Any) -> Route:
            return Route(path, JsonEndpoint(handler), methods=["POST"])

        routes = [
            post("/v1/completions", self.completion),
            post("/v1/chat/completions", self.chat),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/version", self.version),
            Route(SERVER_INFO_PATH, self.server_info),
            post(RELEASE_PATH, self.release),
            post(FOLLOW_PATH, self.follow),
            Route(KV_EVENTS_PATH, JsonEndpoint(self.kv_events), methods=["GET"]),
            Route("/metrics", self.iteration_stats),
            Route("/perf_metrics", self.perf_metrics),
            Route("/kv_cache_events", JsonEndpoint(self.cache_events), methods=["POST"]),
            Route("/prometheus/metrics", self.prometheus),
            Route("/steady_clock_offset", self.read_clock),
            post("/steady_clock_offset", self.set_clock),
        ]
        if self.options.fault_injection:
            routes.append(Route("/debug/delays", JsonEndpoint(self.set_delays), methods=["PUT"]))
        return routes


class _Release(msgspec.Struct):
    disagg_request_id: int
    incarnation: str | None = None


class _Follow(msgspec.Struct):
    disagg_request_id: int


class _ClockOffset(msgspec.Struct):
    offset: float


Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def create_app(worker: Worker, lifespan: Lifespan | None = None) -> Starlette:
    """`worker` is also found as `app.state.worker`."""
    app = Starlette(
        routes=worker.routes(),
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.state.worker = worker
    return app


def version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_response(error: NotReady) -> Response:
    headers = {str(name, "latin-1"): str(value, "latin-1") for name, value in retry_header(error)}
    return json_response(openai_error_body(error), error.status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the routing table, in the shape of all other errors."""
    assert isinstance(error, HTTPException)
    body = openai_error_body(InvalidRequest(f"{request.method} {request.url.path}: {error.detail}"))
    return json_response(body, error.status_code, error.headers)


def _decode(body: bytes, form: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=form)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the request body: {error}") from None
