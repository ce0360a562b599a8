"""Stop expressions: the automaton beside Python's engine, however the text is cut; and what bounds the work."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.conductor.text import stop_regex
from tanghulu.conductor.text.stop_regex import MAX_EDGES, PatternMatcher, StopPattern
from tanghulu.errors import InvalidRequest

PATTERNS = [
    "ab", "a[bc]+d", "(a|bc)d", "a{2,3}b", "a?b", "a*b", "(ab)+c", "[^ab]c", r"\d+a", r"\w\s", ".c", "(?:a|b){2}c",
    "a(?:b?c?)d", "(?i:AB)c", r"[a-c]\.", "(a*b*)*c", "a.{0,3}d", r"\Da", r"[\d.]b", "a+?b", "(?i)[^ab]c",
    "(?i)[^a]", "[b-ca-b1]d", r"[^\Wa]b",
]  # fmt: skip


def first_match(pattern: str, text: str) -> tuple[int, int] | None:
    """The earliest end of a match, and the earliest start of one that ends there."""
    for end in range(len(text) + 1):
        for start in range(end):
            if re.fullmatch(pattern, text[start:end]):
                return start, end
    return None


@given(st.sampled_from(PATTERNS), st.text("abcdAB1. \n", max_size=12), st.lists(st.integers(0, 12), max_size=4))
def test_it_finds_what_python_finds(pattern, text, cuts):
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    for keep in (False, True):
        matcher = PatternMatcher([StopPattern(pattern)], keep)
        shown = "".join(map(matcher.feed, pieces)) + matcher.flush()
        found = first_match(pattern, text)
        assert matcher.matched == (pattern if found else None)
        assert shown == (text if found is None else text[: found[keep]])


def test_text_that_cannot_be_part_of_a_match_is_not_held_back():
    matcher = PatternMatcher([StopPattern("b+c"), StopPattern.literal("a.d")])
    assert [matcher.feed(piece) for piece in ("xa", "b", "bb", "x", "a.", "d!")] == ["x", "a", "", "bbbx", "", ""]
    assert matcher.matched == "a.d"


def test_the_one_that_ends_first_wins():
    matcher = PatternMatcher([StopPattern("abcd"), StopPattern("c")])
    assert (matcher.feed("xabcd"), matcher.matched) == ("xab", "c")


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "is not a regular expression"),
        ("a*", "matches the empty text"),
        ("", "matches the empty text"),
        ("^a", "uses anchors"),
        (r"\ba", "uses anchors"),
        ("a(?=b)", "uses anchors"),
        (r"(a)\1", "uses anchors"),
        ("a" * 2000, "has more than"),
        ("(a{99}){99}", "is too large"),
        ("(" * 500 + "a" + ")" * 500, "is not a regular expression"),
        ("(){9999999}a", "is too large"),
        ("((){9999}){9999}a", "is too large"),
        ("(" + "|".join(a + b for a in "abcdefgh" for b in "abcdefgh") + ")*c", "is too large"),
        ("a{99999999999}", "is not a regular expression"),
    ],
)
def test_what_has_no_small_automaton_is_refused(pattern, why):
    with pytest.raises(InvalidRequest, match=why):
        StopPattern(pattern)


def test_an_expression_that_a_later_python_reads_otherwise_is_read_as_by_this_one():
    matcher = PatternMatcher([StopPattern("[[a]b")])
    assert (matcher.feed("xb[b"), matcher.matched) == ("xb", "[[a]b")


def test_a_hostile_expression_costs_no_more_than_its_edges():
    """A backtracking engine takes 2^n steps for this one; here each character takes at most an edge's."""
    pattern = StopPattern("(a|a|a|a)*(a|a)*b")
    assert sum(map(len, pattern._follow)) <= MAX_EDGES
    matcher = PatternMatcher([pattern])
    assert matcher.feed("a" * 2000) == ""
    assert matcher.feed("c") == "a" * 2000 + "c"


def test_a_class_is_made_and_looked_through_once_however_often_it_is_repeated(monkeypatch):
    """2,000 places with 980 letters each, in any case, would take a second and more for each new character."""
    looked: list[int] = []

    def bisect(lows: list[int], code: int) -> int:
        looked.append(code)
        return bisect_right(lows, code)

    monkeypatch.setattr(stop_regex, "bisect_right", bisect)
    many = "".join(chr(0x4E00 + number) for number in range(980))
    pattern = StopPattern(f"[{many}x]{{2000}}")
    assert pattern.step({}, "x", 0)
    assert looked == [ord("x")]
    assert pattern.num_moves == 2000 + 1999


def test_what_characters_match_is_remembered_within_bounds():
    pattern = StopPattern("[^x]{2000}")
    matcher = PatternMatcher([pattern])
    for code in range(0x4E00, 0x4E00 + 1000):
        matcher.feed(chr(code))
        assert sum(map(len, pattern._by_character.values())) <= stop_regex._MAX_REMEMBERED
    assert pattern._by_character


def test_letters_whose_upper_case_is_longer_meet_a_class_in_any_case():
    matcher = PatternMatcher([StopPattern("(?i)[a-zß]+!")])
    assert (matcher.feed("1ßA!"), matcher.matched) == ("1", "(?i)[a-zß]+!")
