"""Stop expressions: regular expressions over a text that grows character by character, in bounded time.

A backtracking engine may take for ever, and would rescan the whole text with each piece. So an expression becomes
Glushkov's automaton: a state for each place of a character in it, and no empty moves (V. M. Glushkov, "The abstract
theory of automata", 1961). One step takes each live state to those that may follow it, so a character costs at most the
automaton's edges, of which there are at most MAX_EDGES.

Example: ``a[bc]+d`` has the places 1 a, 2 [bc], 3 d; 1 leads to 2, 2 to 2 and 3, and 3 is the end. Over "xabcd" alive
are {}, {1}, {2}, {2}, {3}: the match is found with the d, and began where the thread that reached 3 did.

Expressions that look around (anchors, look-ahead, back references) have no such automaton and are refused. Independent
of tokens.
"""

from __future__ import annotations

import re
import re._constants as op  # type: ignore[import-not-found]  # the parser of re, without types
import re._parser as parser  # type: ignore[import-not-found]
import threading
import warnings
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from tanghulu.errors import InvalidRequest

MAX_PATTERN_CHARACTERS: Final = 1024
#: Moves between places of one automaton; bounds the work per character.
MAX_EDGES: Final = 2048
#: Most parts of an expression, each counted as often as it is repeated.
_MAX_PARTS: Final = 4096
#: Most cached places over all characters, plus one per cached character: 2 MiB at most.
_MAX_REMEMBERED: Final = 1 << 15
#: Warnings are disabled for the whole process while an expression is parsed.
_parsing: Final = threading.Lock()
_CATEGORIES: Final[dict[Any, Callable[[str], bool]]] = {
    op.CATEGORY_DIGIT: str.isdecimal,
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
}
_NOT_CATEGORIES: Final = {
    op.CATEGORY_NOT_DIGIT: op.CATEGORY_DIGIT,
    op.CATEGORY_NOT_SPACE: op.CATEGORY_SPACE,
    op.CATEGORY_NOT_WORD: op.CATEGORY_WORD,
}

Matches = Callable[[str], bool]


@dataclass(slots=True)
class _Part:
    """A part of an expression: whether it may be empty, and the places it may begin and end with."""

    nullable: bool = True
    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)


class StopPattern:
    """One expression as an automaton. Raises InvalidRequest if it is invalid, too large, or matches nothing."""

    def __init__(self, source: str) -> None:
        self.source = source
        #: The places of each character or class of characters, however often it is repeated, and its contents.
        self._places: dict[Hashable, tuple[Matches, set[int]]] = {}
        self._follow: list[set[int]] = []
        self._num_edges = 0
        self._num_parts = 0
        self._by_character: dict[str, frozenset[int]] = {}
        self._num_remembered = 0
        if len(source) > MAX_PATTERN_CHARACTERS:
            raise self._refusal(f"has more than {MAX_PATTERN_CHARACTERS} characters")
        try:
            with _parsing, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of syntax that a later Python will interpret differently
                tree = parser.parse(source)
            whole = self._sequence(tree, tree.state.flags)
        except (re.error, OverflowError, RecursionError) as error:
            raise self._refusal(f"is not a regular expression: {error}") from None
        if whole.nullable:
            raise self._refusal("matches the empty text, so it would stop everything")
        self._first = frozenset(whole.first)
        self._last = frozenset(whole.last)

    @classmethod
    def literal(cls, text: str) -> StopPattern:
        """Build the automaton of a stop string, which keeps its name."""
        pattern = cls(re.escape(text))
        pattern.source = text
        return pattern

    @property
    def num_moves(self) -> int:
        """Number of places and moves between them: the maximum cost of a character."""
        return len(self._follow) + self._num_edges

    def step(self, alive: dict[int, int], character: str, at: int) -> dict[int, int]:
        """Return the live places after ``character``, each with the start of its earliest thread."""
        accepting = self._by_character.get(character)
        if accepting is None:
            accepting = self._accepting(character)
        after = dict.fromkeys(self._first & accepting, at)
        for place, start in alive.items():
            for following in self._follow[place] & accepting:
                if start < after.get(following, at + 1):
                    after[following] = start
        return after

    def match_start(self, alive: dict[int, int]) -> int | None:
        """Return the start of a match that ends here; None if there is none."""
        return min((start for place, start in alive.items() if place in self._last), default=None)

    def _accepting(self, character: str) -> frozenset[int]:
        found = frozenset[int]().union(*(places for matches, places in self._places.values() if matches(character)))
        self._num_remembered += len(found) + 1
        if self._num_remembered > _MAX_REMEMBERED:
            self._by_character.clear()
            self._num_remembered = len(found) + 1
        self._by_character[character] = found
        return found

    # --- building

    def _refusal(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"stop_regex: {self.source[:64]!r} {why}")

    def _place(self, key: Hashable, make: Callable[[], Matches], flags: int, negated: bool = False) -> _Part:
        """Create a place for ``key``; ``make`` builds its test, once, which ``negated`` inverts."""
        ignores_case = bool(flags & re.IGNORECASE)
        key = (key, ignores_case)
        if key not in self._places:
            matches = _in_any_case(make()) if ignores_case else make()
            self._places[key] = (_not(matches) if negated else matches, set())
        self._follow.append(set())
        place = len(self._follow) - 1
        self._places[key][1].add(place)
        return _Part(False, {place}, {place})

    def _connect(self, last: Iterable[int], first: set[int]) -> None:
        for place in last:
            before = len(self._follow[place])
            self._follow[place] |= first
            self._num_edges += len(self._follow[place]) - before
            if self._num_edges > MAX_EDGES:
                raise self._refusal("is too large; use fewer alternatives and repetitions")

    def _sequence(self, items: Any, flags: int) -> _Part:
        whole = _Part()
        for item in items:
            self._append(whole, self._part(item, flags))
        return whole

    def _append(self, whole: _Part, part: _Part) -> None:
        self._connect(whole.last, part.first)
        if whole.nullable:
            whole.first |= part.first
        whole.last = whole.last | part.last if part.nullable else part.last
        whole.nullable = whole.nullable and part.nullable

    def _part(self, item: tuple[Any, Any], flags: int) -> _Part:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise self._refusal("is too large; use fewer alternatives and repetitions")
        kind, value = item
        if kind is op.LITERAL:
            return self._place(item, lambda: chr(value).__eq__, flags)
        if kind is op.NOT_LITERAL:
            return self._place(item, lambda: chr(value).__eq__, flags, negated=True)
        if kind is op.ANY:
            dot_all = bool(flags & re.DOTALL)
            return self._place((kind, dot_all), lambda: (lambda _: True) if dot_all else "\n".__ne__, flags)
        if kind is op.IN:
            negated = value[0][0] is op.NEGATE
            return self._place((kind, id(value)), lambda: _class(value), flags, negated)  # a repeated class is one list
        if kind is op.SUBPATTERN:
            _, added, removed, inner = value
            return self._sequence(inner, (flags | added) & ~removed)
        if kind is op.BRANCH:
            return self._branch(value[1], flags)
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, inner = value
            return self._repeat(least, most, inner, flags)
        raise self._refusal("uses anchors, look-around or back references, which are not supported")

    def _branch(self, branches: Iterable[Any], flags: int) -> _Part:
        whole = _Part(nullable=False)
        for branch in branches:
            part = self._sequence(branch, flags)
            whole.nullable |= part.nullable
            whole.first |= part.first
            whole.last |= part.last
        return whole

    def _repeat(self, least: int, most: Any, inner: Any, flags: int) -> _Part:
        """Build ``least`` copies, then optional ones; without an upper bound the last copy may follow itself."""
        whole, endless = _Part(), most is op.MAXREPEAT
        for number in range(max(least, 1) if endless else int(most)):
            copy = self._sequence(inner, flags)
            self._num_parts += 1
            if self._num_parts > _MAX_PARTS:
                raise self._refusal("is too large; use fewer alternatives and repetitions")
            if endless and number >= least - 1:
                self._connect(copy.last, copy.first)
            copy.nullable |= number >= least
            self._append(whole, copy)
        return whole


def _in_any_case(matches: Matches) -> Matches:
    # A letter such as ß has no upper case of one character.
    return lambda c: any(len(form) == 1 and matches(form) for form in (c, c.lower(), c.upper()))


def _not(matches: Matches) -> Matches:
    return lambda c: not matches(c)


def _class(items: Iterable[tuple[Any, Any]]) -> Matches:
    """Build the test of a bracketed class, without negation: characters and ranges by bisection, then categories."""
    ranges: list[tuple[int, int]] = []
    categories: dict[Any, Matches] = {}
    for kind, value in items:
        if kind is op.LITERAL:
            ranges.append((value, value))
        elif kind is op.RANGE:
            ranges.append(value)
        elif kind is op.CATEGORY:
            positive = _NOT_CATEGORIES.get(value)
            categories[value] = _CATEGORIES[value] if positive is None else _not(_CATEGORIES[positive])
    lows, highs = _disjoint(ranges)
    tests = tuple(categories.values())

    def matches(character: str) -> bool:
        code = ord(character)
        at = bisect_right(lows, code) - 1
        return (at >= 0 and code <= highs[at]) or any(test(character) for test in tests)

    return matches


def _disjoint(ranges: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the first and last codes of ``ranges`` in order, with overlapping ones merged."""
    lows: list[int] = []
    highs: list[int] = []
    for low, high in sorted(ranges):
        if highs and low <= highs[-1]:
            highs[-1] = max(highs[-1], high)
        else:
            lows.append(low)
            highs.append(high)
    return lows, highs


class PatternMatcher:
    """Finds the first match of any of ``patterns`` in the pieces fed, as `StopMatcher` does for strings.

    Text in which a match may have begun is held back. With ``keep`` the match itself is shown.
    """

    def __init__(self, patterns: Iterable[StopPattern], keep: bool = False) -> None:
        self.matched: str | None = None
        self._alive: list[tuple[StopPattern, dict[int, int]]] = [(pattern, {}) for pattern in patterns]
        self._keep = keep
        self._held = ""
        self._at = 0  # of the next character, counted from the beginning of the text

    def feed(self, piece: str) -> str:
        """Return text that is safe to show. After a match (see ``matched``) it is always empty."""
        if self.matched is not None:
            return ""
        begin = self._at - len(self._held)
        text = self._held + piece
        for character in piece:
            self._alive = [(pattern, pattern.step(alive, character, self._at)) for pattern, alive in self._alive]
            self._at += 1
            found = [(start, p.source) for p, alive in self._alive if (start := p.match_start(alive)) is not None]
            if found:
                start, self.matched = min(found)
                self._held = ""
                return text[: (self._at if self._keep else start) - begin]
        safe = min((start for _, alive in self._alive for start in alive.values()), default=self._at) - begin
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """End the text; return the part held back."""
        held, self._held = self._held, ""
        return held
