"""Signature of the hand-off parameters between router and workers, TensorRT-LLM's `internal_request_auth_key`.

A client that reached a worker could otherwise make it fetch from where the client says.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

AUTH_HEADER = "x-trtllm-disagg-auth"


def handoff_signature(key: str, ctx_info_endpoint: str | list[str] | None, encoded_opaque_state: str | None) -> str:
    """Value of AUTH_HEADER: "sha256=" and the HMAC of both fields as compact JSON. Of a list the first endpoint."""
    if isinstance(ctx_info_endpoint, list):
        ctx_info_endpoint = ctx_info_endpoint[0] if ctx_info_endpoint else None
    signed = msgspec.json.encode({"ctx_info_endpoint": ctx_info_endpoint, "encoded_opaque_state": encoded_opaque_state})
    return "sha256=" + hmac.new(key.encode(), signed, hashlib.sha256).hexdigest()


def is_signed(
    key: str, signature: str | None, ctx_info_endpoint: str | list[str] | None, encoded_opaque_state: str | None
) -> bool:
    """Whether `signature` may be trusted; True where there is nothing to sign."""
    if ctx_info_endpoint is None and encoded_opaque_state is None:
        return True
    return hmac.compare_digest(signature or "", handoff_signature(key, ctx_info_endpoint, encoded_opaque_state))
