"""The policies by their ``--policy`` names, and their options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tanghulu.conductor.routing.policies.base import RoutingPolicy
from tanghulu.conductor.routing.policies.published import Dynamo, LinearPolicy, Mooncake
from tanghulu.conductor.routing.policies.simple import LeastLoaded, PowerOfTwo, Random, RoundRobin, SessionAffinity
from tanghulu.conductor.routing.policies.ttft_min import TtftMin


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Options of all policies; each uses those that apply to it. See the policies' modules."""

    replica_weight: float = 1.0
    load_weight: float = 6.0
    balance_threshold: float = 1.5
    overlap_weight: float = 1.0
    temperature: float = 0.0
    store_credit: float = 0.0
    alpha: float = 0.5
    beta: float = 0.5
    gamma: float = 0.05
    patience_s: float = 2.0
    seed: int = 0


POLICIES: dict[str, Callable[[PolicyOptions], RoutingPolicy]] = {
    TtftMin.name: lambda o: TtftMin(o.replica_weight, o.seed, o.load_weight),
    Mooncake.name: lambda o: Mooncake(o.balance_threshold, o.seed),
    Dynamo.name: lambda o: Dynamo(o.overlap_weight, o.temperature, o.store_credit, o.seed),
    LinearPolicy.name: lambda o: LinearPolicy(o.alpha, o.beta, o.gamma, o.seed),
    LeastLoaded.name: lambda o: LeastLoaded(o.seed),
    RoundRobin.name: lambda o: RoundRobin(),
    Random.name: lambda o: Random(o.seed),
    PowerOfTwo.name: lambda o: PowerOfTwo(o.seed),
}
AFFINITY = "+session-affinity"
#: All names: every policy, with and without the modifier.
POLICY_NAMES = (*POLICIES, *(name + AFFINITY for name in POLICIES))
#: Policies whose decisions include fetches between workers.
_FETCHING = (TtftMin.name, Mooncake.name)
_DEFAULTS = PolicyOptions()


def make_policy(name: str, options: PolicyOptions = _DEFAULTS) -> RoutingPolicy:
    """Create a policy; ``name`` is one of POLICY_NAMES (checked by the configuration)."""
    policy = POLICIES[name.removesuffix(AFFINITY)](options)
    return SessionAffinity(policy, options.patience_s) if name.endswith(AFFINITY) else policy


def decides_fetch(name: str) -> bool:
    """Return whether decisions of the policy called ``name`` include fetches from other workers."""
    return name.removesuffix(AFFINITY) in _FETCHING
