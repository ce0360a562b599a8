"""Length of the prefix that a hybrid model can reuse, given the stored pages of each of its pools.

A model with several kinds of attention keeps a pool of pages for each. The KV pool's pages are named by the prompt;
the pages required from the other pools are given by their policy (SGLang's ``PoolHitPolicy``, by its values).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tanghulu.errors import InvalidRequest


class HitPolicy(Enum):
    """Pages of a pool that must be stored for a prefix to be reusable."""

    ALL_PAGES = "all_pages"  # every page of the prefix
    TRAILING_PAGES = "trailing_pages"  # the last pages of the prefix: a state, or a sliding window
    BLOCK_GROUPS = "block_groups"  # nothing: whole groups are a second form of the prefix, and are counted

    @classmethod
    def of(cls, policy: Enum | str) -> HitPolicy:
        """Convert SGLang's policy to ours; raises InvalidRequest for one added by a later version."""
        value = policy.value if isinstance(policy, Enum) else policy
        try:
            return cls(value)
        except ValueError:
            raise InvalidRequest(f"unknown pool policy {value!r}: this SGLang is newer than the connector") from None


@dataclass(frozen=True)
class PoolPages:
    """One pool beside KV. ``there``: for each page of the prompt, or each key of its groups, whether it is stored.

    ``num_trailing``: number of last pages required by TRAILING_PAGES. ``block_pages`` and ``group_pages`` of
    BLOCK_GROUPS: the pages of the prompt that one group represents, and the keys in a group.
    """

    name: str
    policy: HitPolicy
    there: Sequence[bool]
    num_trailing: int = 1
    block_pages: int = 0
    group_pages: int = 0


@dataclass(frozen=True)
class Prefix:
    """``num_pages`` can be reused; ``restorable``: every length that can; ``pools``: pages that each pool covers."""

    num_pages: int
    restorable: list[int]
    pools: dict[str, int]


def leading(there: Sequence[bool]) -> int:
    """Return the number of stored pages before the first missing one."""
    return next((at for at, each in enumerate(there) if not each), len(there))


def usable_prefix(num_kv_pages: int, pools: Sequence[PoolPages]) -> Prefix:
    """Return the longest prefix of at most ``num_kv_pages`` that every pool allows.

    Example: 6 pages of KV, and a state that is stored after pages 2 and 4. With TRAILING_PAGES of 1 the restorable
    lengths are 2 and 4, and 4 pages are reused: 5 and 6 would need a state that is not stored.
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
    """Return the number of pages represented by the leading whole groups."""
    return leading(pool.there) // pool.group_pages * pool.block_pages
