"""JSON schemas that guided decoding enforces in full, and no others: a keyword that nobody enforces is refused.

`enforceable` also writes the schema so that all backends read the same into it:

    type list                 -> anyOf of single types
    keywords of objects only  -> type object
    properties without additionalProperties -> additionalProperties false: models make fields up otherwise
    required, not listed      -> listed under properties
    allOf of one              -> that one
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvstore.errors import InvalidRequest

MAX_BYTES = 256 * 1024
_MAX_DEPTH = 48
_ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator",
    "$schema", "$id", "$comment", "$defs", "definitions",
}  # fmt: skip
_NUMERIC = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_OBJECT = {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}
_OF_TYPE: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": _NUMERIC,
    "number": _NUMERIC,
    "boolean": set(),
    "null": set(),
    "object": _OBJECT,
    "array": {"items", "prefixItems", "minItems", "maxItems"},
}
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_FORMATS = {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"^{_OCTET}\.{_OCTET}\.{_OCTET}\.{_OCTET}$"  # backends differ on leading zeros
_COMBINING = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_SHALLOW_TYPES = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}

Schema = Any  # a JSON object or a boolean


def enforceable(schema: Schema, param: str) -> str:
    """The schema as JSON text for the engine. InvalidRequest names the place by a JSON pointer."""
    if len(json.dumps(schema)) > MAX_BYTES:
        raise InvalidRequest(f"{param}: larger than {MAX_BYTES} bytes", param=param.partition(".")[0])
    return json.dumps(_Walk(schema, param).whole())


class _Walk:
    def __init__(self, root: Schema, param: str) -> None:
        self._root = root
        self._param = param

    def whole(self) -> Schema:
        written = self._schema(self._root, "", 0)
        if isinstance(self._root, dict) and isinstance(written, dict):
            for name in ("$defs", "definitions"):
                entries = self._root.get(name)
                if entries is not None:
                    written = written | {name: self._each(entries, f"/{name}", 0)}
        return written

    def _refuse(self, pointer: str, what: str) -> InvalidRequest:
        return InvalidRequest(f"{self._param}: the schema at #{pointer}: {what}", param=self._param.partition(".")[0])

    def _each(self, entries: Any, pointer: str, depth: int) -> dict[str, Schema]:
        if not isinstance(entries, dict):
            raise self._refuse(pointer, "must be an object of schemas")
        return {name: self._schema(entry, f"{pointer}/{_escaped(name)}", depth + 1) for name, entry in entries.items()}

    def _list(self, entries: Any, pointer: str, depth: int) -> list[Schema]:
        if not isinstance(entries, list) or not entries:
            raise self._refuse(pointer, "must be an array of at least one schema")
        return [self._schema(entry, f"{pointer}/{place}", depth + 1) for place, entry in enumerate(entries)]

    def _schema(self, schema: Schema, pointer: str, depth: int) -> Schema:
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise self._refuse(pointer, f"{_shown(schema)} is no schema; a schema is a JSON object")
        if depth > _MAX_DEPTH:
            raise self._refuse(pointer, f"nested more than {_MAX_DEPTH} deep")
        keywords = {name: value for name, value in schema.items() if name not in _ANNOTATIONS}
        for name in _COMBINING:
            if name in keywords:
                return self._combined(name, keywords, pointer, depth)
        kind = keywords.pop("type", None)
        if kind is None and keywords.keys() & _OBJECT:
            kind = "object"
        if kind is None:
            for name in keywords:
                raise self._refuse(pointer, f"{name!r} is not supported without a type that it belongs to")
            return {}
        if isinstance(kind, list):
            return {"anyOf": [self._typed(one, self._part(one, keywords), pointer, depth) for one in kind]}
        return self._typed(kind, keywords, pointer, depth)

    def _part(self, kind: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Of a schema with several types, the keywords that are about one of them, and those about none."""
        others = set().union(*_OF_TYPE.values()) - _OF_TYPE.get(str(kind), set())
        return {name: value for name, value in keywords.items() if name not in others}

    # ------------------------------------------------------------ combinations

    def _combined(self, name: str, keywords: Mapping[str, Any], pointer: str, depth: int) -> Schema:
        value, place = keywords[name], f"{pointer}/{name}"
        beside = keywords.keys() - {name} - ({"type"} if name in ("enum", "const") else set())
        if beside:
            raise self._refuse(pointer, f"{sorted(beside)[0]!r} beside {name!r} is not supported")
        match name:
            case "$ref":
                self._check_reference(value, pointer)
                return {"$ref": value}
            case "const":
                self._check_literals([value], keywords, pointer)
                return {"const": value}
            case "enum":
                if not isinstance(value, list) or not value:
                    raise self._refuse(place, "must be an array of at least one value")
                self._check_literals(value, keywords, pointer)
                return {"enum": value}
        branches = self._list(value, place, depth)
        if name == "allOf":
            if len(branches) > 1:
                raise self._refuse(place, "allOf of more than one schema is not supported; merge them")
            return branches[0]
        if name == "oneOf" and not _disjoint([self._resolved(branch) for branch in branches]):
            raise self._refuse(place, "oneOf is supported where types or a constant property tell the schemas apart")
        return {"anyOf": branches}

    def _check_literals(self, values: list[Any], keywords: Mapping[str, Any], pointer: str) -> None:
        kinds = keywords.get("type")
        allowed = kinds if isinstance(kinds, list) else [kinds]
        if kinds is not None and not all(any(_is_of(value, kind) for kind in allowed) for value in values):
            raise self._refuse(pointer, f"a value of enum or const is not of type {_shown(kinds)}")

    def _check_reference(self, reference: Any, pointer: str) -> None:
        seen = set()
        target: Any = {"$ref": reference}
        while isinstance(target, dict) and "$ref" in target:
            reference = target["$ref"]
            if reference in seen:
                raise self._refuse(pointer, f"$ref {reference!r} leads to itself")
            seen.add(reference)
            target = self._target(reference, pointer)

    def _target(self, reference: Any, pointer: str) -> Schema:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise self._refuse(pointer, f"$ref {_shown(reference)} is not supported; it must begin with #")
        target = self._root
        for step in reference[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or name not in target:
                raise self._refuse(pointer, f"$ref {reference!r} leads nowhere")
            target = target[name]
        if reference != "#" and not re.match(r"#/(\$defs|definitions)/[^/]+$", reference):
            raise self._refuse(pointer, f"$ref {reference!r}: only # and entries of $defs can be referred to")
        return target

    def _resolved(self, schema: Schema) -> Schema:
        while isinstance(schema, dict) and "$ref" in schema:
            schema = self._target(schema["$ref"], "")
        return schema

    # ------------------------------------------------------------ types

    def _typed(self, kind: Any, keywords: Mapping[str, Any], pointer: str, depth: int) -> Schema:
        if not isinstance(kind, str) or kind not in _OF_TYPE:
            raise self._refuse(pointer, f"type {_shown(kind)} is none of {', '.join(_OF_TYPE)}")
        for name, value in keywords.items():
            if name not in _OF_TYPE[kind]:
                raise self._refuse(pointer, f"{name!r} is not supported for type {kind}")
            if name in _COUNTS and (type(value) is not int or value < 0):
                raise self._refuse(pointer, f"{name}: {_shown(value)} is no count")
            if name in _NUMERIC and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise self._refuse(pointer, f"{name}: {_shown(value)} is no number")
        if kind == "object":
            return self._object(keywords, pointer, depth)
        if kind == "array":
            return self._array(keywords, pointer, depth)
        if kind == "string":
            self._check_string(keywords, pointer)
            if keywords.get("format") == "ipv4":
                return {"type": kind, "pattern": _IPV4}
        return {"type": kind, **keywords}

    def _object(self, keywords: Mapping[str, Any], pointer: str, depth: int) -> Schema:
        properties = self._each(keywords.get("properties", {}), f"{pointer}/properties", depth)
        required = keywords.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise self._refuse(f"{pointer}/required", "must be an array of names")
        if properties and keywords.keys() & {"minProperties", "maxProperties"}:
            raise self._refuse(pointer, "minProperties and maxProperties are not supported beside properties")
        others = keywords.get("additionalProperties", not properties and not required)
        if isinstance(others, dict):
            others = self._schema(others, f"{pointer}/additionalProperties", depth + 1)
        elif not isinstance(others, bool):
            raise self._refuse(f"{pointer}/additionalProperties", "must be a schema or a boolean")
        for name in required:
            properties.setdefault(name, {} if isinstance(others, bool) else others)
        counts = {name: value for name, value in keywords.items() if name in _COUNTS}
        listed = {"properties": properties, "required": required} if properties else {}
        return {"type": "object", **listed, "additionalProperties": others, **counts}

    def _array(self, keywords: Mapping[str, Any], pointer: str, depth: int) -> Schema:
        written = {"type": "array", **keywords}
        if "prefixItems" in keywords:
            written["prefixItems"] = self._list(keywords["prefixItems"], f"{pointer}/prefixItems", depth)
        items = keywords.get("items", True)
        written["items"] = items if isinstance(items, bool) else self._schema(items, f"{pointer}/items", depth + 1)
        return written

    def _check_string(self, keywords: Mapping[str, Any], pointer: str) -> None:
        lengths = sorted(keywords.keys() & {"minLength", "maxLength"})
        wide = [name for name in ("pattern", "format") if name in keywords]
        if len(wide) == 2 or (wide and lengths):
            raise self._refuse(pointer, f"{(lengths + wide)[0]!r} beside {wide[-1]!r} is not supported")
        if "format" in keywords and keywords["format"] not in _FORMATS:
            known = ", ".join(sorted(_FORMATS))
            raise self._refuse(pointer, f"format {_shown(keywords['format'])} is not supported; supported: {known}")
        pattern = keywords.get("pattern", "")
        if not isinstance(pattern, str):
            raise self._refuse(pointer, "pattern must be text")
        if '"' in pattern or "\\\\" in pattern:
            raise self._refuse(pointer, "a pattern with quotes or backslashes as text is not supported")


def _disjoint(branches: list[Schema]) -> bool:
    """No value can match two of them: by type, or by a required property whose constants differ."""
    kinds = [branch.get("type") if isinstance(branch, dict) else None for branch in branches]
    if None not in kinds and len(set(map(str, kinds))) == len(kinds) and not {"integer", "number"} <= set(kinds):
        return True
    tags = [dict(_constants(branch)) for branch in branches]
    for name in set.intersection(*(set(tag) for tag in tags)):
        values = [value for tag in tags for value in tag[name]]
        if len({json.dumps(value) for value in values}) == len(values):
            return True
    return False


def _constants(schema: Schema) -> Iterator[tuple[str, list[Any]]]:
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return
    for name, entry in (schema.get("properties") or {}).items():
        if name in (schema.get("required") or ()) and isinstance(entry, dict):
            if "const" in entry:
                yield name, [entry["const"]]
            elif isinstance(entry.get("enum"), list):
                yield name, entry["enum"]


def _is_of(value: Any, kind: Any) -> bool:
    if kind in ("integer", "number"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (kind == "number" or float(value).is_integer())
    expected = _SHALLOW_TYPES.get(str(kind))
    return expected is not None and isinstance(value, expected)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
