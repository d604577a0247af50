"""C051, C052: a schema is enforced in full or refused with the place that cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstore.errors import InvalidRequest
from openai_api.json_schema import MAX_BYTES, enforceable


def written(schema: Any) -> Any:
    return json.loads(enforceable(schema, "response_format.json_schema.schema"))


@pytest.mark.parametrize(
    ("schema", "pointer", "says"),
    [
        ("x", "#:", "no schema"),
        (5, "#:", "no schema"),
        (False, "#:", "no schema"),
        ({"type": "nope"}, "#:", "nope"),
        ({"type": 5}, "#:", "type 5"),
        ({"type": ["string", "nope"]}, "#:", "nope"),
        ({"properties": {"foo": "bar"}}, "#/properties/foo:", "no schema"),
        ({"properties": ["foo"]}, "#/properties:", "object of schemas"),
        ({"$ref": "#"}, "#:", "leads to itself"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "#:", "itself"),
        ({"$ref": "#/$defs/none"}, "#:", "leads nowhere"),
        ({"$ref": "http://elsewhere/x.json"}, "#:", "must begin with #"),
        ({"$ref": 5}, "#:", "must begin with #"),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}, "#/properties/a:", "entries of $defs"),
        ({"type": "array", "uniqueItems": True}, "#:", "'uniqueItems'"),
        ({"type": "array", "contains": {}}, "#:", "'contains'"),
        ({"type": "array", "minItems": -1}, "#:", "minItems"),
        ({"type": "array", "minItems": 1.5}, "#:", "minItems"),
        ({"type": "array", "items": 5}, "#/items:", "no schema"),
        ({"type": "array", "prefixItems": []}, "#/prefixItems:", "at least one"),
        ({"type": "string", "pattern": "^a", "minLength": 3}, "#:", "'minLength' beside 'pattern'"),
        ({"type": "string", "format": "date", "pattern": "x"}, "#:", "beside"),
        ({"type": "string", "format": "color"}, "#:", "format"),
        ({"type": "string", "pattern": 'a"b'}, "#:", "quotes"),
        ({"type": "string", "pattern": 5}, "#:", "text"),
        ({"type": "integer", "multipleOf": 2}, "#:", "'multipleOf'"),
        ({"type": "integer", "minimum": "low"}, "#:", "no number"),
        ({"type": "object", "patternProperties": {}}, "#:", "'patternProperties'"),
        ({"type": "object", "dependentRequired": {}}, "#:", "'dependentRequired'"),
        ({"type": "object", "properties": {"a": {}}, "maxProperties": 1}, "#:", "beside properties"),
        ({"type": "object", "required": "a"}, "#/required:", "names"),
        ({"type": "object", "additionalProperties": 5}, "#/additionalProperties:", "schema or a boolean"),
        ({"not": {}}, "#:", "'not'"),
        ({"if": {}, "then": {}}, "#:", "'if'"),
        ({"minimum": 3}, "#:", "without a type"),
        ({"allOf": [{}, {}]}, "#/allOf:", "merge them"),
        ({"anyOf": []}, "#/anyOf:", "at least one"),
        ({"anyOf": [{}], "type": "object"}, "#:", "'type' beside 'anyOf'"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf:", "apart"),
        ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "#/oneOf:", "apart"),
        ({"enum": []}, "#/enum:", "at least one"),
        ({"enum": [1, "a"], "type": "string"}, "#:", "not of type"),
        ({"const": 1.5, "type": "integer"}, "#:", "not of type"),
        ({"properties": {"a~/b": {"type": "nope"}}}, "#/properties/a~0~1b:", "nope"),
        ({"$defs": {"d": {"type": "nope"}}, "type": "string"}, "#/$defs/d:", "nope"),
    ],
)
def test_what_nobody_enforces_is_refused(schema: Any, pointer: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        written(schema)
    assert caught.value.param == "response_format"
    assert f"the schema at {pointer}" in caught.value.message
    assert says in caught.value.message


def test_limits() -> None:
    with pytest.raises(InvalidRequest, match="larger than"):
        written({"enum": ["x" * MAX_BYTES]})
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(60):
        deep = {"type": "array", "items": deep}
    with pytest.raises(InvalidRequest, match="deep"):
        written(deep)


def test_objects_are_written_out() -> None:
    assert written({"properties": {"a": {}}, "required": ["a", "b"], "title": "t"}) == {
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    assert written({"type": "object"}) == {"type": "object", "additionalProperties": True}
    assert written({"type": "object", "additionalProperties": {"type": "null"}, "required": ["q"]}) == {
        "type": "object",
        "properties": {"q": {"type": "null"}},
        "required": ["q"],
        "additionalProperties": {"type": "null"},
    }


def test_several_types_become_alternatives_with_their_own_keywords() -> None:
    assert written({"type": ["integer", "string"], "minimum": 3, "maxLength": 4}) == {
        "anyOf": [{"type": "integer", "minimum": 3}, {"type": "string", "maxLength": 4}]
    }


def test_alternatives_that_are_apart_are_one_of() -> None:
    apart = {"oneOf": [{"type": "null"}, {"type": "boolean"}]}
    assert written(apart) == {"anyOf": [{"type": "null"}, {"type": "boolean"}]}
    tagged = [{"properties": {"kind": {"const": name}}, "required": ["kind"]} for name in "ab"]
    assert len(written({"oneOf": tagged})["anyOf"]) == 2
    referred = {"$defs": dict(zip("ab", tagged, strict=True)), "oneOf": [{"$ref": f"#/$defs/{name}"} for name in "ab"]}
    assert written(referred)["anyOf"] == [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]


def test_annotations_change_nothing() -> None:
    assert written({"type": "null", "title": "t", "description": "d", "default": None, "$schema": "s"}) == {
        "type": "null"
    }
    assert written({"allOf": [{"type": "null"}]}) == {"type": "null"}
    assert written(True) == {}
    assert written({"enum": [1, 2], "type": "integer"}) == {"enum": [1, 2]}


def test_what_pydantic_writes_is_accepted() -> None:
    import enum
    from typing import Literal

    import pydantic

    class Color(enum.Enum):
        RED = "red"
        BLUE = "blue"

    class Leaf(pydantic.BaseModel):
        kind: Literal["leaf"]
        color: Color
        size: int = pydantic.Field(ge=1, le=9)

    class Node(pydantic.BaseModel):
        kind: Literal["node"]
        children: list[Node | Leaf] = pydantic.Field(max_length=3)
        note: str | None = None

    class Root(pydantic.BaseModel):
        tree: Node | Leaf = pydantic.Field(discriminator="kind")

    result = written(Root.model_json_schema())
    assert set(result["$defs"]) == {"Color", "Leaf", "Node"}
    assert result["$defs"]["Leaf"]["additionalProperties"] is False
