"""What the scheduler goes by, as the settings have it."""

from __future__ import annotations

import dataclasses

from engine.config import EngineConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    preempts: bool = False  # MAX_UTILIZATION
    by_priority: bool = False
    chunking: str | None = None  # engine.budget
    partial_reuse: bool = False
    prefix_aware: bool = False


def rules_of(config: EngineConfig) -> Rules:
    return Rules(
        preempts=config.capacity_policy == "MAX_UTILIZATION",
        by_priority=config.waiting_policy == "priority",
        chunking=config.chunking_policy,
        prefix_aware=config.prefix_aware and config.enable_block_reuse,
        # Blocks of the pool are found by key alone: a block of which a part is known is fetched whole.
        partial_reuse=config.enable_partial_reuse and config.enable_block_reuse and config.pool is None,
    )
