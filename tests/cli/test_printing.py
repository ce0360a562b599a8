"""What the store's commands print, without a store."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tanghulu.cli.printing import counted, print_table
from tanghulu.cli.store import COMMAND
from tanghulu.store.admin.rows import plain
from tanghulu.store.client.model import TenantView
from tanghulu.store.protocol.checksums import Checksums


def test_programs_get_names_for_everything() -> None:
    assert plain((Checksums(4, (1, 2)), "x")) == [{"part_bytes": 4, "parts": [1, 2]}, "x"]
    assert plain(TenantView("acme", share=0.5))["share"] == 0.5


def test_people_get_words_that_agree() -> None:
    assert [counted(number, "node") for number in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["top", "--interval-s", "0"],
        ["top", "--count", "0"],
        ["watch", "--count", "0"],
        ["ls", "--limit", "-1"],
        ["put", "k", "-", "--replicas", "0"],
        ["drain", "n", "--timeout-s", "-1"],
        ["replicate", "k", "--holders", "0"],
        ["evict"],
        ["evict", "k", "--bytes", "1MiB"],
        ["evict", "--bytes", "much"],
        ["rm"],
        ["rm", "k", "--matching", "k"],
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused_before_anybody_is_asked(arguments: list[str]) -> None:
    outcome = CliRunner().invoke(COMMAND, [*arguments, "--master", "127.0.0.1:1"])
    assert outcome.exit_code == 2, outcome.output


def test_control_characters_in_a_table_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("key",), [("a\nstored node-1 forged",), ("b\x1b[2J\x1b]0;t\x07",), ("\u202eabc",), ("\u00fc",)])
    shown = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in shown[1:]] == [
        r"a\nstored node-1 forged",
        r"b\x1b[2J\x1b]0;t\x07",
        r"\u202eabc",
        "\u00fc",
    ]
