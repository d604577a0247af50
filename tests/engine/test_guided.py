"""Both backends: the same masks, answers that match, what is refused, and the compiler's thread."""

from __future__ import annotations

import json
import queue
import random
import re
import threading
from typing import Any

import numpy as np
import pytest

from engine.guided import (
    BACKENDS,
    Backend,
    Grammar,
    GuideCompiled,
    GuideCompiler,
    GuideError,
    backend_named,
    words_of,
)
from engine.messages import GuidedDecoding
from engine.vocabulary import Vocabulary, read_vocabulary
from openai_api.json_schema import enforceable

TINY = "tests/models/tiny-chat"
EOS = 2
VOCABULARY = read_vocabulary(TINY, 1030, [EOS])  # six tokens more than the tokenizer has
YES = GuidedDecoding("regex", "yes")


@pytest.fixture(scope="module")
def backends() -> dict[str, Backend]:
    return {name: backend_named(name, VOCABULARY) for name in BACKENDS}


def allowed(mask: Any) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def text_of(tokens: list[int]) -> bytes:
    return b"".join(VOCABULARY.tokens[token] for token in tokens)


def walk(grammar: Grammar, rng: random.Random, limit: int = 80) -> tuple[bytes, bool]:
    """Random tokens that the grammar allows; whether it was complete at the end."""
    guide, tokens = grammar.start(), list[int]()
    while len(tokens) < limit:
        choice = allowed(guide.mask)
        assert choice, (text_of(tokens), "nothing is allowed")
        assert guide.finished == (choice == {EOS})
        if EOS in choice and (len(choice) == 1 or rng.random() < 0.5):
            return text_of(tokens), True
        closing = [token for token in choice if VOCABULARY.tokens[token][:1] in (b'"', b"}", b"]")]
        pick = closing if closing and rng.random() < 0.4 else sorted(choice - {EOS})
        tokens.append(rng.choice(pick))
        guide.accept(tokens[-1])
    return text_of(tokens), False


def schema(**fields: Any) -> str:
    return enforceable(fields, "s")


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a"]}
LINK = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "null"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
        }
    },
    "$ref": "#/$defs/node",
}
ALIKE = {
    "object": schema(**OBJECT),
    "recursive": schema(**LINK),
    "array": schema(type="array", items={"type": "boolean"}, minItems=1, maxItems=3),
    "tuple": schema(type="array", prefixItems=[{"type": "boolean"}, {"type": "null"}], items=False, minItems=2),
    "number": schema(type="number"),
    "range": schema(type="integer", minimum=3, maximum=120),
    "decimals": schema(type="number", minimum=0, exclusiveMaximum=1.5),
    "enum": schema(enum=["x", "y", 1, None, True]),
    "const": schema(const="so it is"),
    "pattern": schema(type="string", pattern="^[a-c]+$"),
    "types": schema(type=["integer", "null"]),
    "choice": schema(anyOf=[{"type": "boolean"}, {"const": "off"}]),
    "tagged": schema(
        oneOf=[
            {"type": "object", "properties": {"t": {"const": kind}, "v": {"type": "boolean"}}, "required": ["t", "v"]}
            for kind in ("one", "two")
        ]
    ),
    "uuid": schema(type="string", format="uuid"),
    "ipv4": schema(type="string", format="ipv4"),
}
"""Schemas of which both backends read the same. They differ in: DEL in strings and escapes in pattern-less ones,
minus zero, spaces in constant arrays and objects, days that a month does not have, what beyond ASCII is a digit or a
space, e-mail quoting."""


def test_ids_with_no_text_are_never_allowed(backends: dict[str, Backend]) -> None:
    for backend in backends.values():
        mask = backend.compile(GuidedDecoding("regex", "[^x]*")).start().mask
        assert not allowed(mask) & {0, 1, *range(1024, 1030)}
        assert EOS in allowed(mask)


@pytest.mark.parametrize("name", ALIKE)
def test_masks_agree(backends: dict[str, Backend], name: str) -> None:
    rng = random.Random(name)
    ours, theirs = (backends[each].compile(GuidedDecoding("json_schema", ALIKE[name])) for each in BACKENDS)
    for _ in range(5):
        left, right = ours.start(), theirs.start()
        said = list[int]()
        for _ in range(40):
            difference = allowed(left.mask) ^ allowed(right.mask)
            assert not difference - minus_zero(said), (text_of(said), text_of(sorted(difference)))
            both = sorted((allowed(left.mask) & allowed(right.mask)) - {EOS})
            if not both or (EOS in allowed(left.mask) and rng.random() < 0.3):
                break
            said.append(rng.choice(both))
            left.accept(said[-1])
            right.accept(said[-1])


def minus_zero(said: list[int]) -> set[int]:
    """Tokens that write -0, which one backend allows as an integer."""
    if not text_of(said).endswith(b"-"):
        return set()
    return {token for token, data in enumerate(VOCABULARY.tokens) if data.startswith(b"0")}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "wanted",
    [
        OBJECT,
        LINK,
        {"type": "object"},
        {"type": "string", "maxLength": 5},
        {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 3}, "maxItems": 2},
        {"type": "object", "required": ["q"]},
        {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
        {"type": ["string", "integer"], "maxLength": 2, "minimum": 3, "maximum": 5},
        {},
    ],
)
def test_finished_answers_match(backends: dict[str, Backend], backend: str, wanted: dict[str, Any]) -> None:
    """C051: whatever is drawn, a complete answer parses and validates."""
    rng = random.Random(1)
    grammar = backends[backend].compile(GuidedDecoding("json_schema", enforceable(wanted, "s")))
    complete = [text for text, ended in (walk(grammar, rng) for _ in range(40)) if ended]
    assert len(complete) > 20
    for text in complete:
        check(json.loads(text), wanted, wanted)


def check(value: Any, wanted: dict[str, Any], root: dict[str, Any]) -> None:
    """The keywords of the schemas above."""
    if "$ref" in wanted:
        return check(value, root["$defs"]["node"], root)
    kinds = {str: "string", int: "integer", bool: "boolean", dict: "object", list: "array", type(None): "null"}
    if "type" in wanted:
        assert kinds[type(value)] in wanted["type"]
    if "anyOf" in wanted:
        assert value is None or isinstance(value, dict)
    if isinstance(value, str) and "maxLength" in wanted:
        assert wanted.get("minLength", 0) <= len(value) <= wanted["maxLength"]
    if isinstance(value, int) and "minimum" in wanted:
        assert wanted["minimum"] <= value <= wanted["maximum"]
    if isinstance(value, list) and "items" in wanted:
        assert len(value) <= wanted["maxItems"]
        for item in value:
            check(item, wanted["items"], root)
    if isinstance(value, dict):
        assert set(wanted.get("required", ())) <= set(value)
        assert len(value) <= wanted.get("maxProperties", 1000)
        for name, item in value.items():
            check(item, wanted.get("properties", {}).get(name, {}), root)
    return None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", ["[a-c]{2,4}x?", "(yes|no) [0-9]+", "a|bb|ccc"])
def test_regular_expressions(backends: dict[str, Backend], backend: str, pattern: str) -> None:
    rng = random.Random(2)
    grammar = backends[backend].compile(GuidedDecoding("regex", pattern))
    complete = [text for text, ended in (walk(grammar, rng) for _ in range(30)) if ended]
    assert complete
    assert all(re.fullmatch(pattern, text.decode()) for text in complete)


@pytest.mark.parametrize("backend", BACKENDS)
def test_grammars(backends: dict[str, Backend], backend: str) -> None:
    rng = random.Random(3)
    grammar = backends[backend].compile(GuidedDecoding("ebnf", 'root ::= "a" | "b" root "c"'))
    complete = [text for text, ended in (walk(grammar, rng) for _ in range(30)) if ended]
    assert complete
    assert all(text == b"b" * (len(text) // 2) + b"a" + b"c" * (len(text) // 2) for text in complete)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_grammar_is_finished_when_only_eos_is_left(backends: dict[str, Backend], backend: str) -> None:
    guide = backends[backend].compile(GuidedDecoding("ebnf", 'root ::= "a"')).start()
    (only,) = allowed(guide.mask)
    assert not guide.finished
    guide.accept(only)
    assert guide.finished and allowed(guide.mask) == {EOS}


@pytest.mark.parametrize("backend", BACKENDS)
def test_choices_of_one_grammar_are_apart(backends: dict[str, Backend], backend: str) -> None:
    grammar = backends[backend].compile(GuidedDecoding("regex", "ab"))
    left, right = grammar.start(), grammar.start()
    left.accept(VOCABULARY.tokens.index(b"a"))
    assert VOCABULARY.tokens.index(b"b") in allowed(left.mask)
    assert VOCABULARY.tokens.index(b"b") not in allowed(right.mask)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_that_is_not_allowed(backends: dict[str, Backend], backend: str) -> None:
    guide = backends[backend].compile(YES).start()
    with pytest.raises(GuideError, match="does not allow token"):
        guide.accept(VOCABULARY.tokens.index(b"x"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "text"),
    [("regex", "a("), ("ebnf", "root := ?"), ("ebnf", "root ::= nothing"), ("structural_tag", "{}"), ("poem", "x")],
)
def test_what_does_not_compile(backends: dict[str, Backend], backend: str, kind: str, text: str) -> None:
    with pytest.raises(GuideError) as caught:
        backends[backend].compile(GuidedDecoding(kind, text))
    assert "/project/" not in str(caught.value) and "Traceback" not in str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_structural_tags_of_the_older_form(backends: dict[str, Backend], backend: str) -> None:
    """Free text until the trigger, then a call that fits its schema."""
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": json.loads(schema(const=1)), "end": "</f>"}],
        "triggers": ["<f"],
    }
    guide = backends[backend].compile(GuidedDecoding("structural_tag", json.dumps(tag))).start()
    assert EOS in allowed(guide.mask)
    for char in b"hi <f>1":
        guide.accept(VOCABULARY.tokens.index(bytes([char])))
    assert EOS not in allowed(guide.mask)
    assert VOCABULARY.tokens.index(b"2") not in allowed(guide.mask)


def test_words() -> None:
    assert allowed(words_of([0, 31, 32, 63], 64)) == {0, 31, 32, 63}
    assert len(words_of([], 65)) == 3


def test_a_directory_without_a_tokenizer(tmp_path: Any) -> None:
    with pytest.raises(Exception, match="tokenizer"):
        read_vocabulary(str(tmp_path), 10, [])


# ---------------------------------------------------------------- the compiler's thread


class SlowBackend:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.compiled: list[GuidedDecoding] = []

    def compile(self, wanted: GuidedDecoding) -> Any:
        assert self.go.wait(10)
        self.compiled.append(wanted)
        if wanted.text == "bad":
            raise GuideError("no such thing")
        if wanted.text == "bug":
            raise ZeroDivisionError("oops")
        return wanted.text


def test_compiling_does_not_hold_up_the_caller_and_is_remembered() -> None:
    backend, results = SlowBackend(), queue.SimpleQueue[GuideCompiled]()
    compiler = GuideCompiler(lambda: backend)
    compiler.compile("r1", YES, results.put)
    assert results.empty()
    backend.go.set()
    first = results.get(timeout=10)
    assert (first.request_id, first.grammar) == ("r1", "yes")
    compiler.keep(first)
    compiler.compile("r2", YES, results.put)
    assert results.get_nowait().request_id == "r2"
    assert backend.compiled == [YES]
    compiler.close(10)


def test_what_fails_to_compile_does_not_end_the_thread() -> None:
    backend, results = SlowBackend(), queue.SimpleQueue[GuideCompiled]()
    backend.go.set()
    compiler = GuideCompiler(lambda: backend)
    for text in ("bad", "bug", "good"):
        compiler.compile(text, GuidedDecoding("regex", text), results.put)
    errors = [results.get(timeout=10).error for _ in range(3)]
    assert errors == ["no such thing", "ZeroDivisionError: oops", ""]
    compiler.close(10)


def test_a_backend_that_cannot_be_had() -> None:
    def missing() -> Backend:
        raise GuideError("the library of guided_decoding_backend x is not installed")

    results = queue.SimpleQueue[GuideCompiled]()
    compiler = GuideCompiler(missing)
    compiler.compile("r", YES, results.put)
    assert "not installed" in results.get(timeout=10).error
    compiler.close(10)


def test_closing_an_unused_compiler_starts_nothing() -> None:
    before = set(threading.enumerate())
    compiler = GuideCompiler(SlowBackend)
    compiler.close(0)
    assert set(threading.enumerate()) <= before


def test_vocabularies_know_their_bytes() -> None:
    assert isinstance(VOCABULARY, Vocabulary)
    assert VOCABULARY.tokens[:4] == [b"", b"", b"", b"!"]
    assert VOCABULARY.tokens[1024:] == [b""] * 6
