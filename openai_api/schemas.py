"""Request bodies of /v1/completions and /v1/chat/completions.

Fields that no one knows are ignored. Fields of OpenAI's and TensorRT-LLM's requests that this build does not implement
are accepted at their neutral value and refused otherwise: silence would change the answer. Labels (`user`, ...) are
ignored, since no answer depends on them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from kvstore.errors import InvalidRequest

MAX_CHOICES = 8
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_BIASES = 1024
MAX_BAD_WORDS = 128

_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "echo": ((None, False), "false"),
    "suffix": ((None, ""), "leave it out"),
    "use_beam_search": ((None, False), "false: max_beam_width is 1 here; best_of ranks sampled answers"),
    "truncate_prompt_tokens": ((None,), "leave it out"),
    "return_context_logits": ((None, False), "false"),
    "detokenize": ((None, True), "true; return_token_ids adds the ids"),
    "lora_request": ((None,), "leave it out"),
    "thinking_token_budget": ((None,), "leave it out"),
    "chat_template": ((None,), "leave it out; the model's own template is used"),
    "functions": ((None, []), "leave it out"),
    "function_call": ((None, "none"), '"none"'),
    "modalities": ((None, ["text"]), '["text"]'),
    "audio": ((None,), "leave it out"),
    "media_io_kwargs": ((None, {}), "leave it out"),
    "mm_processor_kwargs": ((None, {}), "leave it out"),
}
"""Field to (values that change nothing, what to send instead)."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    """OpenAI's default: no usage unless asked for. (TensorRT-LLM's own default is true.)"""
    continuous_usage_stats: bool = False


class SamplingFields(BaseModel):
    """What both requests have in common."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_p_decay: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    """`top_p` is multiplied by this after each token and never falls below `top_p_min` (TensorRT-LLM's meaning)."""
    top_p_min: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, le=100, allow_inf_nan=False)
    """Of tokens that are in the prompt or the answer; the other two penalties see the answer only."""
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    """Words that the answer must not contain, as the tokenizer writes them, with and without a space before."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None
    """Processed: of the logits after bias, penalties, bans and grammar, before temperature and cuts."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    """Answers that are generated; the `n` of the highest sum of log-probabilities are given, best first."""
    stop: Annotated[list[str], Field(max_length=MAX_STOPS)] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = Field(None, ge=0)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    priority: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    """Higher goes first on workers whose `waiting_queue_policy` is priority; 0.5 if not given. Others do not look."""
    return_token_ids: bool | None = None
    disaggregated_params: dict[str, Any] | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def candidates(self) -> int:
        """Answers to generate."""
        return self.best_of or self.choices

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(SamplingFields):
    prompt: str | list[Any]
    prompt_token_ids: list[int] | None = None
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """Other fields (name, tool_calls, ...) go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None


class ChatCompletionRequest(SamplingFields):
    messages: list[ChatMessage] = Field(min_length=1)
    prompt_token_ids: list[int] | None = None
    prompt_token_ids_b64: str | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None


RequestT = TypeVar("RequestT", CompletionRequest, ChatCompletionRequest)


def parse_body(body: bytes, schema: type[RequestT]) -> RequestT:
    """InvalidRequest names the first offending field, its value, and what is allowed."""
    try:
        request = schema.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise _first_problem(error) from None
    _check_neutral(request)
    _check_together(request)
    return request


def _check_neutral(request: SamplingFields) -> None:
    extra = request.model_extra or {}
    for name, value in extra.items():
        if name not in _NEUTRAL:
            continue
        neutral, advice = _NEUTRAL[name]
        if value not in neutral:
            raise _refused(name, value, advice)


def _check_together(request: SamplingFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options: only allowed with stream: true", param="stream_options")
    if "" in request.stops:
        raise InvalidRequest("stop: an empty string stops nothing; give text", param="stop")
    if "" in (request.bad_words or ()):
        raise InvalidRequest("bad_words: an empty string bans nothing; give text", param="bad_words")
    if len(request.logit_bias or ()) > MAX_BIASES:
        count = len(request.logit_bias or ())
        raise InvalidRequest(f"logit_bias: {count} tokens; at most {MAX_BIASES} are allowed", param="logit_bias")
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs: not with stream: true", param="prompt_logprobs")
    _check_best_of(request)
    if isinstance(request, ChatCompletionRequest):
        _check_chat(request)
    elif isinstance(request, CompletionRequest):
        _check_completion(request)


def _check_best_of(request: SamplingFields) -> None:
    if request.best_of is None or request.best_of == request.choices:
        return
    if request.best_of < request.choices:
        raise InvalidRequest(f"best_of: {request.best_of} is less than n ({request.choices})", param="best_of")
    if request.stream:
        raise InvalidRequest("best_of: more than n is not possible with stream: true", param="best_of")


def _check_completion(request: CompletionRequest) -> None:
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        raise InvalidRequest("max_tokens: 0 is only allowed with echo or prompt_logprobs", param="max_tokens")


def _check_chat(request: ChatCompletionRequest) -> None:
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs: only allowed with logprobs: true", param="top_logprobs")
    for place, message in enumerate(request.messages):
        if message.content is None and message.role != "assistant":
            param = f"messages[{place}].content"
            raise InvalidRequest(f"{param}: missing, but required for role {message.role!r}", param=param)
    if request.tools and request.tool_choice != "none":
        raise _refused("tools", f"{len(request.tools)} tools", 'leave it out, or tool_choice: "none"')
    if not request.tools and request.tool_choice not in (None, "none", "auto"):
        raise _refused("tool_choice", request.tool_choice, '"none"')
    short, long = request.max_tokens, request.max_completion_tokens
    if short is not None and long is not None and short != long:
        raise InvalidRequest(
            f"max_tokens: {short} contradicts max_completion_tokens: {long}; give one of them", param="max_tokens"
        )


def _refused(name: str, value: Any, advice: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {_shown(value)} is not supported by this build; supported: {advice}", param=name)


def _first_problem(error: pydantic.ValidationError) -> InvalidRequest:
    problems = error.errors(include_url=False, include_context=False)
    field = problems[0]["loc"][:1]
    # Of a field with several forms the deepest complaint is about the form that was meant.
    problem = max((found for found in problems if found["loc"][:1] == field), key=lambda found: len(found["loc"]))
    if problem["type"] == "json_invalid":
        return InvalidRequest(f"the request body is not JSON: {problem['msg'].removeprefix('Invalid JSON: ')}")
    param = _param(problem["loc"])
    if not param:
        return InvalidRequest("the request body must be a JSON object")
    if problem["type"] == "missing":
        return InvalidRequest(f"{param}: missing, but required", param=param)
    allowed = _readable(problem["msg"])
    return InvalidRequest(f"{param}: {_shown(problem['input'])} is not allowed: {allowed}", param=param)


def _param(location: tuple[int | str, ...]) -> str:
    """messages[0].role, without pydantic's names of union members."""
    text = ""
    for step in location:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "dict", "list"):
            text += f".{step}" if text else step
    return text


def _readable(message: str) -> str:
    """Pydantic's sentence without names of Python types."""
    message = message.removeprefix("Value error, ").removeprefix("Input ")
    if "dictionary" in message or "instance of" in message:
        return "should be a JSON object"
    return message.replace("valid list", "valid array").replace("valid integer, unable", "valid integer; unable")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
