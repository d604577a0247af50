"""The conversation policy: names, text, load, and what it forgets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from router_rig import CHAT, cluster

from kvstore.protocol import ServerRole
from router.bodies import ClientBody
from router.config import RouterConfig, parse_config
from router.index import BlockIndex
from router.policy import Need, make_policy
from router.policy.conversation import Conversation
from router.prompt_tokens import conversation_of, prompt_text
from router.worker import Worker

BLOCK = 128 * 5  # characters


async def workers(count: int) -> list[Worker]:
    return [Worker(ServerRole.CONTEXT, "127.0.0.1", 1000 + place) for place in range(count)]


def policy_of(**arguments: Any) -> Conversation:
    policy = make_policy(RouterConfig(type="conversation", **arguments), BlockIndex())
    assert isinstance(policy, Conversation)
    return policy


def named(name: str, tokens: int = 10) -> Need:
    need = Need(tokens)
    need.conversation = name
    return need


def said(text: str) -> Need:
    need = Need()
    need.text = text
    return need


def blocks(*letters: str) -> str:
    return "".join(letter * BLOCK for letter in letters)


async def test_a_named_conversation_keeps_its_worker_whatever_the_load() -> None:
    policy, three = policy_of(), await workers(3)
    home = policy.pick(three, named("a", 1000))
    others = [policy.pick(three, named(f"o{place}", 100)) for place in range(6)]
    assert home not in others and {*others} == {*three} - {home}
    assert all(policy.pick(three, named("a", 1000)) is home for _ in range(5))
    assert policy.continued == 5


async def test_an_unnamed_one_is_known_by_its_beginning() -> None:
    policy, two = policy_of(), await workers(2)
    first = said(blocks("a", "b", "c"))
    home = policy.pick(two, first)
    policy.release(home, first)
    assert policy.pick(two, said(blocks("a", "b", "c", "d"))) is home  # three of four
    stranger = said(blocks("a", "x", "y", "z"))  # one of four
    assert policy.pick(two, stranger) is not home
    assert policy.pick(two, said("short")) in two  # less than a block: nothing to know it by


async def test_the_threshold_and_the_common_beginning_are_settings() -> None:
    two = await workers(2)
    for arguments, same in (
        ({"match_threshold": 0.25}, True),
        ({"match_threshold": 0.25, "hash_skip_count": 1}, False),
    ):
        policy = policy_of(**arguments)
        home = policy.pick(two, said(blocks("a", "b")))
        assert (policy.pick(two, said(blocks("a", "x", "y", "z"))) is home) is same


async def test_token_ids_in_place_of_text() -> None:
    policy, two = policy_of(use_token_ids=True), await workers(2)
    assert policy.needs_keys
    home = policy.pick(two, Need(64, [b"1", b"2"], 32))
    assert policy.pick(two, Need(80, [b"1", b"2"], 32)) is home


async def test_the_oldest_sessions_are_forgotten_with_all_that_was_kept_of_them() -> None:
    policy, two = policy_of(max_sessions=2), await workers(2)
    for letter in "abcd":
        policy.pick(two, said(blocks(letter)))
    policy.pick(two, named("n"))
    assert len(policy._sessions) == 2 and len(policy._by_block) == 1


async def test_sessions_of_a_worker_that_left_move() -> None:
    policy, two = policy_of(), await workers(2)
    home = policy.pick(two, named("a"))
    left = [worker for worker in two if worker is not home]
    policy.forget(home)
    assert policy.pick([*left, Worker(ServerRole.CONTEXT, "h", 1)], named("a")) is not home
    assert not any(session.worker is home for session in policy._sessions.values())


async def test_load_returns_to_nothing() -> None:
    policy, two = policy_of(), await workers(2)
    needs = [named("a", 7), said(blocks("q") + "more"), Need()]
    taken = [(policy.pick(two, need), need) for need in needs * 5]
    for pair in taken:
        policy.release(*pair)
    assert set(policy._loads.values()) == {0} and all(worker.active == 0 for worker in two)


@pytest.mark.parametrize(
    ("fields", "header", "name"),
    [
        ({"conversation_params": {"conversation_id": "b"}, "prompt_cache_key": "k"}, "h", "b"),
        ({"prompt_cache_key": "k"}, "h", "h"),
        ({"prompt_cache_key": "k", "client_metadata": {"session_id": "s"}}, "", "k"),
        ({"client_metadata": {"session_id": "s"}}, "", "s"),
        ({"conversation_params": None, "prompt_cache_key": 7}, "", ""),
    ],
)
def test_where_a_conversations_name_comes_from(fields: dict[str, Any], header: str, name: str) -> None:
    assert conversation_of(ClientBody(json.dumps(fields).encode(), True), header) == name


def test_the_text_of_a_prompt_grows_at_its_end() -> None:
    one = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "Q"}]}]
    two = [*one, {"role": "assistant", "content": "A"}]
    texts = [prompt_text(ClientBody(json.dumps({"messages": messages}).encode(), True)) for messages in (one, two)]
    assert texts[0] and texts[1].startswith(texts[0])
    assert prompt_text(ClientBody(b'{"prompt": "x"}', False)) == "x"
    for odd in (b"{}", b'{"messages": 3}'):
        assert prompt_text(ClientBody(odd, True)) == ""


async def test_through_the_router_with_upstreams_headers() -> None:
    config = {"context_servers": {"router": {"type": "conversation"}}}
    assert parse_config(config).context.router.match_threshold == 0.75
    async with cluster(3, 1) as (router, ctx, _):
        router.router.cluster.context_policy = policy = policy_of()
        router.router.cluster.policies[ServerRole.CONTEXT] = policy
        router.router.orchestrator._needs_text = True
        for turn in range(4):
            for session in ("s1", "s2"):
                headers = {"x-multi-turn-session-id": "ignored", "x-session-id": session, "x-turn": str(turn)}
                body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
                assert (await router.client.post(CHAT, json=body, headers=headers)).status_code == 200
        assert sorted(len(worker.legs()) for worker in ctx) == [0, 4, 4]
        assert policy.describe()["sessions"] == 2
