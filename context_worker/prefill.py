"""Context-only requests: prefill, sample the first token of each choice, offer the blocks under a handle."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.messages import Submit
from kvstore.errors import InvalidRequest, ServingError
from kvstore.handoff import Handle
from kvstore.protocol import MIN_DISAGG_REQUEST_ID, DisaggregatedParams, RequestType, ScheduleStyle
from openai_api.intake import Job, encode_token_ids
from openai_api.reply import Reply
from openai_api.responses import ChoiceResult, ResponseWriter, best_of
from openai_api.service import Generation, Service, timing_headers

NOT_FINISHED = "not_finished"
"""finish_reason of a choice that a generation worker is to go on with."""


class Prefill:
    """Answers are never streamed: the asker is a router, which needs the handle.

    A choice that its first token ends (EOS, stop id, stop string, max_tokens 1) carries its real finish reason; when
    all choices end so, no handle goes out and no blocks stay pinned.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._local_ids = itertools.count(1)

    async def __call__(self, job: Job, reply: Reply) -> None:
        handoff_id = self._handoff_id(job.params)
        submit = Submit(
            request_id=job.request_id,
            prompt_ids=job.prompt_ids,
            sampling=job.sampling,
            priority=job.priority,
            handoff_id=handoff_id,
            waits_for_reader=job.params.schedule_style == ScheduleStyle.GENERATION_FIRST,
            cache_salt=job.request.cache_salt or "",
        )
        generation = Generation(job, submit, self._service.tokenizer)
        try:
            choices = await self._service.collect(generation)
            handle = generation.handle
            if submit.waits_for_reader:
                handle = None  # its reader has it, and acknowledges it
            elif handle is not None and generation.finished:
                self._service.engine.release_handoff(handoff_id)
                handle = None
            body = self._body(generation, choices, handle, handoff_id)
            await reply.json(body, headers=timing_headers(generation))
        except BaseException as error:
            # Nobody learns of the handle, so nobody would fetch it. A refused request (an id in use) owns no pages.
            if generation.handle is not None or not isinstance(error, ServingError):
                self._service.engine.release_handoff(handoff_id)
            raise

    def _handoff_id(self, params: DisaggregatedParams) -> int:
        asked = params.disagg_request_id
        if asked is None and params.schedule_style == ScheduleStyle.GENERATION_FIRST:
            raise InvalidRequest(
                "disaggregated_params.disagg_request_id: missing, needed with schedule_style 1 (generation_first)",
                param="disaggregated_params.disagg_request_id",
            )
        if asked is None:
            return next(self._local_ids)
        if not MIN_DISAGG_REQUEST_ID <= asked < 2**63:
            raise InvalidRequest(
                f"disaggregated_params.disagg_request_id: {asked} is outside 2**40 to 2**63 - 1",
                param="disaggregated_params.disagg_request_id",
            )
        return asked

    def _body(
        self, generation: Generation, choices: list[ChoiceResult], handle: Handle | None, handoff_id: int
    ) -> bytes:
        job = generation.job
        state = None if handle is None else with_finished(handle, choices).encode()
        if handle is None:  # the answer is complete
            choices = best_of(choices, job.request.choices)
        for choice in choices:
            choice.finish_reason = choice.finish_reason or NOT_FINISHED
            params = DisaggregatedParams(
                request_type=RequestType.CONTEXT_ONLY,
                first_gen_tokens=choice.token_ids,
                ctx_request_id=handoff_id,
                disagg_request_id=handoff_id,
                encoded_opaque_state=state,
                schedule_style=job.params.schedule_style or ScheduleStyle.CONTEXT_FIRST,
            )
            choice.disaggregated_params = msgspec.to_builtins(params)
        writer = ResponseWriter(job, self._service.tokenizer)
        writer.prompt_logprobs = generation.prompt_logprobs
        return writer.body(choices, generation.usage, **self._prompt(job))

    def _prompt(self, job: Job) -> dict[str, Any]:
        """The prompt as token ids, so that the generation worker does not tokenise again."""
        if job.params.return_prompt_token_ids_b64:
            return {"prompt_token_ids_b64": encode_token_ids(job.prompt_ids)}
        return {"prompt_token_ids": job.prompt_ids}


def with_finished(handle: Handle, choices: Sequence[ChoiceResult]) -> Handle:
    """The handle, with the choices marked that a stop string ended: the engine does not know of text."""
    starts = [
        start
        if start.finish_reason or not choices[start.index].finish_reason
        else msgspec.structs.replace(start, finish_reason=choices[start.index].finish_reason)
        for start in handle.starts
    ]
    return msgspec.structs.replace(handle, starts=starts)
