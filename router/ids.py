"""`disagg_request_id`: 63-bit snowflakes, TensorRT-LLM's layout.

39 bits of monotonic milliseconds, 8 bits of node, 6 bits of router process, 10 bits of counter, folded into
[2**40, 2**63): smaller ids belong to the workers' own requests.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from kvstore.protocol import MIN_DISAGG_REQUEST_ID

_SPAN = 2**63 - 1 - MIN_DISAGG_REQUEST_ID
_COUNTER_BITS, _PROCESS_BITS, _NODE_BITS, _TIME_BITS = 10, 6, 8, 39
MAX_NODE_ID = (1 << _NODE_BITS) - 1
MAX_PROCESS_ID = (1 << _PROCESS_BITS) - 1


def default_node_id() -> int:
    """0..255, from this machine's hardware address."""
    return uuid.getnode() % (MAX_NODE_ID + 1)


class RequestIds:
    """Calling an instance gives the next id; distinct as long as fewer than 1024 are taken within a millisecond."""

    __slots__ = ("_clock", "_counter", "_place")

    def __init__(self, node_id: int, process_id: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        if not 0 <= node_id <= MAX_NODE_ID:
            raise ValueError(f"node_id must be in range [0, {MAX_NODE_ID + 1}), got {node_id}")
        if not 0 <= process_id <= MAX_PROCESS_ID:
            raise ValueError(f"process id must be in range [0, {MAX_PROCESS_ID + 1}), got {process_id}")
        self._place = (node_id << _PROCESS_BITS | process_id) << _COUNTER_BITS
        self._counter = 0
        self._clock = clock

    def __call__(self) -> int:
        milliseconds = int(self._clock() * 1000) & ((1 << _TIME_BITS) - 1)
        self._counter = (self._counter + 1) & ((1 << _COUNTER_BITS) - 1)
        snowflake = milliseconds << (_NODE_BITS + _PROCESS_BITS + _COUNTER_BITS) | self._place | self._counter
        return snowflake % _SPAN + MIN_DISAGG_REQUEST_ID
