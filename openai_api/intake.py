"""From a request body to a `Job`: checked fields, prompt token ids, sampling parameters with their limits."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import secrets
import sys
import time
import uuid
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.messages import SamplingParams
from kvstore.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from kvstore.protocol import DisaggregatedParams
from openai_api.assembly import TextRules
from openai_api.reasoning import ReasoningForm
from openai_api.response_format import guided_decoding
from openai_api.schemas import ChatCompletionRequest, CompletionRequest, SamplingFields, parse_body
from openai_api.tokenizer import Tokenizer

MAX_PROMPTS = 128
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; chat goes on to the end of the context."""


@dataclasses.dataclass(slots=True)
class Job:
    """One request, ready for an engine."""

    chat: bool
    request: CompletionRequest | ChatCompletionRequest
    params: DisaggregatedParams
    prompt_ids: list[int]
    sampling: SamplingParams
    text: TextRules
    logprobs: bool  # the answer carries them
    model: str  # the served name, whatever alias was asked for
    request_id: str
    created: int  # Unix seconds
    received: float  # time.monotonic()
    return_metrics: bool = False
    answer_id: str = ""  # of the response that this is a part of
    others: list[Job] = dataclasses.field(default_factory=list)  # of the request's further prompts, in order

    @property
    def stream(self) -> bool:
        return bool(self.request.stream)

    @property
    def priority(self) -> float:
        return 0.5 if self.request.priority is None else self.request.priority


@dataclasses.dataclass(frozen=True, slots=True)
class ModelLimits:
    max_seq_len: int  # prompt and answer together, tokens
    vocab_size: int
    eos_token_ids: Sequence[int]


class Intake:
    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        served_name: str,
        aliases: Sequence[str] = (),
        reasoning: ReasoningForm | None = None,
    ) -> None:
        """`reasoning`: how chats tell it from the answer, None if they do not."""
        self._reasoning = reasoning
        self._tokenizer = tokenizer
        self._limits = limits
        self.served_name = served_name
        self._names = {served_name, *aliases}

    async def completion(self, body: bytes) -> Job:
        request = parse_body(body, CompletionRequest)
        self._check_model(request)
        first, *others = [self._job(request, ids, "prompt") for ids in await self._completion_prompts(request)]
        for job in others:
            job.answer_id = first.answer_id
        first.others = others
        return first

    async def chat(self, body: bytes) -> Job:
        request = parse_body(body, ChatCompletionRequest)
        self._check_model(request)
        return self._job(request, await self._chat_prompt(request), "messages")

    def _check_model(self, request: SamplingFields) -> None:
        if request.model not in self._names:
            raise ModelNotFound(
                f"model: {request.model!r} is not served here; served: {self.served_name!r}", param="model"
            )

    def _job(self, request: CompletionRequest | ChatCompletionRequest, ids: list[int], param: str) -> Job:
        self._check_prompt(ids, param)
        chat = isinstance(request, ChatCompletionRequest)
        params = _disaggregated(request.disaggregated_params)
        request_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        return Job(
            chat=chat,
            request=request,
            params=params,
            prompt_ids=ids,
            sampling=self._sampling(request, len(ids)),
            text=TextRules(
                stops=tuple(request.stops),
                include_stop=request.include_stop_str_in_output,
                min_tokens=request.min_tokens or 0,
                skip_special_tokens=request.skip_special_tokens,
                eos_token_ids=() if request.ignore_eos else frozenset(self._limits.eos_token_ids),
                reasoning=self._reasoning if chat else None,
                discard=request.max_tokens == 0,
            ),
            logprobs=_logprobs(request) is not None,
            model=self.served_name,
            request_id=request_id,
            answer_id=request_id,
            created=int(time.time()),
            received=time.monotonic(),
        )

    # ------------------------------------------------------------ prompt

    async def _completion_prompts(self, request: CompletionRequest) -> list[list[int]]:
        if request.prompt_token_ids is not None:
            return [request.prompt_token_ids]
        prompt: Any = request.prompt
        if isinstance(prompt, str) or not all(isinstance(item, str | list) for item in prompt) or not prompt:
            return [await self._prompt_ids(prompt, request)]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequest(f"prompt: {len(prompt)} prompts; at most {MAX_PROMPTS} a request", param="prompt")
        return [await self._prompt_ids(one, request) for one in prompt]

    async def _prompt_ids(self, prompt: Any, request: CompletionRequest) -> list[int]:
        if isinstance(prompt, str):
            return await self._tokenizer.encode_async(prompt, request.add_special_tokens)
        if all(type(token) is int for token in prompt):
            return list(prompt)
        raise InvalidRequest("prompt: must be a string, an array of token ids, or an array of these", param="prompt")

    async def _chat_prompt(self, request: ChatCompletionRequest) -> list[int]:
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        if request.prompt_token_ids_b64 is not None:
            return decode_token_ids(request.prompt_token_ids_b64)
        template = self._tokenizer.chat_template
        if template is None:
            raise InvalidRequest("messages: this model has no chat template; use /v1/completions", param="messages")
        text = template.render(
            [message.model_dump(exclude_unset=True) for message in request.messages],
            add_generation_prompt=request.add_generation_prompt,
            documents=request.documents,
            variables=request.chat_template_kwargs,
        )
        return await self._tokenizer.encode_async(text, request.add_special_tokens)

    def _check_prompt(self, ids: list[int], param: str) -> None:
        if not ids:
            raise InvalidRequest(f"{param}: empty; at least one token is needed", param=param)
        if min(ids) < 0 or max(ids) >= self._limits.vocab_size:
            bad = next(token for token in ids if not 0 <= token < self._limits.vocab_size)
            raise InvalidRequest(
                f"{param}: token id {bad} is outside the vocabulary (0 to {self._limits.vocab_size - 1})", param=param
            )
        if len(ids) >= self._limits.max_seq_len:
            raise ContextLengthExceeded(
                f"{param}: {len(ids)} prompt tokens; this model's context is {self._limits.max_seq_len} tokens, "
                "of which at least one is for the answer",
                param=param,
            )

    # ------------------------------------------------------------ sampling

    def _sampling(self, request: CompletionRequest | ChatCompletionRequest, prompt_tokens: int) -> SamplingParams:
        max_tokens = self._max_tokens(request, prompt_tokens)
        min_tokens = request.min_tokens or 0
        if min_tokens > max_tokens:
            raise InvalidRequest(f"min_tokens: {min_tokens} is more than max_tokens ({max_tokens})", param="min_tokens")
        guided = guided_decoding(request.model_extra or {})
        if guided is not None and request.ignore_eos:
            raise InvalidRequest("ignore_eos: an answer that must match a format ends with it", param="ignore_eos")
        logprobs = _logprobs(request)
        if logprobs is None and request.candidates > request.choices:
            logprobs = 0  # to rank them
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(request.top_k or 0, 0),
            min_p=request.min_p or 0.0,
            top_p_decay=request.top_p_decay or 1.0,
            top_p_min=request.top_p_min or 0.0,
            repetition_penalty=request.repetition_penalty or 1.0,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=self._logit_bias(request),
            bad_words=[ids for word in request.bad_words or () for ids in self._bad_word(word)],
            seed=secrets.randbits(63) if request.seed is None else request.seed % 2**63,
            n=request.candidates,
            stop_token_ids=[self._known(token, "stop_token_ids") for token in request.stop_token_ids or ()],
            ignore_eos=request.ignore_eos,
            min_tokens=min_tokens,
            logprobs=logprobs,
            prompt_logprobs=_prompt_logprobs(request),
            processed_logprobs=request.logprobs_mode == "processed_logprobs",
            guided=guided,
        )

    def _known(self, token: int, param: str) -> int:
        last = self._limits.vocab_size - 1
        if not 0 <= token <= last:
            raise InvalidRequest(f"{param}: {token} is outside the vocabulary (0 to {last})", param=param)
        return token

    def _logit_bias(self, request: SamplingFields) -> dict[int, float]:
        bias = {}
        for key, value in (request.logit_bias or {}).items():
            if not key.isdecimal():
                raise InvalidRequest(f"logit_bias: {key!r} is no token id", param="logit_bias")
            bias[self._known(int(key), "logit_bias")] = value
        return bias

    def _bad_word(self, word: str) -> list[list[int]]:
        """The word's tokens at the start of a text, and those after a space where these do not end with the former."""
        bare = word.lstrip() or word
        plain = self._tokenizer.encode(bare, add_special_tokens=False)
        spaced = self._tokenizer.encode(f" {bare}", add_special_tokens=False)
        return [plain] if spaced[-len(plain) :] == plain else [plain, spaced]

    def _max_tokens(self, request: CompletionRequest | ChatCompletionRequest, prompt_tokens: int) -> int:
        """A limit that was asked for and does not fit is refused; a default is cut to what fits."""
        room = self._limits.max_seq_len - prompt_tokens
        if isinstance(request, ChatCompletionRequest):
            name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
            asked, default = request.max_completion_tokens or request.max_tokens, room
        else:
            name, asked, default = "max_tokens", request.max_tokens, COMPLETION_MAX_TOKENS
        if asked is None:
            return min(default, room)
        if asked == 0:
            return 1  # drawn and thrown away: the prompt is what was asked about
        if asked > room:
            raise ContextLengthExceeded(
                f"{name}: {asked} with {prompt_tokens} prompt tokens is {asked + prompt_tokens}; this model's context "
                f"is {self._limits.max_seq_len} tokens",
                param=name,
            )
        return asked


def _logprobs(request: CompletionRequest | ChatCompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    return (request.top_logprobs or 0) if request.logprobs else None


def _prompt_logprobs(request: CompletionRequest | ChatCompletionRequest) -> int | None:
    if request.prompt_logprobs is None and isinstance(request, CompletionRequest) and request.echo:
        return request.logprobs
    return request.prompt_logprobs


def _disaggregated(params: dict[str, Any] | None) -> DisaggregatedParams:
    try:
        parsed = msgspec.convert(params or {}, DisaggregatedParams)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        param = "disaggregated_params" + place.rstrip("`")
        raise InvalidRequest(f"{param}: {reason}", param=param) from None
    if parsed.request_type is not None:
        parsed.request_type = parsed.request_type.lower()
    return parsed


def decode_token_ids(text: str) -> list[int]:
    """Token ids from base64 of little-endian int32."""
    param = "prompt_token_ids_b64"
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{param}: not base64 ({error})", param=param) from None
    if len(data) % 4:
        raise InvalidRequest(f"{param}: {len(data)} bytes are no whole number of int32", param=param)
    ids = array("i", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def encode_token_ids(ids: Sequence[int]) -> str:
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()
