"""How long a prefix is, held against the words of each policy, for pools drawn at random."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tanghulu.engines.sglang.hits import HitPolicy, PoolPages, leading, usable_prefix

NUM_PAGES = 7
THERE = st.lists(st.booleans(), min_size=NUM_PAGES, max_size=NUM_PAGES)


def allows(pool: PoolPages, length: int) -> bool:
    """Whether ``pool`` has what its policy wants of a prefix of ``length`` pages."""
    if pool.policy is HitPolicy.BLOCK_GROUPS:
        return True
    first = 0 if pool.policy is HitPolicy.ALL_PAGES else max(0, length - pool.num_trailing)
    return all(pool.there[first:length])


@given(
    st.integers(0, NUM_PAGES),
    st.lists(st.tuples(st.sampled_from(HitPolicy), THERE, st.integers(1, NUM_PAGES + 1)), max_size=3),
)
def test_every_length_that_all_pools_allow(num_kv: int, drawn: list[tuple[HitPolicy, list[bool], int]]) -> None:
    pools = [
        PoolPages(str(at), policy, there, num_trailing, block_pages=2, group_pages=1)
        for at, (policy, there, num_trailing) in enumerate(drawn)
    ]
    prefix = usable_prefix(num_kv, pools)
    expected = [length for length in range(1, num_kv + 1) if all(allows(pool, length) for pool in pools)]
    assert prefix.restorable == expected
    assert prefix.num_pages == max(expected, default=0)
    for pool in pools:
        alone = [length for length in range(1, num_kv + 1) if allows(pool, length)]
        groups = 2 * leading(pool.there)
        assert prefix.pools[pool.name] == (groups if pool.policy is HitPolicy.BLOCK_GROUPS else max(alone, default=0))


def test_groups_count_when_they_are_whole() -> None:
    pool = PoolPages("packed", HitPolicy.BLOCK_GROUPS, [True] * 5, block_pages=8, group_pages=2)
    assert usable_prefix(24, [pool]).pools == {"packed": 16}
