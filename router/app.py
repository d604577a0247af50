"""The router of one process: its parts, their life cycle, and the routes that are not hot.

GET  /health /version /cluster_info /v1/models /v1/models/{name} /prometheus/metrics
POST /tokenize /detokenize /explain                         router.tools
POST /set, GET /get /expire /get_prefix, DELETE /delete     with `cluster_uri: http://…`: storage hosted here
PUT  /debug/delays                                          with fault injection only
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from kvstore.errors import (
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotAuthenticated,
    NotReady,
    ServingError,
    SettingsError,
)
from kvstore.protocol import ServerRole
from kvstore.registry import Backend, Membership, open_membership, parse_cluster_uri
from kvstore.registry.http_store import HttpStore, storage_routes
from openai_api.tokenizer import Tokenizer
from router.bodies import error_body
from router.cluster import Cluster, record_of
from router.config import DisaggConfig
from router.discovery import Discovery
from router.front_door import HOT_ROUTES
from router.ids import RequestIds
from router.metrics import RouterMetrics, render
from router.orchestrate import Orchestrator
from router.prompt_tokens import PromptTokens
from router.tools import add_tool_routes
from router.worker import Worker

logger = logging.getLogger(__name__)

CallNext = Callable[[Request], Awaitable[Response]]
_NEED_A_KEY = ("/v1/", "/tokenize", "/detokenize", "/explain")


@dataclasses.dataclass(frozen=True, slots=True)
class RouterOptions:
    """What does not come from the disagg YAML."""

    request_timeout: float = 180.0  # seconds from the request's arrival to the end of its answer
    process_id: int = 0  # of several router processes on this node
    tokenizer_path: str | None = None  # model directory or GGUF file; None: prompts are not tokenized
    fault_injection: bool = False


class Router:
    """Make it and enter `running()` in the event loop that serves. `orchestrator` exists from then on."""

    orchestrator: Orchestrator

    _tokenizer: Tokenizer | None = None

    def __init__(self, config: DisaggConfig, options: RouterOptions) -> None:
        self.config = config
        self.options = options
        self.metrics = RouterMetrics()
        self.cluster = Cluster(config)
        self.membership: Membership | None = None
        self.store: HttpStore | None = None
        cluster = config.cluster
        if cluster is not None and parse_cluster_uri(cluster.cluster_uri).backend is Backend.HTTP:
            self.store = HttpStore()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Tasks and connections live as long as this block. Its end waits for the releases still owed."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        cluster = self.config.cluster
        if cluster is not None:
            self.membership = open_membership(
                cluster.cluster_uri, cluster.cluster_name, store=self.store, grace=cluster.inactive_timeout_sec
            )
        async with httpx.AsyncClient(trust_env=False, limits=limits) as client, asyncio.TaskGroup() as group:
            self.orchestrator = Orchestrator(
                self.cluster,
                self.metrics,
                RequestIds(self.config.node_id, self.options.process_id),
                group,
                self.options.request_timeout,
            )
            await self._load_tokenizer()
            discovery = group.create_task(self._discover(Discovery(self.cluster, client)))
            try:
                yield
            finally:
                discovery.cancel()
                for worker in self.cluster.workers:
                    worker.pool.close()
                if self.membership is not None:
                    await self.membership.aclose()

    async def _discover(self, discovery: Discovery) -> None:
        if self.membership is None:
            await discovery.run_static(self.config)
        else:
            await discovery.run_registry(self.membership)

    async def _load_tokenizer(self) -> None:
        policies = self.cluster.policies.values()
        if not any(policy.needs_tokens for policy in policies):
            return
        try:
            tokenizer = await self._read_tokenizer()
        except (SettingsError, OSError, ValueError) as error:
            self.cluster.tokenizer_problem = str(error)
            logger.warning("prompts are not tokenized, load alone decides: %s", error)
            return
        self.orchestrator.tokens = PromptTokens(tokenizer, any(policy.needs_keys for policy in policies))

    async def _read_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            if self.options.tokenizer_path is None:
                raise SettingsError([("model", "missing: it names the tokenizer")])
            self._tokenizer = await asyncio.to_thread(Tokenizer.load, self.options.tokenizer_path)
        return self._tokenizer

    async def tokenizer(self) -> Tokenizer:
        """The router's own. NotReady where there is none."""
        try:
            return await self._read_tokenizer()
        except (SettingsError, OSError, ValueError) as error:
            raise NotReady(f"this router has no tokenizer: {error}") from None


def version() -> str:
    try:
        return importlib.metadata.version("trtllm-disagg")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "0+source"


def create_app(router: Router) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_exception_handler(ServingError, _serving_error)

    @app.get("/health")
    async def health() -> Response:
        if not router.cluster.ready:
            raise NotReady(router.cluster.why_not_ready() or "not ready", retry_after=1.0)
        return Response()

    @app.get("/version")
    async def get_version() -> dict[str, str]:
        return {"version": version()}

    @app.get("/cluster_info")
    async def cluster_info() -> dict[str, Any]:
        return describe(router)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        if not router.cluster.ready:
            raise NotReady(router.cluster.why_not_ready() or "not ready", retry_after=1.0)
        names = router.cluster.models()
        entries = [{"id": name, "object": "model", "created": 0, "owned_by": "tensorrt_llm"} for name in names]
        return {"object": "list", "data": entries}

    @app.get("/prometheus/metrics")
    async def metrics() -> Response:
        return Response(render(router.metrics, router.cluster), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        for entry in (await models())["data"]:
            if entry["id"] == name:
                return entry  # type: ignore[no-any-return]
        raise ModelNotFound(f"model {name[:200]!r} is not served here", param="model")

    for path in HOT_ROUTES:
        app.add_api_route(path.decode(), _hot, methods=["POST"])  # so that other methods are told which one is right
    add_tool_routes(app, router)
    if router.config.cors_allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(router.config.cors_allow_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    if router.config.api_keys_file is not None:
        app.middleware("http")(_key_check(router))
    if router.store is not None:
        app.router.routes.extend(storage_routes(router.store))
    if router.options.fault_injection:
        _add_debug_routes(app, router)
    return app


def _key_check(router: Router) -> Callable[[Request, CallNext], Awaitable[Response]]:
    """The routes that clients use, the hot ones apart, which check for themselves. Probes and workers have no key."""

    async def check(request: Request, call_next: CallNext) -> Response:
        keys, path = router.orchestrator.keys, request.url.path
        if keys is not None and request.method != "OPTIONS" and path.startswith(_NEED_A_KEY):
            try:
                keys.check(request.headers.get("authorization", "").encode("latin-1"))
            except NotAuthenticated as error:
                return await _serving_error(request, error)
        return await call_next(request)

    return check


def _add_debug_routes(app: FastAPI, router: Router) -> None:
    """Pause points for tests: seconds to wait before and after the context leg. A missing name means none."""

    @app.put("/debug/delays")
    async def delays(request: Request) -> dict[str, float]:
        try:
            seconds = msgspec.json.decode(await request.body(), type=dict[str, float])
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"body: {error}") from None
        unknown = seconds.keys() - {"before_context", "after_context"}
        if unknown:
            raise InvalidRequest(f"{min(unknown)}: no such pause point; allowed: before_context, after_context")
        router.orchestrator.delays = {name: value for name, value in seconds.items() if value > 0}
        return router.orchestrator.delays


async def _hot() -> Response:
    raise InternalError("a request of the data path came to the application")


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refusal = InvalidRequest(f"{request.method} {request.url.path}: {error.detail}")
    return Response(error_body(refusal), error.status_code, media_type="application/json", headers=error.headers)


async def _serving_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    headers = {} if error.retry_after is None else {"retry-after": str(max(1, round(error.retry_after)))}
    return Response(error_body(error), error.status, media_type="application/json", headers=headers)


def describe(router: Router) -> dict[str, Any]:
    """/cluster_info: upstream's three keys, then ours."""
    cluster, minimum = router.cluster, router.config.cluster
    contexts, generations = cluster.by_role(ServerRole.CONTEXT), cluster.by_role(ServerRole.GENERATION)
    return {
        "is_ready": cluster.ready,
        "current_workers": {
            "context_servers": [record_of(worker) for worker in contexts if worker.usable],
            "generation_servers": [record_of(worker) for worker in generations if worker.usable],
        },
        "minimal_instances": {
            "context_servers": minimum.minimal_context if minimum else 1,
            "generation_servers": minimum.minimal_generation if minimum else 1,
        },
        "why_not_ready": None if cluster.ready else cluster.why_not_ready(),
        "degraded": cluster.degraded(),
        "registry": None
        if minimum is None
        else {
            "uri": router.membership.uri if router.membership else minimum.cluster_uri,
            "state": cluster.registry_state,
        },
        "waiting_requests": cluster.room.waiting,
        "policies": {role.name.lower(): policy.describe() for role, policy in cluster.policies.items()},
        "tokens_per_block": cluster.tokens_per_block,
        "index_blocks": len(cluster.index),
        "workers": [describe_worker(worker) for worker in [*contexts, *generations]],
        "incompatible_pairs": cluster.mismatches(),
    }


def describe_worker(worker: Worker) -> dict[str, Any]:
    fingerprint = worker.fingerprint
    return {
        "worker_id": worker.worker_id,
        "role": worker.role_name,
        "url": worker.url,
        "state": worker.state,
        "state_reason": worker.state_reason or None,
        "active_requests": worker.active,
        "incarnation": worker.incarnation,
        "fingerprint": None if fingerprint is None else fingerprint.digest(),
        "models": worker.models,
        "tokens_per_block": worker.info.tokens_per_block,
        "transfers": worker.info.transfers,
        "kv_events": worker.events_state,
        "index_blocks": 0 if worker.blocks is None else len(worker.blocks.keys),
    }
