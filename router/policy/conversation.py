"""Requests of one conversation go to one worker, whatever its load; a new conversation goes to the least loaded one.

A conversation has the name that the client gives it. Without one it is known by its text, cut in blocks of
`tokens_per_block` x 5 characters and hashed as a chain: a request of whose blocks at least `match_threshold` continue a
known conversation belongs to it. Load is the estimated prompt tokens in flight.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from router.config import RouterConfig
from router.policy.base import MANY, Need, Policy
from router.worker import Worker

CHARACTERS_PER_TOKEN = 5
_DEFAULT_BLOCK = 128  # tokens


class _Session:
    __slots__ = ("blocks", "worker")

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.blocks: set[bytes | int] = set()


class Conversation(Policy):
    name = "conversation"
    needs_text = True

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self._config = config
        self.needs_tokens = self.needs_keys = config.use_token_ids
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # the least recently used first
        self._by_block: dict[bytes | int, str] = {}
        self._named = 0
        self._loads: dict[Worker, int] = {}
        self.continued = 0

    def choose(self, candidates: Sequence[Worker], need: Need) -> Worker:
        name = self._name(need)
        session = None if name is None else self._sessions.get(name)
        if session is not None and session.worker in candidates:
            self.continued += 1
            return session.worker
        if len(candidates) > MANY:
            candidates = self._window(candidates)
        return min(candidates, key=lambda worker: (self._loads.get(worker, 0), worker.last_picked))

    def _name(self, need: Need) -> str | None:
        if need.conversation:
            return need.conversation
        blocks = self._blocks(need)
        matched, name = 0, None
        for block in blocks:
            found = self._by_block.get(block)
            if found is None:
                break
            matched, name = matched + 1, found
        return name if blocks and matched / len(blocks) >= self._config.match_threshold else None

    def _blocks(self, need: Need) -> list[bytes | int]:
        """Chained hashes, each of all the text up to its block's end."""
        skipped = self._config.hash_skip_count
        if self._config.use_token_ids:
            return list(need.keys[skipped:])
        step = (self._config.tokens_per_block or _DEFAULT_BLOCK) * CHARACTERS_PER_TOKEN
        blocks: list[bytes | int] = []
        chain = 0
        for start in range(skipped * step, len(need.text) - step + 1, step):
            chain = hash((chain, need.text[start : start + step]))
            blocks.append(chain)
        return blocks

    def reserve(self, worker: Worker, need: Need) -> None:
        self._loads[worker] = self._loads.get(worker, 0) + self._tokens(need)
        name = self._name(need)
        if name is None:
            self._named += 1
            name = f"conv_id:{self._named}"
        session = self._sessions.get(name)
        if session is None or session.worker is not worker:
            self._drop(name)
            session = self._sessions[name] = _Session(worker)
        self._sessions.move_to_end(name)
        if not need.conversation:
            for block in self._blocks(need):
                if self._by_block.setdefault(block, name) == name:
                    session.blocks.add(block)
        while len(self._sessions) > self._config.max_sessions:
            self._drop(next(iter(self._sessions)))

    def release(self, worker: Worker, need: Need) -> None:
        super().release(worker, need)
        if worker in self._loads:
            self._loads[worker] -= self._tokens(need)

    def forget(self, worker: Worker) -> None:
        self._loads.pop(worker, None)
        for name in [name for name, session in self._sessions.items() if session.worker is worker]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        for block in () if session is None else session.blocks:
            if self._by_block.get(block) == name:
                del self._by_block[block]

    @staticmethod
    def _tokens(need: Need) -> int:
        return need.num_tokens or len(need.text) // CHARACTERS_PER_TOKEN

    def scores(self, candidates: Sequence[Worker], need: Need) -> list[dict[str, float]]:
        name = self._name(need)
        session = None if name is None else self._sessions.get(name)
        found = []
        for worker in candidates:
            pinned = session is not None and session.worker is worker
            load = self._loads.get(worker, 0)
            found.append({"score": 0.0 if pinned else -1.0 - load, "pinned": float(pinned), "load_tokens": load})
        return found

    def describe(self) -> dict[str, object]:
        return super().describe() | {"sessions": len(self._sessions), "continued": self.continued}
