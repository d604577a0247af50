"""A policy is filter → score → pick, synchronous: between the score and the reservation nothing else can happen."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from router.worker import Worker


class Need:
    """What a policy may know of a request. `keys` are the prompt's block keys, empty when they are not known.

    `matched` keeps the index's answer to `keys`, so that both legs of a request ask once.
    """

    __slots__ = ("keys", "matched", "num_tokens")

    def __init__(self, num_tokens: int = 0, keys: Sequence[bytes] = ()) -> None:
        self.num_tokens = num_tokens
        self.keys = keys
        self.matched: dict[int, int] | None = None


class Policy(abc.ABC):
    name: str
    needs_tokens = False
    needs_keys = False

    def __init__(self) -> None:
        self.decisions = 0

    def pick(self, candidates: Sequence[Worker], need: Need) -> Worker:
        """One of `candidates` (not empty), with the request added to its load; `release` takes it off again."""
        worker = candidates[0] if len(candidates) == 1 else self.choose(candidates, need)
        self.decisions += 1
        worker.last_picked = self.decisions
        worker.active += 1
        worker.active_tokens += need.num_tokens
        return worker

    @staticmethod
    def release(worker: Worker, need: Need) -> None:
        worker.active -= 1
        worker.active_tokens -= need.num_tokens

    @abc.abstractmethod
    def choose(self, candidates: Sequence[Worker], need: Need) -> Worker:
        """The best of two or more; changes no load."""

    def describe(self) -> dict[str, object]:
        return {"type": self.name, "decisions": self.decisions}
