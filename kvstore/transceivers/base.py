"""What moves KV blocks, seen by the engine: stores that are addressed by block key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class BlockStore(Protocol):
    """A cache of full blocks outside the engine. It promises nothing: trouble of any kind is a miss.

    All calls block, end within `timeout` seconds, may come from several threads at once, and never raise.
    """

    def contains(self, keys: Sequence[bytes], timeout: float) -> int:
        """Length of the leading run of `keys` that is present."""

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], timeout: float) -> int:
        """Length of the leading run loaded and verified. Buffers behind that run may hold anything."""

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview], timeout: float) -> int:
        """How many are stored afterwards; the ones that were there before count."""

    def state(self) -> str:
        """ "up" or "degraded: <reason>"."""

    def close(self) -> None: ...
