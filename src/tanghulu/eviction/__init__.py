"""Eviction policies: the order in which chunks are evicted when room is needed."""

from tanghulu.eviction.base import Policy
from tanghulu.eviction.policies import POLICIES, make_policy
from tanghulu.eviction.simple import Lru

__all__ = ["POLICIES", "Lru", "Policy", "make_policy"]
