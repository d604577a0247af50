"""Routes that answer without a worker: what a prompt's tokens are, and where a request would go.

POST /tokenize    {"prompt": …} or {"messages": […]}, as in a request → {"count", "tokens"}
POST /detokenize  {"tokens": […]} → {"prompt"}
POST /explain     a completion or chat request → candidates and what each is judged by; nothing is sent
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request

from kvstore.errors import InvalidRequest, NotReady
from router.bodies import ClientBody
from router.policy import Need, Policy
from router.prompt_tokens import NotReadable, PromptTokens
from router.worker import Worker

if TYPE_CHECKING:
    from router.app import Router


class _Tokens(msgspec.Struct):
    tokens: list[int]


def add_tool_routes(app: FastAPI, router: Router) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = _body(await request.body())
        reader = PromptTokens(await router.tokenizer(), with_keys=False)
        try:
            ids = await reader.ids(body)
        except NotReadable as reason:
            raise InvalidRequest(f"not a prompt that can be read here: {reason}") from None
        return {"count": len(ids), "tokens": ids}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        try:
            ids = msgspec.json.decode(await request.body(), type=_Tokens).tokens
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"body: {error}", param="tokens") from None
        tokenizer = await router.tokenizer()
        wrong = [token for token in ids if not 0 <= token < tokenizer.vocab_size]
        if wrong:
            raise InvalidRequest(f"tokens: {wrong[0]} is not one of {tokenizer.vocab_size} token ids", param="tokens")
        return {"prompt": tokenizer.decode(ids, skip_special_tokens=False)}

    @app.post("/explain")
    async def explain(request: Request) -> dict[str, Any]:
        return await explain_request(router, _body(await request.body()))


def _body(data: bytes) -> ClientBody:
    chat = b'"messages"' in data
    return ClientBody(data, chat)


async def explain_request(router: Router, body: ClientBody) -> dict[str, Any]:
    """Raises NotReady where the request would be."""
    cluster = router.cluster
    if not cluster.ready:
        raise NotReady(cluster.why_not_ready() or "not ready", retry_after=1.0)
    need, left_to_worker = Need(), None
    tokens = router.orchestrator.tokens
    if tokens is not None:
        try:
            need = await tokens.read(body, cluster.tokens_per_block)
        except NotReadable as reason:
            left_to_worker = str(reason)
    context = _choice(cluster.context_policy, cluster.contexts, need)
    return {
        "prompt_tokens": need.num_tokens or None,
        "blocks": len(need.keys),
        "tokens_per_block": need.block_size or cluster.tokens_per_block,
        "not_read": left_to_worker,
        "schedule_style": cluster.config.schedule_style,
        "waiting": cluster.room.waiting,
        "context": context,
        "generation": _choice(cluster.generation_policy, cluster.generations, need),
    }


def _choice(policy: Policy, candidates: Sequence[Worker], need: Need) -> dict[str, Any]:
    """Ties go to the first one here, and to the least recently used in earnest."""
    judged = sorted(
        zip(candidates, policy.scores(candidates, need), strict=True), key=lambda pair: pair[1]["score"], reverse=True
    )
    rows = [
        {
            "worker": worker.address,
            "matched_tokens": int(score.get("matched_blocks", 0)) * need.block_size,
            **score,
        }
        for worker, score in judged
    ]
    return {"policy": policy.name, "candidates": rows}
