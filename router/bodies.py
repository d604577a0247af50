"""Request bodies of the two legs, and the context leg's answer. Members that the router does not need stay raw bytes.

Only what the router itself takes out or rewrites is validated here; all other fields are the worker's to judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from kvstore.errors import InvalidRequest, ServingError, openai_error_body
from kvstore.protocol import RequestType, ScheduleStyle

_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_NULL = b"null"
_GOES_ON = ("not_finished", "length")

COMPLETIONS = b"/v1/completions"
CHAT = b"/v1/chat/completions"


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _refuse_what_cannot_stream(fields: dict[str, Raw]) -> None:
    """The context leg does not stream, so its worker cannot tell that these go with no stream."""
    if bytes(fields.get("prompt_logprobs", _NULL)) != _NULL:
        raise InvalidRequest("prompt_logprobs: not with stream: true", param="prompt_logprobs")
    best_of = bytes(fields.get("best_of", _NULL))
    choices = bytes(fields.get("n", _NULL))
    if best_of not in (_NULL, b"1" if choices == _NULL else choices):
        raise InvalidRequest("best_of: other than n is not possible with stream: true", param="best_of")


class ClientBody:
    """A client's request. `token_ids`, once set, replace the text on both legs."""

    __slots__ = ("_common", "chat", "fields", "include_usage", "prompt", "stream", "stream_members", "token_ids")

    def __init__(self, body: bytes, chat: bool) -> None:
        """Raises InvalidRequest unless `body` is a JSON object with sound `stream` and `stream_options`."""
        self.chat = chat
        self.fields = fields = _decode(body)
        fields.pop("disaggregated_params", None)  # hand-off parameters are between router and workers
        self.stream_members = b""
        self.stream = self.include_usage = False
        if "stream" in fields or "stream_options" in fields:
            self._take_stream(fields)
        self.prompt = None if chat else fields.pop("prompt", None)
        self.token_ids: bytes | None = None
        self._common = b""

    def _take_stream(self, fields: dict[str, Raw]) -> None:
        """The context leg never streams, so these two members travel on the generation leg alone."""
        stream = bytes(fields.pop("stream", _NULL))
        options = bytes(fields.pop("stream_options", _NULL))
        if stream not in (b"true", b"false", _NULL):
            raise InvalidRequest(f"stream: {_excerpt(stream)} is not a boolean", param="stream")
        self.stream = stream == b"true"
        if stream != _NULL:
            self.stream_members = b'"stream":' + stream + b","
        if self.stream:
            _refuse_what_cannot_stream(fields)
        if options == _NULL:
            return
        if not self.stream:
            raise InvalidRequest("stream_options: only allowed when stream is true", param="stream_options")
        try:
            decoded = msgspec.json.decode(options, type=StreamOptions)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"stream_options: {error}", param="stream_options") from None
        self.include_usage = bool(decoded.include_usage)
        self.stream_members += b'"stream_options":' + options + b","

    @property
    def only_one_token(self) -> bool:
        """The client asked for no more than the token that prefill gives."""
        limit = self.fields.get("max_completion_tokens" if self.chat else "max_tokens") or self.fields.get("max_tokens")
        return limit is not None and bytes(limit) == b"1"

    @property
    def wants_prompt_ids(self) -> bool:
        wanted = self.fields.get("return_token_ids")
        return wanted is not None and bytes(wanted) == b"true"

    def context_leg(
        self, disagg_request_id: int, style: ScheduleStyle = ScheduleStyle.CONTEXT_FIRST
    ) -> list[bytes | Raw]:
        """Parts of the body. Sampling, stop and max_tokens stay as they are: the request type ends the leg."""
        return [
            self._open(),
            *self._prompt_members(self.token_ids),
            b'"stream":false,' if self.stream else b"",
            b'"disaggregated_params":{"request_type":"%b","disagg_request_id":%d,"schedule_style":%d}}'
            % (RequestType.CONTEXT_ONLY.encode(), disagg_request_id, style),
        ]

    def generation_leg(self, answer: ContextAnswer) -> list[bytes | Raw]:
        return [
            self._open(),
            *self._prompt_members(answer.prompt_ids() or self.token_ids),
            self.stream_members,
            b'"disaggregated_params":',
            answer.generation_params(),
            b"}",
        ]

    def generation_first_leg(self, params: Mapping[str, Any]) -> list[bytes | Raw]:
        """The context leg is under way: `params` say where, and under which id."""
        return [
            self._open(),
            *self._prompt_members(self.token_ids),
            self.stream_members,
            b'"disaggregated_params":',
            msgspec.json.encode(params),
            b"}",
        ]

    def local_leg(self) -> list[bytes | Raw]:
        """For a generation worker that does it all."""
        members = self._prompt_members(self.token_ids)
        return [self._open(), *members, self.stream_members, b'"disaggregated_params":null}']

    def _open(self) -> bytes:
        """All members that both legs share, without the closing brace."""
        if not self._common:
            if self.chat and self.token_ids is not None:
                self.fields.pop("prompt_token_ids", None)
            members = msgspec.json.encode(self.fields)[:-1]
            self._common = members + b"," if len(members) > 1 else members
        return self._common

    def _prompt_members(self, token_ids: bytes | Raw | None) -> tuple[bytes | Raw, ...]:
        if self.chat:
            if token_ids is None or "prompt_token_ids" in self.fields:
                return ()
            return (b'"prompt_token_ids":', token_ids, b",")
        prompt = token_ids if token_ids is not None else self.prompt
        return () if prompt is None else (b'"prompt":', prompt, b",")


def _decode(body: bytes) -> dict[str, Raw]:
    if not body or body.isspace():
        raise InvalidRequest("the request body is empty: a JSON object is expected")
    try:
        return _FIELDS.decode(body)
    except msgspec.ValidationError:
        raise InvalidRequest("the request body is not a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None


def _excerpt(raw: bytes) -> str:
    return raw[:40].decode(errors="replace")


# ---------------------------------------------------------------- the context leg's answer


class BadContextAnswer(ValueError):
    """A context worker's answer that cannot be handed to a generation worker."""


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    disaggregated_params: dict[str, Raw] | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: Raw = Raw(_NULL)
    prompt_token_ids: Raw = Raw(_NULL)
    prompt_token_ids_b64: Raw = Raw(_NULL)


_ANSWER = msgspec.json.Decoder(_Answer)
_GENERATION_PARAMS = {
    "request_type": Raw(b'"%b"' % RequestType.GENERATION_ONLY.encode()),
    "schedule_style": Raw(b"%d" % ScheduleStyle.CONTEXT_FIRST),
}


class ContextAnswer:
    """`params` are those of the first choice that goes on, None when every choice ended during prefill."""

    __slots__ = ("_answer", "body", "params")

    def __init__(self, body: bytes, only_one_token: bool, hands_over: bool = True) -> None:
        """Raises BadContextAnswer for an answer without what the generation leg needs, if it is to `hands_over`."""
        self.body = body
        try:
            self._answer = _ANSWER.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadContextAnswer(f"not a completion: {error}") from None
        if not self._answer.choices:
            raise BadContextAnswer("no choices")
        self.params: dict[str, Raw] | None = None
        for index, choice in enumerate(self._answer.choices):
            if hands_over and self.params is None and _goes_on(choice, index, only_one_token):
                self.params = choice.disaggregated_params

    def generation_params(self) -> bytes:
        """`disaggregated_params` of the generation leg: the context worker's own, with the leg's type and usage."""
        assert self.params is not None
        params = self.params | _GENERATION_PARAMS
        if bytes(self._answer.usage) != _NULL:
            params["ctx_usage"] = self._answer.usage
        return msgspec.json.encode(params)

    def signed_fields(self) -> tuple[str | None, str | None]:
        """`ctx_info_endpoint` and `encoded_opaque_state`, for the signature. Raises BadContextAnswer."""
        params = self.params or {}
        try:
            endpoint, state = (
                msgspec.json.decode(params.get(name, Raw(_NULL)), type=str | None)
                for name in ("ctx_info_endpoint", "encoded_opaque_state")
            )
        except msgspec.MsgspecError as error:
            raise BadContextAnswer(f"disaggregated_params: {error}") from None
        return endpoint, state

    def prompt_ids(self) -> bytes | None:
        """The prompt's token ids as a JSON list; None if the worker did not tell them."""
        ids = bytes(self._answer.prompt_token_ids)
        if not ids.startswith(b"[["):
            return None if ids == _NULL else ids
        rows = msgspec.json.decode(ids, type=list[Raw])
        if len(rows) != 1:
            raise BadContextAnswer(f"prompt_token_ids of {len(rows)} prompts")
        return bytes(rows[0])

    def cached_tokens(self) -> int:
        """Prompt tokens that the context worker did not compute, as it reports them."""
        try:
            usage = msgspec.json.decode(self._answer.usage, type=Usage)
        except msgspec.MsgspecError:
            return 0
        return (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0

    def without_handoff(self, keep_prompt_ids: bool) -> bytes:
        """The answer as a client may see it: no hand-off parameters, and prompt ids only if asked for."""
        answer = _FIELDS.decode(self.body)
        if not keep_prompt_ids:
            answer.pop("prompt_token_ids", None)
        answer.pop("prompt_token_ids_b64", None)
        choices = msgspec.json.decode(answer["choices"], type=list[dict[str, Raw]])
        for choice in choices:
            choice.pop("disaggregated_params", None)
        return msgspec.json.encode({**answer, "choices": choices})


def _goes_on(choice: _Choice, index: int, only_one_token: bool) -> bool:
    """Whether decoding is to continue.

    "not_finished" says so. Workers of other makes end the leg with "length" whatever limit the client set: that goes on
    when there is KV to hand over and the client wants more than the one token.
    """
    if choice.finish_reason not in _GOES_ON:
        return False
    params = choice.disaggregated_params or {}
    if choice.finish_reason == "length":
        offers_kv = any(_is_set(params, name) for name in ("encoded_opaque_state", "ctx_info_endpoint"))
        if only_one_token or not offers_kv:
            return False
    for name in ("ctx_request_id", "disagg_request_id"):
        if not _is_set(params, name):
            raise BadContextAnswer(f"choices[{index}].disaggregated_params.{name} is missing")
    return True


def _is_set(params: dict[str, Raw], name: str) -> bool:
    value = params.get(name)
    return value is not None and bytes(value) != _NULL


# ---------------------------------------------------------------- errors as bodies


class _WorkerError(msgspec.Struct):
    error: Any = None
    message: str | None = None


def is_openai_error(body: bytes) -> bool:
    """Whether a worker's body is already what clients are to see."""
    try:
        return isinstance(msgspec.json.decode(body, type=_WorkerError).error, dict)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False


def worker_message(body: bytes) -> str | None:
    """The message in an error body of another make, None when there is none to be found."""
    try:
        return msgspec.json.decode(body, type=_WorkerError).message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def error_body(error: ServingError) -> bytes:
    return msgspec.json.encode(openai_error_body(error))
