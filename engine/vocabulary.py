"""What bytes each token stands for, read from a tokenizer.json. No torch here, and no tokenizer library."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from kvstore.errors import SettingsError


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """What guided decoding needs to know of the tokens: their bytes, b"" for those that no text is made of."""

    tokens: Sequence[bytes]
    stop_ids: frozenset[int]


def read_vocabulary(path: str, vocab_size: int, stop_ids: Collection[int]) -> Vocabulary:
    """Of a model directory, a tokenizer.json or a GGUF file. `vocab_size` is the model's: what it has beyond the
    tokenizer's tokens has no bytes, and neither have special tokens. SettingsError if there is no tokenizer."""
    source = json.loads(_source(Path(path)))
    tokens = [b""] * vocab_size
    bytes_of = byte_reader(source)
    entries = source["model"]["vocab"]
    pairs = entries.items() if isinstance(entries, dict) else ((item[0], at) for at, item in enumerate(entries))
    for token, token_id in pairs:
        if token_id < vocab_size:
            tokens[token_id] = bytes_of(token)
    for added in source.get("added_tokens") or ():
        if added["id"] < vocab_size:
            tokens[added["id"]] = b"" if added.get("special") else added["content"].encode()
    return Vocabulary(tokens, frozenset(stop_ids))


def _source(path: Path) -> str:
    if path.suffix == ".gguf":
        from engine.gguf_file import read_tokenizer

        return read_tokenizer(str(path)).tokenizer_json
    file = path if path.is_file() else path / "tokenizer.json"
    if not file.is_file():
        raise SettingsError([("tokenizer", f"{str(path)!r} has no tokenizer.json")])
    return file.read_text("utf-8")


def byte_reader(source: dict[str, Any]) -> Callable[[str], bytes]:
    """How one vocabulary entry spells bytes, which the decoder of the tokenizer tells."""
    decoder = source.get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        table = _byte_level_alphabet()
        return lambda token: bytes(table[char] for char in token) if all(c in table for c in token) else token.encode()

    def plain(token: str) -> bytes:
        if "ByteFallback" in kinds and len(token) == 6 and token.startswith("<0x"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    return plain


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 bytes stand for themselves, the others begin at U+0100."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(rest)}
