"""Generation-only requests: take the handle that a context worker gave out, and decode on from its first tokens."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from engine.messages import Submit
from kvstore.errors import HandoffRefused, InvalidRequest
from kvstore.handoff import Handle
from kvstore.protocol import DisaggregatedParams, ScheduleStyle, join_address, split_address
from openai_api.intake import Job
from openai_api.reply import Reply
from openai_api.responses import Usage
from openai_api.service import Generation, Service

logger = logging.getLogger(__name__)

_STATE = "disaggregated_params.encoded_opaque_state"


class Ingest:
    """Handles that fit are passed to the engine, which fetches the blocks and replays the first tokens.

    A request without a handle is computed here: routers of other makes send one when the context worker had ended the
    answer at its first token, and the prompt's ids came along.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, job: Job, reply: Reply) -> None:
        if job.params.schedule_style == ScheduleStyle.GENERATION_FIRST and job.params.encoded_opaque_state is None:
            await self._await_handoff(job, reply)
            return
        handle = self._handle(job)
        submit = Submit(
            request_id=job.request_id,
            prompt_ids=job.prompt_ids,
            sampling=job.sampling,
            priority=job.priority,
            handle=handle,
            cache_salt=handle.cache_salt if handle is not None else job.request.cache_salt or "",
        )
        usage = context_usage(job.params, len(job.prompt_ids))
        await self._service.answer(Generation(job, submit, self._service.tokenizer, usage), reply)

    async def _await_handoff(self, job: Job, reply: Reply) -> None:
        """generation_first: room is made now, and the context worker followed while it computes."""
        params = job.params
        handoff_id = params.ctx_request_id or params.disagg_request_id
        if handoff_id is None:
            param = "disaggregated_params.ctx_request_id"
            raise InvalidRequest(f"{param}: missing, needed with schedule_style 1 (generation_first)", param=param)
        param = "disaggregated_params.ctx_info_endpoint"
        try:
            source = join_address(*split_address(params.ctx_info_endpoint or ""))
        except ValueError as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from None
        submit = Submit(
            request_id=job.request_id,
            prompt_ids=job.prompt_ids,
            sampling=job.sampling,
            priority=job.priority,
            awaits=handoff_id,
            source=source,
            cache_salt=job.request.cache_salt or "",
        )
        await self._service.answer(Generation(job, submit, self._service.tokenizer), reply)

    def _handle(self, job: Job) -> Handle | None:
        params = job.params
        if params.encoded_opaque_state is None:
            logger.warning("%s: generation_only without a handle; the prompt is computed here", job.request_id)
            return None
        handle = Handle.decode(params.encoded_opaque_state)
        self._check(handle, job)
        return handle

    def _check(self, handle: Handle, job: Job) -> None:
        """A handle of another model or prompt must not reach the cache: its blocks would be taken for this prompt's."""
        ours = self._service.engine.ready.fingerprint
        if (reason := handle.mismatch(ours.digest(), ours)) is not None:
            raise HandoffRefused(reason, param=_STATE)
        if handle.prompt_tokens != len(job.prompt_ids):
            raise InvalidRequest(
                f"{_STATE}: made for {handle.prompt_tokens} prompt tokens, this prompt has {len(job.prompt_ids)}",
                param=_STATE,
            )
        if sorted(start.index for start in handle.starts) != list(range(job.sampling.n)):
            raise InvalidRequest(f"n: {job.sampling.n}, but the hand-off has {len(handle.starts)} choices", param="n")


def context_usage(params: DisaggregatedParams, prompt_tokens: int) -> Usage | None:
    """What the context worker counted: `ctx_usage` of the request, None without it."""
    if params.ctx_usage is None:
        return None
    try:
        counted = msgspec.convert(params.ctx_usage, _ContextUsage)
    except msgspec.ValidationError as error:
        param = "disaggregated_params.ctx_usage"
        raise InvalidRequest(f"{param}: {error}", param=param) from None
    details = counted.prompt_tokens_details or {}
    cached = details.get("cached_tokens") or 0
    return Usage(counted.prompt_tokens or prompt_tokens, 0, cached if isinstance(cached, int) else 0)


class _ContextUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] | None = None
