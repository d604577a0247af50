"""KV cache events as TensorRT-LLM reports them (POST /kv_cache_events), for routers that index its workers.

{event_id, data, window_size, hash_algo}, data.type one of created, stored, removed, updated. Blocks are named by
`v1_block_key`, cache level 0 is the KV pool, 1 is host memory.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from engine.host_tier import Content
from kvstore.hashing import chain_seed, v1_block_key

HASH_ALGO = "v1_block_key"

_UNSALTED = chain_seed()


class CacheEventLog:
    """Keeps the newest `limit` events until they are taken."""

    def __init__(self, limit: int, window: int, blocks: tuple[int, int]) -> None:
        """`blocks`: how many each level has. `window`: tokens of attention, here the longest sequence."""
        self._window = window
        self._events: deque[dict[str, Any]] = deque(maxlen=limit)
        self._next_id = 0
        self._hash_of: dict[bytes, int] = {}  # of resident blocks, by our keys
        self._parent_of_next = b""  # the key that the newest stored event could go on from
        self._add({"type": "created", "num_blocks_per_cache_level": list(blocks)})

    def take(self) -> list[bytes]:
        """Each as JSON."""
        self._parent_of_next = b""
        events = [msgspec.json.encode(event) for event in self._events]
        self._events.clear()
        return events

    # ------------------------------------------------------------ engine.cache_changes.CacheLog

    def stored(self, content: Content) -> None:
        parent = self._hash_of.get(content.parent)
        salt = None if content.parent == _UNSALTED or parent is not None else int.from_bytes(content.parent[:8])
        number = v1_block_key(content.tokens, parent or 0, salt_id=salt)
        self._hash_of[content.key] = number
        block = {
            "type": "stored_block",
            "block_hash": number,
            "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in content.tokens],
            "cache_level": 0,
            "priority": content.priority,
        }
        if self._events and self._parent_of_next and self._parent_of_next == content.parent:
            self._events[-1]["data"]["blocks"].append(block)
        else:
            self._add({"type": "stored", "parent_hash": parent, "blocks": [block]})
        self._parent_of_next = content.key

    def removed(self, content: Content) -> None:
        number = self._hash_of.pop(content.key, None)
        if number is None:
            return
        last = self._events[-1]["data"] if self._events else None
        if last is not None and last["type"] == "removed":
            last["block_hashes"].append(number)
        else:
            self._add({"type": "removed", "block_hashes": [number]})

    def moved(self, content: Content, level: int) -> None:
        change = {"type": "event_diff", "old_value": 1 - level, "new_value": level}
        self._updated(content, "cache_level", change)

    def reprioritised(self, content: Content, old: int) -> None:
        self._updated(content, "priority", {"type": "event_diff", "old_value": old, "new_value": content.priority})

    def _updated(self, content: Content, field: str, change: dict[str, Any]) -> None:
        number = self._hash_of.get(content.key)
        if number is not None:
            self._add({"type": "updated", "block_hash": number, field: change})

    def _add(self, data: dict[str, Any]) -> None:
        self._parent_of_next = b""
        event = {"event_id": self._next_id, "data": data, "window_size": self._window, "hash_algo": HASH_ALGO}
        self._events.append(event)
        self._next_id += 1
