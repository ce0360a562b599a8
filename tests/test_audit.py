"""What is pinned is checked without a network; what pip-audit tells is read as it is."""

from __future__ import annotations

import json

from tools.audit import PINS, ROOT, requirements_of, told, wrong_pins


def test_the_pins_of_this_tree() -> None:
    assert wrong_pins(PINS.read_text(), requirements_of((ROOT / "pyproject.toml").read_text())) == []


def test_wrong_pins_are_named() -> None:
    assert wrong_pins("Jinja2==3.1.6  # a comment\n# more\n", ["jinja2>=3.1.5"]) == []
    assert wrong_pins("jinja2>=3", ["click"]) == ["jinja2>=3: no exact version", "click: it is not pinned"]
    assert wrong_pins("a_b==1\nA-b==2", []) == ["A-b==2: a-b is pinned twice"]
    assert wrong_pins("click==8.0", ["click>=8.1"]) == ["click>=8.1: 8.0 is pinned"]


def test_an_index_that_tells_nothing_is_no_success() -> None:
    skipped = {"name": "a", "skip_reason": "not found on PyPI"}
    weak = {"name": "b", "version": "1", "vulns": [{"id": "PYSEC-1"}]}
    assert told(json.dumps({"dependencies": [skipped]})) == ([], 0)
    assert told(json.dumps({"dependencies": [skipped, weak]})) == (["b 1: PYSEC-1"], 1)
