"""Which bytes each token stands for, by the kinds of tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.vocabulary import byte_reader, read_vocabulary
from kvstore.errors import SettingsError


def write(path: Path, model: dict[str, Any], decoder: dict[str, Any], added: list[dict[str, Any]]) -> str:
    file = path / "tokenizer.json"
    file.write_text(json.dumps({"model": model, "decoder": decoder, "added_tokens": added}))
    return str(path)


BYTE_LEVEL = {"type": "ByteLevel"}
METASPACE = {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}]}


def test_byte_level_tokens(tmp_path: Path) -> None:
    added = [
        {"id": 3, "content": "<eos>", "special": True},
        {"id": 4, "content": "<tool>", "special": False},
        {"id": 99, "content": "<far>", "special": True},
    ]
    directory = write(tmp_path, {"vocab": {"a": 0, "Ġb": 1, "Ċ": 2}}, BYTE_LEVEL, added)
    found = read_vocabulary(directory, 7, [3])
    assert found.tokens == [b"a", b" b", b"\n", b"", b"<tool>", b"", b""]
    assert found.stop_ids == {3}


def test_pieces_with_byte_fallback(tmp_path: Path) -> None:
    vocab = [["<unk>", 0.0], ["▁hi", -1.0], ["<0x0A>", -2.0], ["é", -3.0]]
    directory = write(tmp_path, {"vocab": vocab}, METASPACE, [{"id": 0, "content": "<unk>", "special": True}])
    assert read_vocabulary(directory, 4, []).tokens == [b"", b" hi", b"\n", "é".encode()]


def test_a_model_smaller_than_its_tokenizer(tmp_path: Path) -> None:
    directory = write(tmp_path, {"vocab": {"a": 0, "b": 1}}, BYTE_LEVEL, [])
    assert read_vocabulary(directory, 1, []).tokens == [b"a"]


def test_the_file_itself_may_be_named(tmp_path: Path) -> None:
    directory = write(tmp_path, {"vocab": {"a": 0}}, BYTE_LEVEL, [])
    assert read_vocabulary(f"{directory}/tokenizer.json", 1, []).tokens == [b"a"]


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no tokenizer\.json"):
        read_vocabulary(str(tmp_path), 1, [])


def test_characters_outside_the_byte_alphabet_stand_for_themselves() -> None:
    assert byte_reader({"decoder": BYTE_LEVEL})("漢") == "漢".encode()
    assert byte_reader({})("a▁b") == b"a b"
