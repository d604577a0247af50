"""Chat messages to prompt text by the model's own Jinja template, in a sandbox: templates come with checkpoints.

The environment is the one that templates are written for (transformers' `apply_chat_template`): trimmed blocks, loop
controls, `{% generation %}` blocks, `tojson` that keeps characters as they are, `raise_exception`, `strftime_now`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from kvstore.errors import InvalidRequest, SettingsError

_PROBE = ("probe-one", "probe-two")


class ChatTemplate:
    """One compiled template. `takes_parts`: it reads content given as a list of parts; others get plain text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise SettingsError([("chat_template", f"not a Jinja template: {error}")]) from None
        self.takes_parts = self._reads_parts()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. InvalidRequest(param "messages") when the template refuses the conversation."""
        try:
            text: str = self._template.render(
                self._special_tokens
                | {"tools": None, "documents": documents}
                | dict(variables or {})
                | {
                    "messages": [self._adapted(message) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # noqa: BLE001 - a template is foreign code: whatever it raises, it refuses the chat
            raise InvalidRequest(
                f"messages: the model's chat template does not accept this conversation: {error}", param="messages"
            ) from None
        return text

    def _adapted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message in the template's form of content: parts, or their texts on lines of their own."""
        adapted = {name: value for name, value in message.items() if value is not None}
        content = adapted.setdefault("content", "")
        if isinstance(content, list) and not self.takes_parts:
            adapted["content"] = "\n".join(part["text"] for part in content)
        return adapted

    def _reads_parts(self) -> bool:
        parts = [{"type": "text", "text": text} for text in _PROBE]
        probe = {"messages": [{"role": "user", "content": parts}], "add_generation_prompt": True, "tools": None}
        try:
            text = self._template.render(self._special_tokens | probe)
        except Exception:  # noqa: BLE001 - as in render: a template that raises does not read parts
            return False
        return all(word in text for word in _PROBE) and "'type'" not in text


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; it renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 - declared mutable by the base class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscore names, which reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` stays nameless, so that a template may write namespace(self=...).
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template must not store {name!r}")


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
    }
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter writes HTML entities; prompts want the characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str, now: Callable[[], datetime.datetime] = datetime.datetime.now) -> str:
    return now().strftime(form)
