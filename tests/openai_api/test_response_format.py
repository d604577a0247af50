"""Which texts a request's answer must match, by all their names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.messages import GuidedDecoding
from kvstore.errors import InvalidRequest
from openai_api.response_format import guided_decoding

SCHEMA = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}
AS_TEXT = GuidedDecoding("json_schema", json.dumps(SCHEMA))


def formatted(**fields: Any) -> GuidedDecoding | None:
    return guided_decoding({"response_format": fields})


def test_nothing_asked_for() -> None:
    for extra in ({}, {"response_format": None}, {"response_format": {"type": "text"}}, {"guided_json_object": False}):
        assert guided_decoding(extra) is None


def test_response_formats() -> None:
    named = {"name": "x", "strict": True, "schema": SCHEMA}
    assert formatted(type="json_schema", json_schema=named) == AS_TEXT
    assert formatted(type="json", schema=SCHEMA) == AS_TEXT
    assert formatted(type="json_object") == GuidedDecoding("json_schema", '{"type": "object"}')
    assert formatted(type="regex", regex="a+") == GuidedDecoding("regex", "a+")
    assert formatted(type="ebnf", ebnf="root ::= x") == GuidedDecoding("ebnf", "root ::= x")


def test_vllms_names() -> None:
    assert guided_decoding({"guided_json": SCHEMA}) == AS_TEXT
    assert guided_decoding({"guided_json": json.dumps(SCHEMA)}) == AS_TEXT
    assert guided_decoding({"structured_outputs": {"json": SCHEMA}}) == AS_TEXT
    assert guided_decoding({"guided_regex": "a"}) == GuidedDecoding("regex", "a")
    assert guided_decoding({"guided_grammar": "root ::= x"}) == GuidedDecoding("ebnf", "root ::= x")
    assert guided_decoding({"guided_choice": ["a", 'b"']}) == GuidedDecoding("ebnf", 'root ::= "a" | "b\\""')
    assert guided_decoding({"structured_outputs": {"json_object": True}}) == formatted(type="json_object")


def test_schemas_inside_structural_tags_are_checked_and_written_out() -> None:
    inner = {"type": "json_schema", "json_schema": {"properties": {"a": {"type": "null"}}, "required": ["a"]}}
    found = formatted(type="structural_tag", format={"type": "tag", "begin": "<", "content": inner, "end": ">"})
    assert found is not None
    content = json.loads(found.text)["format"]["content"]
    assert content["json_schema"] == SCHEMA | {"type": "object"}
    assert content["max_whitespace_cnt"] == 1
    older = {"structures": [{"begin": "<f>", "schema": {"uniqueItems": True, "type": "array"}, "end": "x"}]}
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        formatted(type="structural_tag", triggers=["<"], **older)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": ["json_object"]}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "x"}}}, "response_format"),
        ({"response_format": {"type": "json"}}, "response_format"),
        ({"response_format": {"type": "regex"}}, "response_format"),
        ({"response_format": {"type": "regex", "regex": 5}}, "response_format"),
        ({"response_format": {"type": "ebnf", "ebnf": "x" * 300_000}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "nope"}}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 5]}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"poem": True}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_what_is_refused(extra: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        guided_decoding(extra)
    assert caught.value.param == param
