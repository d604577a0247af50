"""Requests from their arrival to the scheduler's queue: checked, their grammar compiled, or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from engine.exchange import Exchange
from engine.guided import GuideCompiled, GuideCompiler
from engine.messages import Failed, Submit
from engine.offers import Offers
from engine.readers import Readers
from engine.scheduler import Scheduler
from engine.sequence import Capacity, ModelFacts, Phase, Request, open_request
from kvstore.errors import InvalidRequest, ServingError

log = logging.getLogger(__name__)


class Reception:
    """`requests` holds every open request of the engine by its id; whoever ends one removes it there."""

    def __init__(
        self,
        scheduler: Scheduler,
        exchange: Exchange,
        offers: Offers,
        readers: Readers,
        facts: ModelFacts,
        capacity: Capacity,
        guides: GuideCompiler | None,
        post: Callable[[GuideCompiled], None],
        say: Callable[[Any], None],
        fail: Callable[[Request, ServingError], None],
        clock: Callable[[], float],
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.guides = guides
        self._scheduler = scheduler
        self._exchange = exchange
        self._offers = offers
        self._readers = readers
        self._facts = facts
        self._capacity = capacity
        self._post = post
        self._say = say
        self._fail = fail
        self._clock = clock

    def close(self, timeout: float) -> None:
        if self.guides is not None:
            self.guides.close(timeout)

    def submit(self, submit: Submit) -> None:
        if submit.request_id in self.requests:
            log.error("request id %s is in use; the second request is ignored", submit.request_id)
            return
        try:
            if submit.handoff_id is not None and self._is_handoff_in_use(submit.handoff_id):
                raise InvalidRequest(f"disagg_request_id: {submit.handoff_id} is in use", param="disaggregated_params")
            request = open_request(submit, self._clock(), self._facts, self._capacity)
        except ServingError as error:
            self._say(Failed(submit.request_id, error.code, error.message, error.param))
            return
        self.requests[request.id] = request
        self._exchange.accept(request)
        guided = request.sampling.guided
        if guided is None:
            self._enqueue(request)
            return
        request.phase = Phase.COMPILING
        if self.guides is None:
            self._refuse_guided(request, "this worker has no guided_decoding_backend")
        else:
            self.guides.compile(request.id, guided, self._post)

    def compiled(self, result: GuideCompiled) -> None:
        assert self.guides is not None
        self.guides.keep(result)
        request = self.requests.get(result.request_id)
        if request is None or request.phase is not Phase.COMPILING or request.sampling.guided != result.wanted:
            return  # aborted meanwhile
        request.grammar = result.grammar
        if result.grammar is None:
            self._refuse_guided(request, result.error)
        else:
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        if not self._readers.hold(request):
            self._scheduler.add(request)

    def _refuse_guided(self, request: Request, reason: str) -> None:
        self._fail(request, InvalidRequest(f"response_format: {reason}", param="response_format"))

    def _is_handoff_in_use(self, handoff_id: int) -> bool:
        return handoff_id in self._offers.table or any(
            request.handoff_id == handoff_id for request in self.requests.values()
        )
