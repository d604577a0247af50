"""JSON schema of the disagg YAML, made from the types that `router.config` reads it into.

python -m router.config_schema > configs/disagg.schema.json
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import msgspec

from router import config
from router.config import AdmissionConfig, ClusterConfig, DisaggConfig, RouterConfig

_ELSEWHERE = ("context", "generation", "cluster", "max_local_prefill_length", "warnings", "admission")
_CHOICES = {"type": config.ROUTER_TYPES, "schedule_style": config.SCHEDULE_STYLES}
_NAMES: dict[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}


def schema() -> dict[str, Any]:
    """Of the whole file. Unknown keys are the workers' at top level and in the server blocks, and errors elsewhere."""
    top = _fields(DisaggConfig, _ELSEWHERE)
    top |= {
        "context_servers": {"$ref": "#/$defs/servers"},
        "generation_servers": {"$ref": "#/$defs/servers"},
        "disagg_cluster": _closed(_cluster_fields(), required=["cluster_uri"]),
        "conditional_disagg_config": _closed({"max_local_prefill_length": {"type": "integer", "minimum": 0}}),
        "admission": _closed(_fields(AdmissionConfig)),
        "num_workers": {"const": 1},
    }
    router = {name: value for name, value in _fields(RouterConfig).items() if name in config.ROUTER_KEYS}
    servers = {
        "num_instances": {"type": "integer", "minimum": 0},
        "urls": _nullable({"type": "array", "items": {"type": "string"}}),
        "router": _nullable({"type": "object", "properties": router}),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "trtllm-serve disaggregated",
        "type": "object",
        "properties": top,
        "$defs": {"servers": _nullable({"type": "object", "properties": servers})},
    }


def _cluster_fields() -> dict[str, Any]:
    fields = _fields(ClusterConfig)
    instances = {"type": "integer", "minimum": 0}
    fields["minimal_instances"] = _closed(
        {
            "context_servers": {**instances, "default": fields.pop("minimal_context")["default"]},
            "generation_servers": {**instances, "default": fields.pop("minimal_generation")["default"]},
        }
    )
    fields["inactive_interval_sec"] = {**fields["inactive_timeout_sec"], "deprecated": True}
    return fields


def _fields(kind: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {
        field.name: _field(field, hints[field.name]) for field in dataclasses.fields(kind) if field.name not in without
    }


def _field(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    if field.name in _CHOICES:
        described: dict[str, Any] = {"enum": list(_CHOICES[field.name])}
    else:
        described = _of(hint)
    default = field.default
    if default is not dataclasses.MISSING and default is not None and default != () and default != float("inf"):
        described["default"] = default
    return described


def _of(hint: Any) -> dict[str, Any]:
    if isinstance(hint, types.UnionType):
        [inner] = [part for part in typing.get_args(hint) if part is not type(None)]
        return _nullable(_of(inner))
    if typing.get_origin(hint) is tuple:
        return {"type": "array", "items": _of(typing.get_args(hint)[0])}
    return {"type": _NAMES[hint]}


def _nullable(described: dict[str, Any]) -> dict[str, Any]:
    return described | {"type": [described["type"], "null"]}


def _closed(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    block: dict[str, Any] = {"type": ["object", "null"], "properties": properties, "additionalProperties": False}
    return block | ({"required": required} if required else {})


def render() -> bytes:
    return msgspec.json.format(msgspec.json.encode(schema()), indent=2) + b"\n"


if __name__ == "__main__":
    print(render().decode(), end="")
