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
from typing import Any

import msgspec

from kvstore.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, ServingError
from kvstore.handoff_auth import AUTH_HEADER, handoff_signature
from kvstore.protocol import RELEASE_PATH, ScheduleStyle
from router.access import ApiKeys, Origins
from router.bodies import BadContextAnswer, ClientBody, ContextAnswer
from router.cluster import Cluster
from router.front_door import JSON, ClientRequest
from router.http_client import Answer, ExchangeFailed
from router.ids import RequestIds
from router.legs import (
    EVENT_STREAM,
    LegFailed,
    LegRefused,
    first_cause,
    follow_params,
    holds_pages,
    leg_request,
    post_leg,
    timing_line,
)
from router.metrics import RouterMetrics
from router.policy import Need, PrefixAware
from router.prompt_tokens import NotReadable, PromptTokens, conversation_of, prompt_text
from router.streamed_answer import as_event_stream
from router.worker import Worker

logger = logging.getLogger(__name__)

RELEASE_TIMEOUT = 5.0  # seconds; the context worker's lease ends what a lost release would have ended


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
        self.keys = None if cluster.config.api_keys_file is None else ApiKeys(cluster.config.api_keys_file)
        self.origins = Origins(cluster.config.cors_allow_origins)
        self._needs_text = any(policy.needs_text for policy in cluster.policies.values())
        self._ids = ids
        self._tasks = tasks
        self._timeout = request_timeout
        self._tries = cluster.config.max_retries + 1
        self._generation_first = cluster.config.schedule_style == "generation_first"
        self._auth_key = cluster.config.internal_request_auth_key

    async def serve(self, client: ClientRequest) -> None:
        """Answer one request; the only place where errors become answers."""
        metrics = self.metrics
        metrics.total_requests += 1
        if not client.request_id:
            client.request_id = b"%x" % self._ids()
        try:
            async with asyncio.timeout(self._timeout):
                body = ClientBody(await client.read_body(), client.chat)
                if self.keys is not None:
                    self.keys.check(client.authorization)
                self._check(body)
                self.cluster.room.check()
                metrics.stream_requests += body.stream
                metrics.nonstream_requests += not body.stream
                await self._route(client, body)
            metrics.total_responses += 1
            return
        except asyncio.CancelledError:
            metrics.client_disconnects += client.disconnected
            raise
        except LegRefused as refusal:
            refusal.pass_on(client)
        except LegFailed as failure:
            failure.pass_on(client)
        except TimeoutError:
            client.fail(DeadlineExceeded(f"no complete answer within {self._timeout:g} s"))
        except ServingError as error:
            metrics.validation_exceptions += isinstance(error, InvalidRequest)
            metrics.internal_errors += error.status == 500
            client.fail(error)
        metrics.http_exceptions += 1

    def _check(self, body: ClientBody) -> None:
        self._check_model(body)
        template = body.fields.get("chat_template")
        if template is None or self.cluster.config.allow_request_chat_template or bytes(template) == b"null":
            return
        raise InvalidRequest("chat_template: not allowed by this server's configuration", param="chat_template")

    def _check_model(self, body: ClientBody) -> None:
        """Names are only judged where all workers tell which they take."""
        accepted = self.cluster.accepted_models
        model = body.fields.get("model")
        if accepted is None or model is None or bytes(model) in accepted:
            return
        try:
            name = msgspec.json.decode(model)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        if isinstance(name, str) and msgspec.json.encode(name) not in accepted:
            served = ", ".join(self.cluster.models())
            raise ModelNotFound(f"model: {name[:200]!r} is not served here; served: {served}", param="model")

    async def _route(self, client: ClientRequest, body: ClientBody) -> None:
        need = Need() if self.tokens is None else await self._read_prompt(self.tokens, body)
        if self._needs_text:
            self._read_conversation(client, body, need)
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
        await cluster.room.enter()
        alone = self._one_for_all(need, excluded)
        if alone is not None:
            await self._local_leg(client, body, need, alone)
            return
        context = cluster.pick_context(need, excluded)
        handoff_id = self._ids()
        try:
            if self._generation_first:
                await self._both_legs(client, body, need, context, handoff_id, excluded)
                return
            try:
                answer, prefill = await self._context_leg(client, body, need, context, handoff_id)
            finally:
                cluster.release(context, need)
            if prefill.params is None:
                self._answer_from_prefill(client, body, context, answer, prefill)
                return
            generation = cluster.pick_generation(context, need, excluded)
            try:
                await self._generation_leg(client, body, context, generation, answer, prefill)
            finally:
                cluster.release(generation, need)
        except BaseException as error:
            if holds_pages(context, error):
                self._release(context, handoff_id)
            raise

    # ------------------------------------------------------------ context first

    async def _context_leg(
        self,
        client: ClientRequest,
        body: ClientBody,
        need: Need,
        context: Worker,
        handoff_id: int,
        style: ScheduleStyle = ScheduleStyle.CONTEXT_FIRST,
    ) -> tuple[Answer, ContextAnswer]:
        cluster, policy = self.cluster, self.cluster.context_policy
        done = False
        try:
            client.queued = time.monotonic() - client.arrived
            self.metrics.queue_latency.observe(client.queued)
            if self.delays:
                await asyncio.sleep(self.delays.get("before_context", 0.0))
            predicted = policy.predicted_blocks(context, need) if isinstance(policy, PrefixAware) else None
            request = leg_request(context, client, body.context_leg(handoff_id, style))
            answer = await post_leg(cluster, self.metrics.ctx, context, request)
            try:
                if answer.body is None:
                    raise BadContextAnswer("an event stream")
                prefill = ContextAnswer(answer.body, body.only_one_token, hands_over=not self._generation_first)
            except BadContextAnswer as error:
                answer.discard()
                raise LegFailed(context, self.metrics.ctx, f"its answer cannot be handed over: {error}") from None
            done = True
            if predicted is not None:
                self._account_for_cache(context, need, predicted, prefill.cached_tokens())
            if self.delays:
                await asyncio.sleep(self.delays.get("after_context", 0.0))
        finally:
            if not done:
                policy.failed(context, need)
        return answer, prefill

    def _account_for_cache(self, context: Worker, need: Need, predicted: int, cached: int) -> None:
        self.cluster.context_policy.served(context, need, cached)
        self.metrics.predicted_cached_tokens += predicted * need.block_size
        self.metrics.actual_cached_tokens += cached
        if cached and not predicted:
            self.metrics.note_unforeseen()

    async def _generation_leg(
        self,
        client: ClientRequest,
        body: ClientBody,
        context: Worker,
        generation: Worker,
        prefill_answer: Answer,
        prefill: ContextAnswer,
    ) -> None:
        try:
            signature = self._signature(*prefill.signed_fields()) if self._auth_key else b""
            request = leg_request(generation, client, body.generation_leg(prefill), headers=signature)
        except BadContextAnswer as error:
            raise LegFailed(context, self.metrics.ctx, f"its answer cannot be handed over: {error}") from None
        await self._relay(client, generation, request, context.leg_head, prefill_answer)

    def _signature(self, endpoint: str | None, state: str | None) -> bytes:
        assert self._auth_key is not None
        return f"{AUTH_HEADER}: {handoff_signature(self._auth_key, endpoint, state)}\r\n".encode()

    async def _relay(
        self,
        client: ClientRequest,
        generation: Worker,
        request: list[bytes],
        names: bytes,
        prefill: Answer | None,
        beside: asyncio.Task[Any] | None = None,
    ) -> None:
        """The decode leg's answer is the client's. `names` are header lines that tell of the other worker.

        Nothing is sent to the client before the context leg `beside` this one is over: it may yet fail.
        """
        leg = self.metrics.gen
        started = time.monotonic()
        answer = await post_leg(self.cluster, leg, generation, request)
        if beside is not None:
            try:
                await asyncio.wait((beside,))
            except BaseException:
                answer.discard()
                raise
        headers = client.request_id_line() + names + generation.leg_head
        if client.wants_metrics:
            headers += timing_line(client, prefill, answer)
        if answer.body is not None:
            if b'"choices"' not in answer.body:
                self.cluster.failed(generation, "no choices in its answer")
                raise LegFailed(generation, leg, "no choices in its answer")
            client.respond(200, answer.body, answer.header(b"content-type") or JSON, headers)
            return
        assert answer.stream is not None
        client.start_stream(answer.header(b"content-type"), headers)
        try:
            await answer.stream.relay(client)
        except ExchangeFailed as error:
            leg.error_requests += 1
            self.cluster.suspect(generation, str(error), unreachable=False)
            self.cluster.failed(generation, str(error))
            raise LegFailed(generation, leg, f"the answer broke off: {error}") from None
        client.end_stream()
        leg.stream_completed(time.monotonic() - started, answer.stream.chunks)

    # ------------------------------------------------------------ generation first

    async def _both_legs(
        self,
        client: ClientRequest,
        body: ClientBody,
        need: Need,
        context: Worker,
        handoff_id: int,
        excluded: list[Worker],
    ) -> None:
        """At once: the generation worker makes room and takes the blocks while they are computed.

        Its answer is the client's. The failure of either leg ends the other.
        """
        cluster = self.cluster
        try:
            params = follow_params(context, handoff_id)
            if params is None:
                raise LegFailed(context, self.metrics.ctx, "offers no endpoint to follow (generation_first)")
            generation = cluster.pick_generation(context, need, excluded)
        except BaseException:
            cluster.context_policy.failed(context, need)
            cluster.release(context, need)
            raise
        signature = self._signature(params["ctx_info_endpoint"], None) if self._auth_key else b""
        request = leg_request(generation, client, body.generation_first_leg(params), headers=signature)
        style = ScheduleStyle.GENERATION_FIRST
        try:
            async with asyncio.TaskGroup() as legs:
                prefill = legs.create_task(self._context_leg(client, body, need, context, handoff_id, style))
                # Not in the task itself: one that is cancelled before it began would keep its reservation.
                prefill.add_done_callback(lambda _: cluster.release(context, need))
                await self._relay(client, generation, request, context.leg_head, None, beside=prefill)
        except BaseExceptionGroup as failures:
            raise first_cause(failures) from None
        finally:
            cluster.release(generation, need)

    # ------------------------------------------------------------ without a context worker

    def _one_for_all(self, need: Need, excluded: list[Worker]) -> Worker | None:
        """Conditional disaggregation: a generation worker, reserved, that misses only a few tokens of the prompt."""
        limit, policy = self.cluster.config.max_local_prefill_length, self.cluster.generation_policy
        if limit is None or not need.keys or not isinstance(policy, PrefixAware):
            return None
        worker = self.cluster.pick_local(need, excluded)
        matched = policy.predicted_blocks(worker, need) * need.block_size
        if matched and need.num_tokens - matched <= limit:
            return worker
        policy.failed(worker, need)
        self.cluster.release(worker, need)
        return None

    async def _local_leg(self, client: ClientRequest, body: ClientBody, need: Need, worker: Worker) -> None:
        self.metrics.local_prefills += 1
        try:
            await self._relay(client, worker, leg_request(worker, client, body.local_leg()), b"", None)
            self.cluster.generation_policy.served(worker, need, None)
        finally:
            self.cluster.release(worker, need)

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
            return Need()

    @staticmethod
    def _read_conversation(client: ClientRequest, body: ClientBody, need: Need) -> None:
        try:
            need.conversation = conversation_of(body, client.session.decode("latin-1"))
        except NotReadable:
            need.conversation = ""
        if not need.conversation:
            need.text = prompt_text(body)

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
