"""The policies by the name that ``--policy`` gives."""

from __future__ import annotations

from collections.abc import Callable

from tanghulu.conductor.policies.base import Policy
from tanghulu.conductor.policies.simple import LeastLoaded, Random, RoundRobin
from tanghulu.conductor.policies.ttft_min import TtftMin

POLICIES: dict[str, Callable[[], Policy]] = {
    policy.name: policy for policy in (TtftMin, RoundRobin, Random, LeastLoaded)
}


def make_policy(name: str) -> Policy:
    """A fresh policy; ``name`` is a key of POLICIES (the configuration has checked it)."""
    return POLICIES[name]()
