"""How long a prefix a hybrid model can take up, from which pages of each of its pools are there.

A model with several kinds of attention keeps a pool of pages for each. The KV pool's pages are named by the prompt;
what the others must have beside them is their policy (SGLang's ``PoolHitPolicy``, by its values).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tanghulu.errors import InvalidRequest


class HitPolicy(Enum):
    """What of a pool must be there, so that a prefix can be taken up."""

    ALL_PAGES = "all_pages"  # every page of the prefix
    TRAILING_PAGES = "trailing_pages"  # the last pages of the prefix: a state, or a sliding window
    BLOCK_GROUPS = "block_groups"  # nothing: whole groups are a second form of the prefix, and are counted

    @classmethod
    def of(cls, policy: Enum | str) -> HitPolicy:
        """SGLang's policy as ours; raises InvalidRequest for one that a later version has made up."""
        value = policy.value if isinstance(policy, Enum) else policy
        try:
            return cls(value)
        except ValueError:
            raise InvalidRequest(f"the policy {value!r} of a pool is unknown") from None


@dataclass(frozen=True)
class PoolPages:
    """One pool beside KV. ``there``: for each page of the prompt, or each key of its groups, whether it is stored.

    ``num_trailing``: how many last pages TRAILING_PAGES wants. ``block_pages`` and ``group_pages`` of BLOCK_GROUPS: the
    pages of the prompt that one group stands for, and the keys in a group.
    """

    name: str
    policy: HitPolicy
    there: Sequence[bool]
    num_trailing: int = 1
    block_pages: int = 0
    group_pages: int = 0


@dataclass(frozen=True)
class Prefix:
    """``num_pages`` can be taken up; ``restorable``: every length that can; ``pools``: pages that each pool covers."""

    num_pages: int
    restorable: list[int]
    pools: dict[str, int]


def leading(there: Sequence[bool]) -> int:
    """How many are there, up to the first that is not."""
    return next((at for at, each in enumerate(there) if not each), len(there))


def usable_prefix(num_kv_pages: int, pools: Sequence[PoolPages]) -> Prefix:
    """The longest prefix of at most ``num_kv_pages`` that every pool allows.

    Example: 6 pages of KV, and a state that is stored after pages 2 and 4. With TRAILING_PAGES of 1 the restorable
    lengths are 2 and 4, and 4 pages are taken up: 5 and 6 would want a state that nobody has.
    """
    lengths = set(range(1, num_kv_pages + 1))
    counts: dict[str, int] = {}
    for pool in pools:
        if pool.policy is HitPolicy.BLOCK_GROUPS:
            counts[pool.name] = _covered_by_groups(pool)
            continue
        allowed = _allowed_lengths(pool, num_kv_pages)
        counts[pool.name] = max(allowed, default=0)
        lengths &= allowed
    restorable = sorted(lengths)
    return Prefix(restorable[-1] if restorable else 0, restorable, counts)


def _allowed_lengths(pool: PoolPages, num_pages: int) -> set[int]:
    if pool.policy is HitPolicy.ALL_PAGES:
        return set(range(1, min(num_pages, leading(pool.there)) + 1))
    allowed, run = set[int](), 0
    for length in range(1, num_pages + 1):
        run = run + 1 if pool.there[length - 1] else 0
        if run >= min(length, pool.num_trailing):
            allowed.add(length)
    return allowed


def _covered_by_groups(pool: PoolPages) -> int:
    """The pages that the leading whole groups stand for."""
    return leading(pool.there) // pool.group_pages * pool.block_pages
