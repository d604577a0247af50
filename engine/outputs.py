"""What the engine tells of a token that was drawn, or came with a hand-off."""

from __future__ import annotations

from engine.messages import Output
from engine.sequence import Choice, logprobs_of
from engine.step import Sampled
from kvstore.handoff import StartState


def output_of(choice: Choice, drawn: Sampled, stop: int | None) -> Output:
    """The first one of a request also tells about the whole request."""
    request = choice.request
    output = Output(
        request_id=request.id,
        index=choice.index,
        token_ids=[drawn.token],
        logprobs=logprobs_of(drawn),
        finish_reason=choice.finish_reason,
        stop_reason=stop,
    )
    if not request.announced:
        request.announced = True
        output.cached_tokens = request.cached_tokens
        output.timing = request.timing
        if request.sampling.prompt_logprobs is not None:
            output.prompt_logprobs = request.prompt_logprobs
    return output


def start_of(choice: Choice, drawn: Sampled, stop: int | None) -> StartState:
    return StartState(
        index=choice.index,
        token=drawn.token,
        seed=choice.seed,
        finish_reason=choice.finish_reason,
        stop_reason=stop,
        logprob=drawn.logprob,
        top_logprobs=drawn.top,
    )
