"""Text to token ids and back, for worker and router alike: the `tokenizers` library and nothing heavier.

`Tokenizer.load` reads a Hugging Face directory or a GGUF file, with the chat template that belongs to it.
"""

from __future__ import annotations

import asyncio
import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import tokenizers

from engine.vocabulary import byte_reader
from kvstore.errors import SettingsError
from openai_api.chat_template import ChatTemplate

_LONG_TEXT = 4096
"""Characters above which encoding leaves the event loop: about a millisecond of work."""

_SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """`digest` covers all that maps a request to token ids: vocabulary, rules and chat template (32 hex digits)."""

    def __init__(self, source: str, template: str | None, special_tokens: dict[str, str]) -> None:
        """`source` is the text of a tokenizer.json, `special_tokens` maps roles as "bos_token" to their text."""
        self._source = source
        self.backend = tokenizers.Tokenizer.from_str(source)
        self.backend.no_padding()
        self.backend.no_truncation()
        self.special_tokens = special_tokens
        self.use_chat_template(template)
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)
        self._bytes_of = byte_reader(json.loads(source))
        added = self.backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def use_chat_template(self, template: str | None) -> None:
        """Instead of the model's own. SettingsError if it is no Jinja."""
        self.chat_template = None if template is None else ChatTemplate(template, self.special_tokens)
        self.digest = blake2b(f"{self._source}\0{template}".encode(), digest_size=16).hexdigest()

    @classmethod
    def load(cls, path: str) -> Tokenizer:
        """From a model directory, a tokenizer.json, or a .gguf file. SettingsError names what is missing."""
        location = Path(path)
        if location.suffix == ".gguf":
            return cls._from_gguf(path)
        if location.is_file():
            location = location.parent
        source = location / "tokenizer.json"
        if not source.is_file():
            raise SettingsError([("tokenizer", f"{path!r} has no tokenizer.json")])
        config = _read_json(location / "tokenizer_config.json")
        roles = {**_read_json(location / "special_tokens_map.json"), **config}
        special = {role: _token_text(roles[role]) for role in _SPECIAL_ROLES if roles.get(role)}
        return cls(source.read_text("utf-8"), _read_template(location, config), special)

    @classmethod
    def _from_gguf(cls, path: str) -> Tokenizer:
        from engine.gguf_file import read_tokenizer

        found = read_tokenizer(path)
        texts = {role: getattr(found, role, None) for role in _SPECIAL_ROLES}
        return cls(found.tokenizer_json, found.chat_template, {role: text for role, text in texts.items() if text})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # Without the places of tokens in the text, which cost a fifth of the time and are of no use here.
        ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    async def encode_async(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`encode` for an event loop: long texts go to a thread, where the library lets go of the interpreter lock."""
        if len(text) < _LONG_TEXT:
            return self.encode(text, add_special_tokens)
        encodings = await asyncio.to_thread(
            self.backend.encode_batch_fast, [text], is_pretokenized=False, add_special_tokens=add_special_tokens
        )
        ids: list[int] = encodings[0].ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the output, also when that is a part of a character. Unknown ids have no bytes."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.backend.id_to_token(token_id)
        return b"" if token is None else self._bytes_of(token)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise SettingsError([("tokenizer", f"{path} is not JSON: {error}")]) from None
    return content if isinstance(content, dict) else {}


def _token_text(entry: Any) -> str:
    """A special token is written as its text, or as an object that holds it."""
    return str(entry["content"]) if isinstance(entry, dict) else str(entry)


def _read_template(directory: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over chat_template.json and the configuration, where it may be a list of named ones."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = _read_json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
