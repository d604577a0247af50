"""One request's way through the cluster, context first.

    parse → choose a context worker → prefill leg → choose a generation worker → decode leg → relay to the client

An attempt that fails before the client got a byte is made again with other workers and a fresh id. Whatever ends a
request early (error, timeout, lost client) closes its upstream connections, and tells the context worker to drop the
pages that it holds for the hand-off.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from kvstore.errors import DeadlineExceeded, InvalidRequest, ServingError
from kvstore.protocol import RELEASE_PATH
from router.bodies import BadContextAnswer, ClientBody, ContextAnswer
from router.cluster import Cluster
from router.front_door import JSON, ClientRequest
from router.http_client import Answer, ExchangeFailed
from router.ids import RequestIds
from router.legs import EVENT_STREAM, LegFailed, LegRefused, leg_request, post_leg, timing_line
from router.metrics import RouterMetrics
from router.policy import Need
from router.policy.kv_cache_aware import KvCacheAware
from router.prompt_tokens import NotReadable, PromptTokens
from router.streamed_answer import as_event_stream
from router.worker import Worker

logger = logging.getLogger(__name__)

RELEASE_TIMEOUT = 5.0  # seconds; the context worker's lease ends what a lost release would have ended
_NO_NEED = Need()


class Orchestrator:
    """`tasks` owns the releases, which outlive the requests that owe them."""

    def __init__(
        self,
        cluster: Cluster,
        metrics: RouterMetrics,
        ids: RequestIds,
        tasks: asyncio.TaskGroup,
        request_timeout: float,
    ) -> None:
        self.cluster = cluster
        self.metrics = metrics
        self.delays: dict[str, float] = {}
        self.tokens: PromptTokens | None = None
        self._ids = ids
        self._tasks = tasks
        self._timeout = request_timeout
        self._tries = cluster.config.max_retries + 1

    async def serve(self, client: ClientRequest) -> None:
        """Answer one request; the only place where errors become answers."""
        metrics = self.metrics
        metrics.total_requests += 1
        if not client.request_id:
            client.request_id = b"%x" % self._ids()
        try:
            async with asyncio.timeout(self._timeout):
                body = ClientBody(await client.read_body(), client.chat)
                self._check(body)
                if body.stream:
                    metrics.stream_requests += 1
                else:
                    metrics.nonstream_requests += 1
                await self._route(client, body)
            metrics.total_responses += 1
            return
        except asyncio.CancelledError:
            metrics.client_disconnects += client.disconnected
            raise
        except LegRefused as refusal:
            refusal.pass_on(client)
        except TimeoutError:
            client.fail(DeadlineExceeded(f"no complete answer within {self._timeout:g} s"))
        except LegFailed as failure:
            failure.pass_on(client)
        except ServingError as error:
            metrics.validation_exceptions += isinstance(error, InvalidRequest)
            metrics.internal_errors += error.status == 500
            client.fail(error)
        metrics.http_exceptions += 1

    def _check(self, body: ClientBody) -> None:
        template = body.fields.get("chat_template")
        if template is None or self.cluster.config.allow_request_chat_template or bytes(template) == b"null":
            return
        raise InvalidRequest("chat_template: not allowed by this server's configuration", param="chat_template")

    async def _route(self, client: ClientRequest, body: ClientBody) -> None:
        need = _NO_NEED if self.tokens is None else await self._read_prompt(self.tokens, body)
        excluded: list[Worker] = []
        for attempt in range(1, self._tries + 1):
            try:
                return await self._attempt(client, body, need, excluded)
            except LegFailed as failure:
                excluded.append(failure.worker)
                if client.started or attempt == self._tries or not self.cluster.others_left(excluded):
                    raise
                failure.leg.retry_requests += 1
                logger.warning("request %s is tried again: %s", client.request_id.decode(), failure)

    async def _attempt(self, client: ClientRequest, body: ClientBody, need: Need, excluded: list[Worker]) -> None:
        """Both legs, once. The reservation of each worker ends with its leg."""
        cluster = self.cluster
        context = cluster.pick_context(need, excluded)
        handoff_id = self._ids()
        try:
            try:
                answer, prefill = await self._context_leg(client, body, need, context, handoff_id)
            finally:
                cluster.context_policy.release(context, need)
            if prefill.params is None:
                self._answer_from_prefill(client, body, context, answer, prefill)
                return
            generation = cluster.pick_generation(context, need, excluded)
            try:
                await self._generation_leg(client, body, context, generation, answer, prefill)
            finally:
                cluster.generation_policy.release(generation, need)
        except BaseException as error:
            if holds_pages(context, error):
                self._release(context, handoff_id)
            raise

    async def _context_leg(
        self, client: ClientRequest, body: ClientBody, need: Need, context: Worker, handoff_id: int
    ) -> tuple[Answer, ContextAnswer]:
        client.queued = time.monotonic() - client.arrived
        self.metrics.queue_latency.observe(client.queued)
        if self.delays:
            await asyncio.sleep(self.delays.get("before_context", 0.0))
        policy = self.cluster.context_policy
        predicted = policy.predicted_blocks(context, need) if isinstance(policy, KvCacheAware) else None
        request = leg_request(context, client, body.context_leg(handoff_id))
        answer = await post_leg(self.cluster, self.metrics.ctx, context, request)
        try:
            if answer.body is None:
                raise BadContextAnswer("an event stream")
            prefill = ContextAnswer(answer.body, body.only_one_token)
        except BadContextAnswer as error:
            answer.discard()
            raise LegFailed(context, self.metrics.ctx, f"its answer cannot be handed over: {error}") from None
        if isinstance(policy, KvCacheAware) and predicted is not None:
            policy.routed(context, need)
            self.metrics.predicted_cached_tokens += predicted * (self.cluster.tokens_per_block or 0)
            self.metrics.actual_cached_tokens += prefill.cached_tokens()
        if self.delays:
            await asyncio.sleep(self.delays.get("after_context", 0.0))
        return answer, prefill

    async def _generation_leg(
        self,
        client: ClientRequest,
        body: ClientBody,
        context: Worker,
        generation: Worker,
        prefill_answer: Answer,
        prefill: ContextAnswer,
    ) -> None:
        leg = self.metrics.gen
        try:
            request = leg_request(generation, client, body.generation_leg(prefill))
        except BadContextAnswer as error:
            raise LegFailed(context, self.metrics.ctx, f"its answer cannot be handed over: {error}") from None
        started = time.monotonic()
        answer = await post_leg(self.cluster, leg, generation, request)
        headers = client.request_id_line() + context.leg_head + generation.leg_head
        if client.wants_metrics:
            headers += timing_line(client, prefill_answer, answer)
        if answer.body is not None:
            client.respond(200, answer.body, answer.header(b"content-type") or JSON, headers)
            return
        assert answer.stream is not None
        client.start_stream(answer.header(b"content-type"), headers)
        try:
            await answer.stream.relay(client)
        except ExchangeFailed as error:
            leg.error_requests += 1
            self.cluster.suspect(generation, str(error), unreachable=False)
            raise LegFailed(generation, leg, f"the answer broke off: {error}") from None
        client.end_stream()
        leg.stream_completed(time.monotonic() - started, answer.stream.chunks)

    def _answer_from_prefill(
        self, client: ClientRequest, body: ClientBody, context: Worker, answer: Answer, prefill: ContextAnswer
    ) -> None:
        """The first token ended every choice: there is nothing to decode."""
        self.metrics.finished_in_prefill += 1
        headers = client.request_id_line() + context.leg_head
        if client.wants_metrics:
            headers += timing_line(client, answer, None)
        whole = prefill.without_handoff(body.wants_prompt_ids)
        if not body.stream:
            client.respond(200, whole, headers=headers)
            return
        client.start_stream(EVENT_STREAM, headers)
        client.relay_events(as_event_stream(whole, body.chat, body.include_usage))
        client.end_stream()

    async def _read_prompt(self, tokens: PromptTokens, body: ClientBody) -> Need:
        try:
            return await tokens.read(body, self.cluster.tokens_per_block)
        except NotReadable as reason:
            logger.debug("prompt left to the worker: %s", reason)
            self.metrics.untokenized_requests += 1
            return _NO_NEED

    # ------------------------------------------------------------ hand-offs that nobody will fetch

    def _release(self, context: Worker, handoff_id: int) -> None:
        if not context.releases:
            return
        release = self._post_release(context, handoff_id)
        try:
            self._tasks.create_task(release)
        except RuntimeError:  # the router is going down by a failure of its own: the lease has to do
            release.close()

    async def _post_release(self, context: Worker, handoff_id: int) -> None:
        body = msgspec.json.encode({"disagg_request_id": handoff_id})
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT):
                answer = await context.pool.request(leg_request(context, None, [body], RELEASE_PATH.encode()))
        except (ExchangeFailed, TimeoutError) as error:
            logger.warning("hand-off %d was not released at %s: %s", handoff_id, context.address, error)
            return
        self.metrics.handoffs_released += 1
        if answer.status == 404:
            context.releases = False


def holds_pages(context: Worker, error: BaseException) -> bool:
    """Whether the context worker may still hold pages for a request that `error` ended."""
    if isinstance(error, LegFailed):
        return not (error.worker is context and error.unreachable)
    return not (isinstance(error, LegRefused) and error.worker is context)
