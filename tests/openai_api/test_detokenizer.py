"""C024: deltas never hold half a character, and join to exactly the text."""

from __future__ import annotations

import tokenizers
from http_worker import TOKENIZER
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from openai_api.detokenizer import Detokenizer
from openai_api.tokenizer import Tokenizer

EMOJI = "你好 \U0001f642\U0001f468‍\U0001f469‍\U0001f467 ď"
BYTES_OF = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(i)) == 1}
"""Byte to the token that is just this byte."""

unicode_text = st.text(st.characters(codec="utf-8", exclude_characters="�"), max_size=60)


def split_into_tokens(data: bytes) -> list[int]:
    return [BYTES_OF[data[i : i + 1]] for i in range(len(data))]


def deltas_of(ids: list[int], tokenizer: Tokenizer = TOKENIZER, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


def test_the_vocabulary_has_all_bytes() -> None:
    assert len(BYTES_OF) == 256


def test_one_byte_a_token() -> None:
    deltas = deltas_of(split_into_tokens(EMOJI.encode()))
    assert "".join(deltas) == EMOJI
    assert not any("�" in delta for delta in deltas)


@given(unicode_text)
@settings(max_examples=150, deadline=None)
def test_bytes_join_exactly(text: str) -> None:
    deltas = deltas_of(split_into_tokens(text.encode()))
    assert "".join(deltas) == text
    assert not any("�" in delta for delta in deltas)


@given(unicode_text)
@settings(max_examples=100, deadline=None)
def test_ordinary_tokens_join_exactly(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert "".join(deltas_of(ids, skip=False)) == text


@given(st.binary(max_size=80))
@settings(max_examples=150, deadline=None)
def test_invalid_bytes_show_as_one_decoding_would(data: bytes) -> None:
    ids = split_into_tokens(data)
    assert "".join(deltas_of(ids)) == TOKENIZER.decode(ids)


@given(st.lists(st.integers(3, 1023), max_size=120))
@settings(max_examples=100, deadline=None)
def test_any_tokens_join_to_their_decoding(ids: list[int]) -> None:
    assert "".join(deltas_of(ids)) == TOKENIZER.decode(ids)


def test_a_character_is_given_out_with_its_last_byte() -> None:
    assert deltas_of(split_into_tokens("é!".encode())) == ["", "é", "!", ""]


def test_cut_character_shows_only_at_the_end() -> None:
    deltas = deltas_of(split_into_tokens("ab\U0001f642".encode()[:-1]))
    assert deltas[:-1] == ["a", "b", "", "", ""]
    assert deltas[-1] == "�"


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [*TOKENIZER.encode("a b"), 2, *TOKENIZER.encode(" c")]
    assert "".join(deltas_of(ids)) == "a b c"
    assert "".join(deltas_of(ids, skip=False)) == "a b<|im_end|> c"


def test_garbage_without_end_is_given_out_in_bounded_time() -> None:
    garbage = split_into_tokens(b"\xff" * 1500)
    deltas = deltas_of(garbage)
    assert "".join(deltas) == "�" * 1500
    assert sum(bool(delta) for delta in deltas) >= 2


def word_piece_tokenizer() -> Tokenizer:
    """Llama 2's kind of decoder: spaces as ▁, unknown characters as byte tokens, the first space stripped."""
    vocab = {"<unk>": 0, "▁a": 1, "▁b": 2, "c": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend.to_str(), None, {})


@given(
    st.lists(
        st.one_of(
            st.sampled_from([[1], [2], [3]]), st.characters(codec="utf-8").map(lambda c: [4 + b for b in c.encode()])
        )
    )
)
@settings(max_examples=150, deadline=None)
def test_byte_fallback_and_leading_spaces(pieces: list[list[int]]) -> None:
    tokenizer = word_piece_tokenizer()
    ids = [token for piece in pieces for token in piece]
    deltas = deltas_of(ids, tokenizer)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert "�" not in "".join(deltas) or "�" in tokenizer.decode(ids)


def test_byte_fallback_tokens_have_their_bytes() -> None:
    tokenizer = word_piece_tokenizer()
    assert tokenizer.token_bytes(4 + 0xE4) == b"\xe4"
    assert tokenizer.token_bytes(1) == b" a"
