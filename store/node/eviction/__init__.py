"""Eviction policies: who goes first when room is needed."""

from tanghulu.store.node.eviction.base import Policy
from tanghulu.store.node.eviction.lru import Lru
from tanghulu.store.node.eviction.policies import POLICIES, make_policy

__all__ = ["POLICIES", "Lru", "Policy", "make_policy"]
