"""A policy is filter → score → pick, synchronous: between the score and the reservation nothing else can happen."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from router.index import BlockIndex
from router.worker import Worker

MANY = 32  # candidates above which a policy that scores looks at the cached ones and at a part of the others
PART = 16


class Need:
    """What a policy may know of a request. `keys` are the prompt's block keys, empty when they are not known.

    `matched` keeps the index's answer to `keys`, so that both legs of a request ask once. `conversation` is the
    client's own name for it, `text` what the prompt begins with; both only where a policy asks for them.
    """

    __slots__ = ("block_size", "conversation", "keys", "matched", "num_tokens", "text")

    def __init__(self, num_tokens: int = 0, keys: Sequence[bytes] = (), block_size: int = 0) -> None:
        self.num_tokens = num_tokens
        self.keys = keys
        self.block_size = block_size  # tokens, of the keys; 0: as configured
        self.conversation = ""
        self.text = ""
        self.matched: dict[int, int] | None = None


class Policy(abc.ABC):
    name: str
    needs_tokens = False
    needs_keys = False
    needs_text = False

    def __init__(self) -> None:
        self.decisions = 0
        self.in_flight = 0

    def pick(self, candidates: Sequence[Worker], need: Need) -> Worker:
        """One of `candidates` (not empty), with the request added to its load; `release` takes it off again."""
        worker = candidates[0] if len(candidates) == 1 else self.choose(candidates, need)
        self.decisions += 1
        worker.last_picked = self.decisions
        worker.active += 1
        self.in_flight += 1
        worker.active_tokens += need.num_tokens
        self.reserve(worker, need)
        return worker

    def release(self, worker: Worker, need: Need) -> None:
        worker.active -= 1
        self.in_flight -= 1
        worker.active_tokens -= need.num_tokens

    @abc.abstractmethod
    def choose(self, candidates: Sequence[Worker], need: Need) -> Worker:
        """The best of two or more; changes no load."""

    def reserve(self, worker: Worker, need: Need) -> None:  # noqa: B027 - optional
        """Bookkeeping of a policy's own, in the same step as the choice."""

    def served(self, worker: Worker, need: Need, cached_tokens: int | None) -> None:  # noqa: B027 - optional
        """The leg was answered, before its `release`; the worker had `cached_tokens` of the prompt, None: unknown."""

    def failed(self, worker: Worker, need: Need) -> None:  # noqa: B027 - optional
        """The leg came to nothing, before its `release`."""

    def forget(self, worker: Worker) -> None:  # noqa: B027 - optional
        """The worker has left."""

    def scores(self, candidates: Sequence[Worker], need: Need) -> list[dict[str, float]]:
        """For each candidate what it is judged by; a larger "score" is better. Changes nothing."""
        return [{"score": 0.0} for _ in candidates]

    def _window(self, candidates: Sequence[Worker]) -> list[Worker]:
        """PART of many candidates, the next ones at each decision."""
        start = self.decisions * PART % len(candidates)
        return [*candidates[start : start + PART], *candidates[: max(0, start + PART - len(candidates))]]

    def describe(self) -> dict[str, object]:
        return {"type": self.name, "decisions": self.decisions}


class PrefixAware(Policy):
    """Policies that ask the index what each worker has of a prompt."""

    needs_tokens = True
    needs_keys = True

    def __init__(self, index: BlockIndex) -> None:
        super().__init__()
        self._index = index
        self.affinity_decisions = 0  # the chosen worker held a part of the prompt

    def predicted_blocks(self, worker: Worker, need: Need) -> int:
        """Leading blocks of the prompt that the index says `worker` holds."""
        return matched_blocks(worker, self._matched(need))

    def _matched(self, need: Need) -> dict[int, int]:
        if need.matched is None:
            need.matched = self._index.match(need.keys)
        return need.matched

    def _shortlist(self, candidates: Sequence[Worker], matched: dict[int, int]) -> Sequence[Worker]:
        """All of a few. Of many: those with a part of the prompt, and a window on the rest that moves on."""
        if len(candidates) <= MANY:
            return candidates
        window = self._window(candidates)
        owners = (self._index.owner(slot) for slot in matched)
        return window + [owner for owner in owners if owner is not None and owner in candidates]

    def describe(self) -> dict[str, object]:
        return super().describe() | {"affinity_decisions": self.affinity_decisions}


def matched_blocks(worker: Worker, matched: dict[int, int]) -> int:
    return 0 if worker.blocks is None else matched.get(worker.blocks.slot, 0)
