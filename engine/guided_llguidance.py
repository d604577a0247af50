"""llguidance as the backend of guided decoding: loads in milliseconds, refuses what it cannot enforce."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from engine.guided import SEPARATORS, GuideError, words_of
from engine.messages import GuidedDecoding
from engine.step import Words
from engine.vocabulary import Vocabulary

_UNFORCED = '%llguidance {"no_forcing": true}\n'
"""Without it a mask has one spelling where the grammar allows one text only: tokens that begin it are legal too."""

_LONGEST_TOKEN = 64  # bytes looked at by the stand-in tokenizer


class LlguidanceBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._size = len(vocabulary.tokens)
        self._text = ~words_of(sorted(vocabulary.stop_ids), self._size)
        tokens = llguidance.TokenizerWrapper(_Tokens(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(tokens, self._size, sorted(vocabulary.stop_ids))

    def compile(self, wanted: GuidedDecoding) -> LlguidanceGrammar:
        try:
            grammar = _grammar(wanted)
        except ValueError as error:
            raise GuideError(str(error)) from None
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GuideError(str(matcher.get_error()))
        return LlguidanceGrammar(matcher, self._size, self._text)


def _grammar(wanted: GuidedDecoding) -> str:
    match wanted.kind:
        case "json_schema":
            comma, colon = SEPARATORS
            spaces = {"whitespace_flexible": False, "item_separator": comma, "key_separator": colon}
            schema = json.loads(wanted.text) | {"x-guidance": spaces}
            return f"{_UNFORCED}start: %json {json.dumps(schema)}"
        case "regex":
            grammar = json.loads(llguidance.grammar_from("regex", wanted.text))["grammars"][0]
            return _UNFORCED + str(grammar["lark_grammar"])
        case "ebnf":
            return _UNFORCED + llguidance.grammar_from("ebnf", wanted.text).removeprefix("%llguidance {}")
        case "structural_tag":
            return _structural_tag(json.loads(wanted.text))
    raise GuideError(f"{wanted.kind!r} is no kind of guided decoding")


def _structural_tag(tag: dict[str, Any]) -> str:
    if "structures" not in tag or "triggers" not in tag:
        raise GuideError("llguidance takes structural tags with structures and triggers; other formats need xgrammar")
    tags = []
    for structure in tag["structures"]:
        begin = structure["begin"]
        trigger = next((each for each in tag["triggers"] if begin.startswith(each)), None)
        if trigger is None:
            raise GuideError(f"no trigger begins {begin!r}")
        tags.append(
            llguidance.StructTag(trigger=trigger, begin=begin, grammar=structure["schema"], end=structure["end"])
        )
    return llguidance.StructTag.to_grammar(tags, assume_special=False)


class _Tokens:
    """The vocabulary as llguidance asks for it. Its encoder is greedy: masks do not depend on it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = min(vocabulary.stop_ids, default=0)
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = [token for token, data in enumerate(self.tokens) if not data]
        self._ids = {data: token for token, data in enumerate(self.tokens) if data}

    def __call__(self, data: bytes | str) -> list[int]:
        rest = data.encode() if isinstance(data, str) else data
        ids = []
        while rest:
            length = next((n for n in range(min(len(rest), _LONGEST_TOKEN), 0, -1) if rest[:n] in self._ids), 0)
            if length:
                ids.append(self._ids[rest[:length]])
            rest = rest[max(length, 1) :]
        return ids


class LlguidanceGrammar:
    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, text: Words) -> None:
        self._matcher = matcher  # at the beginning, to be copied
        self._size = vocab_size
        self._text = text

    def start(self) -> LlguidanceGuide:
        return LlguidanceGuide(self._matcher.deep_copy(), self._size, self._text)


class LlguidanceGuide:
    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, text: Words) -> None:
        self._matcher = matcher
        self._text = text  # all tokens that are not EOS
        self._mask = np.zeros((1, (vocab_size + 31) // 32), np.int32)
        fill_next_token_bitmask(matcher, self._mask)

    @property
    def mask(self) -> Words:
        words: Words = self._mask[0]
        return words

    @property
    def finished(self) -> bool:
        return not (self._mask[0] & self._text).any() and self._matcher.is_accepting()

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise GuideError(f"the grammar does not allow token {token} here")
        fill_next_token_bitmask(self._matcher, self._mask)
