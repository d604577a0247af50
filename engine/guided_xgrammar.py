"""xgrammar as the backend of guided decoding. Importing this loads xgrammar, and with it transformers: seconds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import xgrammar

from engine.guided import SEPARATORS, GuideError, words_of
from engine.messages import GuidedDecoding
from engine.step import Words
from engine.vocabulary import Vocabulary

_THREADS = 1  # of a compilation: it runs beside the model


class XgrammarBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.tokens),
            stop_token_ids=sorted(vocabulary.stop_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=_THREADS, cache_enabled=False)

    def compile(self, wanted: GuidedDecoding) -> XgrammarGrammar:
        try:
            return XgrammarGrammar(self._compile(wanted), self._vocabulary)
        except (RuntimeError, ValueError) as error:
            raise GuideError(_readable(error)) from None

    def _compile(self, wanted: GuidedDecoding) -> xgrammar.CompiledGrammar:
        match wanted.kind:
            case "json_schema":
                return self._compiler.compile_json_schema(
                    json.dumps(_sized_strings(json.loads(wanted.text))),
                    any_whitespace=False,
                    separators=SEPARATORS,
                    strict_mode=False,
                )
            case "regex":
                return self._compiler.compile_regex(wanted.text)
            case "ebnf":
                return self._compiler.compile_grammar(wanted.text)
            case "structural_tag":
                return self._compiler.compile_structural_tag(json.dumps(_in_formats(json.loads(wanted.text))))
        raise GuideError(f"{wanted.kind!r} is no kind of guided decoding")


def _in_formats(tag: Any) -> Any:
    """A structural tag of the older form, structures and triggers, in the form that has a format."""
    if not isinstance(tag, dict) or "structures" not in tag or "triggers" not in tag:
        return tag
    tags = [
        {
            "type": "tag",
            "begin": each.get("begin"),
            "content": {"type": "json_schema", "json_schema": each.get("schema"), "max_whitespace_cnt": 1},
            "end": each.get("end"),
        }
        for each in tag["structures"]
    ]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}}


def _sized_strings(schema: Any) -> Any:
    """Lengths of strings as patterns: by its own rule for lengths the library lets raw control characters through."""
    if isinstance(schema, list):
        return [_sized_strings(each) for each in schema]
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return schema
    schema = {name: _sized_strings(value) for name, value in schema.items()}
    if schema.get("type") == "string" and schema.keys() & {"minLength", "maxLength"}:
        least, most = schema.pop("minLength", 0), schema.pop("maxLength", "")
        schema["pattern"] = f"^.{{{least},{most}}}$"
    return schema


def _readable(error: Exception) -> str:
    """Without the library's time stamps and source lines."""
    text = " ".join(str(error).split())
    _, found, message = text.partition(".cc:")
    return message.partition(": ")[2] if found else text


class XgrammarGrammar:
    def __init__(self, compiled: xgrammar.CompiledGrammar, vocabulary: Vocabulary) -> None:
        self._compiled = compiled
        self._size = len(vocabulary.tokens)
        self._known = words_of(range(self._size), self._size)
        self._text = self._known & ~words_of(sorted(vocabulary.stop_ids), self._size)

    def start(self) -> XgrammarGuide:
        return XgrammarGuide(xgrammar.GrammarMatcher(self._compiled), self._known, self._text)


class XgrammarGuide:
    def __init__(self, matcher: xgrammar.GrammarMatcher, known: Words, text: Words) -> None:
        self._matcher = matcher
        self._known = known  # all tokens: the library also sets bits beyond the last one
        self._text = text  # all tokens that are not EOS
        self._mask = np.zeros((1, len(known)), np.int32)
        self._fill()

    @property
    def mask(self) -> Words:
        words: Words = self._mask[0]
        return words

    @property
    def finished(self) -> bool:
        return not (self._mask[0] & self._text).any() and self._matcher.is_completed()

    def accept(self, token: int) -> None:
        if not self._matcher.accept_token(token):
            raise GuideError(f"the grammar does not allow token {token} here")
        self._fill()

    def _fill(self) -> None:
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(self._mask)
            self._mask &= self._known
