"""Eviction policies: which chunks go first when room is needed."""

from tanghulu.eviction.base import Policy
from tanghulu.eviction.ordered import Lru
from tanghulu.eviction.policies import POLICIES, make_policy

__all__ = ["POLICIES", "Lru", "Policy", "make_policy"]
