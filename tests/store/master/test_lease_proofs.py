"""What a caller believes of a master whose clock may stand still: never more than etcd's lease allows.

Masters, callers and an etcd together, every message late, are in ``test_range_election``.
"""

from __future__ import annotations

from tanghulu.store.protocol.terms import MARGIN_S, MAX_ANSWERS, NO_TERM, LeaseProofs, Renewals, Term

TTL_S = 3.0
SEVEN, NINE = Term(7, 77), Term(9, 77)


def proofs(ttl_s: float = TTL_S) -> LeaseProofs:
    """Those of a caller that has been told the length of the lease, and has no proof."""
    made = LeaseProofs()
    made.record(SEVEN, 0.0, Renewals(1, 1), ttl_s)
    return made


def test_renewals_travel_as_one_number() -> None:
    assert Renewals.of(Renewals(42, 41).packed) == (42, 41)
    assert Renewals.of(0) == Renewals() == (0, 0)
    assert Renewals((1 << 32) - 1, (1 << 32) - 1).packed == (1 << 64) - 1


def test_an_answer_is_proven_by_a_renewal_that_was_asked_for_behind_it() -> None:
    known = LeaseProofs()
    known.record(SEVEN, 10.0, Renewals(41, 41), TTL_S)
    assert not known.is_proven(SEVEN, 10.1), "first contact: its own word is no proof"
    known.record(SEVEN, 10.6, Renewals(42, 42))
    assert known.is_proven(SEVEN, 12.69)
    assert not known.is_proven(SEVEN, 12.7), "counted from when the call was sent, with a margin"
    assert not known.is_proven(NINE, 11.0)
    known.check()


def test_a_renewal_that_was_under_way_proves_nothing() -> None:
    known = proofs()
    known.record(SEVEN, 10.0, Renewals(42, 41))
    known.record(SEVEN, 10.4, Renewals(42, 42))
    assert known.is_proven(SEVEN, MARGIN_S)
    assert not known.is_proven(SEVEN, 10.5), "etcd may have taken number 42 long before 10.0"
    known.record(SEVEN, 10.6, Renewals(43, 43))
    assert known.is_proven(SEVEN, 10.4 + TTL_S - MARGIN_S - 0.01)


def test_after_a_silence_there_is_no_proof_until_it_is_asked_for() -> None:
    known = proofs()
    known.record(SEVEN, 10.0, Renewals(41, 41))
    known.record(SEVEN, 10.6, Renewals(42, 42))
    known.record(SEVEN, 90.0, Renewals(43, 43))
    assert not known.is_proven(SEVEN, 90.1), "43 may have been confirmed a minute ago"
    known.record(SEVEN, 90.1, Renewals(43, 44), TTL_S)  # the answer to PROVE: 44 was asked for behind it
    assert known.is_proven(SEVEN, 92.7)


def test_a_new_term_begins_without_a_proof_and_an_old_one_ends_none() -> None:
    known = proofs()
    known.record(SEVEN, 10.0, Renewals(1, 2), TTL_S)
    known.record(NINE, 10.1, Renewals(5, 5))
    assert not known.is_proven(NINE, 10.2)
    known.record(NINE, 10.2, Renewals(5, 6), TTL_S)
    known.record(SEVEN, 10.3, Renewals(7, 8), TTL_S)
    assert known.is_proven(NINE, 10.4)
    assert not known.is_proven(SEVEN, 10.4)
    assert not known.is_proven(NO_TERM, 10.4)


def test_what_is_kept_is_bounded() -> None:
    known = proofs()
    for number in range(100):
        known.record(SEVEN, float(number), Renewals(number + 2, 1))
        known.check()
    assert len(known._answers) == MAX_ANSWERS
