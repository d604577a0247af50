"""What an answer must match: `response_format`, and vLLM's older and newer names for the same.

JSON schemas are checked here in full, before any engine sees them; whether a regular expression, a grammar or a
structural tag compiles is found out by the engine, before the request takes anything from others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from engine.messages import GuidedDecoding
from kvstore.errors import InvalidRequest
from openai_api.json_schema import MAX_BYTES, enforceable

_FORMAT = "response_format"
_GUIDED = ("guided_json", "guided_regex", "guided_grammar", "guided_choice", "guided_json_object", "structured_outputs")
_STRUCTURED = {
    "json": "guided_json",
    "regex": "guided_regex",
    "grammar": "guided_grammar",
    "choice": "guided_choice",
    "json_object": "guided_json_object",
    "structural_tag": "structural_tag",
}


def guided_decoding(extra: Mapping[str, Any]) -> GuidedDecoding | None:
    """Of a request's fields; None if any text will do. InvalidRequest names the field."""
    given = [name for name in (_FORMAT, *_GUIDED) if extra.get(name) not in (None, False, {"type": "text"})]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest(f"{given[1]}: contradicts {given[0]}; give one of them", param=given[1])
    name = given[0]
    value = extra[name]
    if name == _FORMAT:
        return _response_format(value)
    if name == "structured_outputs":
        return _structured_outputs(value)
    return _named(name, value, name)


def _response_format(value: Any) -> GuidedDecoding:
    if not isinstance(value, dict):
        raise _wrong(_FORMAT, "must be a JSON object with a type")
    reader = _READERS.get(str(value.get("type")))
    if reader is None:
        raise _wrong(_FORMAT, f"type {value.get('type')!r} is none of text, {', '.join(_READERS)}")
    return reader(value)


def _json_schema(value: Mapping[str, Any]) -> GuidedDecoding:
    body = value.get("json_schema")
    place = f"{_FORMAT}.json_schema"
    if not isinstance(body, dict):
        raise _wrong(place, "missing, but required for type json_schema")
    if not isinstance(body.get("name"), str) or not body["name"]:
        raise _wrong(f"{place}.name", "missing, but required")
    if "schema" not in body:
        raise _wrong(f"{place}.schema", "missing, but required")
    return GuidedDecoding("json_schema", enforceable(body["schema"], f"{place}.schema"))


def _json(value: Mapping[str, Any]) -> GuidedDecoding:
    """TensorRT-LLM's form: the schema beside the type."""
    if "schema" not in value:
        raise _wrong(f"{_FORMAT}.schema", "missing, but required for type json")
    return GuidedDecoding("json_schema", enforceable(value["schema"], f"{_FORMAT}.schema"))


def _json_object(value: Mapping[str, Any]) -> GuidedDecoding:
    return GuidedDecoding("json_schema", '{"type": "object"}')


def _text_of(kind: str) -> Callable[[Mapping[str, Any]], GuidedDecoding]:
    return lambda value: GuidedDecoding(kind, _checked(value.get(kind), f"{_FORMAT}.{kind}"))


def _structural_tag(value: Mapping[str, Any]) -> GuidedDecoding:
    if "format" not in value and not ("structures" in value and "triggers" in value):
        raise _wrong(_FORMAT, "a structural_tag needs format, or structures and triggers")
    return GuidedDecoding("structural_tag", _checked(json.dumps(_with_checked_schemas(value, _FORMAT)), _FORMAT))


def _with_checked_schemas(tag: Any, place: str) -> Any:
    """A structural tag, the schemas in it as `enforceable` writes them."""
    if isinstance(tag, list):
        return [_with_checked_schemas(each, f"{place}[{at}]") for at, each in enumerate(tag)]
    if not isinstance(tag, dict):
        return tag
    written = {}
    for name, value in tag.items():
        at = f"{place}.{name}"
        is_schema = name == "json_schema" or (name == "schema" and "begin" in tag)
        written[name] = json.loads(enforceable(value, at)) if is_schema else _with_checked_schemas(value, at)
    if written.get("type") == "json_schema":
        written.setdefault("max_whitespace_cnt", 1)
    return written


_READERS: dict[str, Callable[[Mapping[str, Any]], GuidedDecoding]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "json": _json,
    "regex": _text_of("regex"),
    "ebnf": _text_of("ebnf"),
    "structural_tag": _structural_tag,
}


def _structured_outputs(value: Any) -> GuidedDecoding:
    if not isinstance(value, dict):
        raise _wrong("structured_outputs", "must be a JSON object")
    given = [name for name, entry in value.items() if entry is not None and entry is not False]
    if len(given) != 1 or given[0] not in _STRUCTURED:
        raise _wrong("structured_outputs", f"give exactly one of {', '.join(_STRUCTURED)}")
    return _named(_STRUCTURED[given[0]], value[given[0]], f"structured_outputs.{given[0]}")


def _named(name: str, value: Any, place: str) -> GuidedDecoding:
    match name:
        case "guided_json":
            return GuidedDecoding("json_schema", enforceable(_parsed(value, place), place))
        case "guided_json_object":
            return _json_object({})
        case "guided_regex":
            return GuidedDecoding("regex", _checked(value, place))
        case "guided_grammar":
            return GuidedDecoding("ebnf", _checked(value, place))
        case "guided_choice":
            return GuidedDecoding("ebnf", _checked(_choice(value, place), place))
    return _structural_tag(_parsed(value, place))


def _choice(value: Any, place: str) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise _wrong(place, "must be an array of texts")
    return "root ::= " + " | ".join(json.dumps(each, ensure_ascii=False) for each in value)


def _parsed(value: Any, place: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise _wrong(place, f"not JSON ({error})") from None


def _checked(text: Any, place: str) -> str:
    if not isinstance(text, str) or not text:
        raise _wrong(place, "must be text")
    if len(text) > MAX_BYTES:
        raise _wrong(place, f"longer than {MAX_BYTES} characters")
    return text


def _wrong(place: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{place}: {what}", param=place.partition(".")[0])
