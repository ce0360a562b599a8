"""Overrides of routing set by a request, and the policies that serve them.

A request may name another policy, other weights, or workers. Each combination of policy and weights has its own policy
object, kept while in use (the latest MAX_POLICIES of them). A named worker is used while it is available; when a
request has to move because that worker was lost, the policy decides.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from zlib import crc32

from tanghulu.conductor.routing.policies.base import RoutingPolicy, WorkerView
from tanghulu.conductor.routing.policies.registry import PolicyOptions, make_policy
from tanghulu.errors import ConfigError
from tanghulu.types import InstanceId

MAX_POLICIES = 64
#: One more than the weight of load, so that workers are ranked as if nobody could fetch (docs/design/0007).
LIVE_REPLICA_WEIGHT = 7.0
#: Options that may be weighted: all options of the policies but the seed.
WEIGHTS = tuple(f.name for f in dataclasses.fields(PolicyOptions) if f.name != "seed")

_ANYBODY = InstanceId("")


@dataclass(frozen=True, slots=True)
class RoutingOverrides:
    """Overrides of one request: a policy, its weights, the workers for both phases; "" where not overridden.

    ``policy`` is one of POLICY_NAMES; ``weights`` name fields of PolicyOptions.
    """

    policy: str = ""
    prefill: InstanceId = _ANYBODY
    decode: InstanceId = _ANYBODY
    weights: tuple[tuple[str, float], ...] = ()


NO_OVERRIDES = RoutingOverrides()


class RoutingPolicies:
    """The conductor's policy, and those selected by requests."""

    def __init__(self, name: str, options: PolicyOptions) -> None:
        self.default = make_policy(name, options)
        self._name, self._options = name, options
        self._overridden: OrderedDict[tuple[str, tuple[tuple[str, float], ...]], RoutingPolicy] = OrderedDict()

    def of(self, overrides: RoutingOverrides) -> RoutingPolicy:
        """Return the policy for ``overrides``; equal overrides give the same object."""
        if not overrides.policy and not overrides.weights:
            return self.default
        key = (overrides.policy or self._name, overrides.weights)
        policy = self._overridden.get(key)
        if policy is None:
            policy = self._overridden[key] = make_policy(key[0], replace(self._options, **dict(overrides.weights)))  # type: ignore[arg-type]
            if len(self._overridden) > MAX_POLICIES:
                self._overridden.popitem(last=False)
        self._overridden.move_to_end(key)
        return policy

    def check(self) -> None:
        assert len(self._overridden) <= MAX_POLICIES


def restricted(shown: Sequence[WorkerView], overrides: RoutingOverrides) -> Sequence[WorkerView]:
    """Return ``shown`` with only the named workers able to do a phase; a named worker absent from it is ignored."""
    for phase, wanted in (("can_prefill", overrides.prefill), ("can_decode", overrides.decode)):
        if wanted and any(w.id == wanted for w in shown):
            shown = [replace(w, **{phase: w.id == wanted}) for w in shown]  # type: ignore[arg-type]
    return shown


def parse_weights(text: str, drawn_by: str = "") -> PolicyOptions:
    """Parse ``"alpha=0.7,temperature=0.2"`` as options of a live service; raises ConfigError naming the fault.

    ``drawn_by`` names the deciding process: services with the same random draws would all choose the same of equal
    workers.
    """
    weights = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition("=")
        if name not in WEIGHTS:
            raise ConfigError(f"policy weight {name!r} is unknown; known: {', '.join(WEIGHTS)}")
        try:
            weights[name] = float(value)
        except ValueError:
            raise ConfigError(f"policy weight {part!r} is not of the form name=number") from None
        if not 0 <= weights[name] < float("inf"):
            raise ConfigError(f"policy weight {part!r} is not a number of at least 0")
    return PolicyOptions(**{"replica_weight": LIVE_REPLICA_WEIGHT, **weights}, seed=crc32(drawn_by.encode()))
