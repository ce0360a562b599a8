"""When an engine asks the store: answers that are kept for a moment, and a breaker that rests. Virtual time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tanghulu.engines.common.lookup import ANSWER_S, MAX_REST_S, Answers, Breaker


def test_rests_grow_until_a_call_is_answered():
    breaker = Breaker(max_failures=3)
    for _ in range(3):
        assert breaker.allows(0.0)
        breaker.failed(0.0)
    assert [breaker.allows(at) for at in (0.0, 0.99, 1.0, 1.0)] == [False, False, True, False]
    breaker.failed(1.0)
    assert [breaker.allows(at) for at in (2.9, 3.0)] == [False, True]
    breaker.succeeded()
    assert all(breaker.allows(3.0) for _ in range(5))


@given(st.lists(st.tuples(st.floats(0, 40), st.booleans()), max_size=40))
def test_a_rest_ends(calls):
    breaker, now_s = Breaker(max_failures=2), 0.0
    for passed_s, answered in calls:
        now_s += passed_s
        if breaker.allows(now_s):
            if answered:
                breaker.succeeded()
            else:
                breaker.failed(now_s)
        breaker.check()
    assert breaker.allows(now_s + MAX_REST_S)


def test_answers_are_kept_for_a_moment():
    answers = Answers()
    answers.put("r", 5, 3, 10.0)
    assert answers.get("r", 5, 10.0 + ANSWER_S / 2) == 3
    assert answers.get("r", 6, 10.0) is None, "it has more blocks by now"
    assert answers.get("r", 5, 10.0 + ANSWER_S) is None
    answers.forget("r")
    assert len(answers) == 0
