"""How a worker is chosen among those that could serve a leg. One policy a role; `make_policy` makes it."""

from __future__ import annotations

from router.config import RouterConfig
from router.index import BlockIndex
from router.policy.base import Need, Policy, PrefixAware
from router.policy.conversation import Conversation
from router.policy.kv_cache_aware import KvCacheAware
from router.policy.least_time import LeastTime
from router.policy.load_balancing import LoadBalancing
from router.policy.round_robin import RoundRobin

__all__ = ["Need", "Policy", "PrefixAware", "make_policy"]


def make_policy(config: RouterConfig, index: BlockIndex) -> Policy:
    if config.type == "least_time":
        return LeastTime(config, index)
    if config.type == "kv_cache_aware":
        return KvCacheAware(config, index)
    if config.type == "conversation":
        return Conversation(config)
    if config.type == "load_balancing":
        return LoadBalancing(config.use_tokens)
    return RoundRobin()
