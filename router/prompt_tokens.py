"""The router's own reading of a prompt: token ids as the worker would make them, and their block keys.

Needed by policies that match prefixes. A request whose form the router does not read for certain as the worker would is
sent as it came, and placed by load alone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from kvstore.errors import InvalidRequest
from kvstore.hashing import block_keys
from openai_api.tokenizer import Tokenizer
from router.bodies import ClientBody
from router.policy import Need

logger = logging.getLogger(__name__)

_LONG_PROMPT = 8192  # tokens above which hashing leaves the event loop: about 0.3 ms of work
_CHAT_FIELDS_NOT_READ = frozenset(
    ("chat_template", "documents", "tools", "tool_choice", "reasoning_effort", "thinking", "lora_request")
)
_COMPLETION_FIELDS_NOT_READ = frozenset(("truncate_prompt_tokens", "lora_request", "suffix", "prompt_token_ids"))
_NULL = b"null"


class NotReadable(Exception):
    """The router leaves this prompt to the worker."""


class PromptTokens:
    def __init__(self, tokenizer: Tokenizer, with_keys: bool) -> None:
        self._tokenizer = tokenizer
        self._with_keys = with_keys

    async def read(self, body: ClientBody, block_size: int | None) -> Need:
        """Sets `body.token_ids`, and tells the policies of the prompt. Raises NotReadable, with `body` unchanged."""
        ids = await self.ids(body)
        salt = _text(body, "cache_salt") or ""
        keys: list[bytes] = []
        if self._with_keys and block_size is not None:
            if len(ids) > _LONG_PROMPT:
                keys = await asyncio.to_thread(block_keys, ids, block_size, salt)
            else:
                keys = block_keys(ids, block_size, salt)
        body.token_ids = msgspec.json.encode(ids)
        return Need(len(ids), keys, block_size or 0)

    async def ids(self, body: ClientBody) -> list[int]:
        """The prompt as the worker will read it. Raises NotReadable."""
        ids = await (self._chat_ids(body) if body.chat else self._completion_ids(body))
        if not ids:
            raise NotReadable("empty prompt")
        return ids

    async def _completion_ids(self, body: ClientBody) -> list[int]:
        _refuse(body, _COMPLETION_FIELDS_NOT_READ)
        prompt = _decoded(body.prompt) if body.prompt is not None else None
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return await self._tokenizer.encode_async(prompt, _flag(body, "add_special_tokens", True))
        if isinstance(prompt, list) and all(type(token) is int and 0 <= token < 2**31 for token in prompt):
            return prompt
        raise NotReadable("prompt is neither a text nor token ids")

    async def _chat_ids(self, body: ClientBody) -> list[int]:
        _refuse(body, _CHAT_FIELDS_NOT_READ)
        if _given(body, "prompt_token_ids") or _given(body, "prompt_token_ids_b64"):
            raise NotReadable("the client sent token ids")
        template = self._tokenizer.chat_template
        messages = _decoded(body.fields["messages"]) if "messages" in body.fields else None
        if template is None or not isinstance(messages, list) or not all(map(_is_plain_message, messages)):
            raise NotReadable("messages are not plain texts")
        variables = _decoded(body.fields["chat_template_kwargs"]) if _given(body, "chat_template_kwargs") else None
        if variables is not None and not isinstance(variables, dict):
            raise NotReadable("chat_template_kwargs")
        try:
            text = template.render(
                messages,
                add_generation_prompt=_flag(body, "add_generation_prompt", True),
                variables=variables,
            )
        except InvalidRequest as error:
            raise NotReadable(str(error)) from None
        return await self._tokenizer.encode_async(text, _flag(body, "add_special_tokens", False))


def prompt_text(body: ClientBody) -> str:
    """What is said in a prompt, as one text that grows at its end from turn to turn; "" where it is no text."""
    try:
        if not body.chat:
            prompt = _decoded(body.prompt) if body.prompt is not None else None
            return prompt if isinstance(prompt, str) else ""
        messages = _decoded(body.fields["messages"]) if "messages" in body.fields else None
    except NotReadable:
        return ""
    if not isinstance(messages, list):
        return ""
    said = [message.get("content") for message in messages if isinstance(message, dict)]
    return "\0".join(part if isinstance(part, str) else repr(part) for part in said)


def conversation_of(body: ClientBody, named_by_header: str) -> str:
    """The client's name for the conversation: its own field, then headers, then fields of other APIs; "" without."""
    for field, inner in (("conversation_params", "conversation_id"), (None, None), ("prompt_cache_key", None)):
        if field is None:
            if named_by_header:
                return named_by_header
            continue
        name = _named(body, field, inner)
        if name:
            return name
    return _named(body, "client_metadata", "session_id")


def _named(body: ClientBody, field: str, inner: str | None) -> str:
    if field not in body.fields:
        return ""
    value = _decoded(body.fields[field])
    if inner is not None:
        value = value.get(inner) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""


def _is_plain_message(message: Any) -> bool:
    """Text alone. Other fields reach the template as they are, here as in the worker."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        )
    return content is None or isinstance(content, str)


def _given(body: ClientBody, name: str) -> bool:
    raw = body.fields.get(name)
    return raw is not None and bytes(raw) != _NULL


def _refuse(body: ClientBody, names: frozenset[str]) -> None:
    for name in names & body.fields.keys():
        if _given(body, name):
            raise NotReadable(f"{name} is given")


def _flag(body: ClientBody, name: str, default: bool) -> bool:
    if not _given(body, name):
        return default
    value = _decoded(body.fields[name])
    if not isinstance(value, bool):
        raise NotReadable(f"{name} is not a boolean")
    return value


def _text(body: ClientBody, name: str) -> str | None:
    if not _given(body, name):
        return None
    value = _decoded(body.fields[name])
    if not isinstance(value, str):
        raise NotReadable(f"{name} is not a text")
    return value


def _decoded(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise NotReadable("not JSON") from None
