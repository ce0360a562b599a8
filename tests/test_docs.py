"""Commands in the documentation: each block of them says where it is run, or why it is not; and all of them exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import pytest

from tanghulu.cli.main import load_command

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "deploy" / "README.md"])
#: Written by a program, or no page for people who type.
LEFT_OUT = ("CHANGELOG.md", "docs/reference/")
#: What a line of a shell begins with, in these pages.
WORDS = (
    "curl",
    "docker",
    "echo",
    "eval",
    "git",
    "head",
    "kubectl",
    "lmcache",
    "make",
    "pip",
    "python",
    "tanghulu",
    "vllm",
)
#: Packages that other people's environments have.
ENGINES = ("lmcache", "sglang", "vllm")
MARK = re.compile(r"<!-- (run|not run): (.+) -->")


@dataclass(frozen=True)
class Block:
    """Lines that somebody would paste into a shell, and the mark above them."""

    page: str
    number: int
    lines: tuple[str, ...]
    mark: str

    def __str__(self) -> str:
        return f"{self.page}:{self.number}: {self.lines[0]}"


def _is_command(line: str) -> bool:
    words = [word for word in line.split() if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    return bool(words) and words[0].rpartition("/")[2] in WORDS


def _blocks(page: Path) -> Iterator[Block]:
    """Fenced blocks of a shell, and indented ones whose first line is a command."""
    lines = page.read_text().splitlines()
    at, last_text = 0, ""
    while at < len(lines):
        fence = re.match(r"\s*```(\w*)", lines[at])
        begin = at
        if fence:
            at += 1
            while not lines[at].strip().startswith("```"):
                at += 1
            inside = lines[begin + 1 : at]
        else:
            while at < len(lines) and lines[at].startswith("    "):
                at += 1
            inside = lines[begin:at]
        at += bool(fence) or at == begin
        told = [line.strip() for line in inside]
        if told and (not fence or fence[1] in ("sh", "console", "bash")) and (fence or _is_command(told[0])):
            yield Block(page.relative_to(ROOT).as_posix(), begin + 1, tuple(told), last_text)
        last_text = next((line.strip() for line in reversed(lines[begin:at]) if line.strip()), last_text)


@cache
def blocks() -> tuple[Block, ...]:
    kept = (page for page in PAGES if not page.relative_to(ROOT).as_posix().startswith(LEFT_OUT))
    return tuple(block for page in kept for block in _blocks(page))


def _words(line: str) -> Iterator[list[str]]:
    """The words of each command of a line of shell."""
    for part in re.split(r"\|\|?|&&|;", re.sub(r"(^|\s)#.*", "", line)):
        try:
            yield shlex.split(part)
        except ValueError:  # a quoted text that goes on in the next line
            yield part.split()


def test_every_block_of_commands_is_run_or_says_why_not() -> None:
    assert len(blocks()) > 30
    unmarked = [str(block) for block in blocks() if not MARK.fullmatch(block.mark)]
    assert not unmarked, "put <!-- run: tests/... --> or <!-- not run: why --> above:\n" + "\n".join(unmarked)
    for block in blocks():
        kind, said = MARK.fullmatch(block.mark).groups()  # type: ignore[union-attr]
        if kind == "run":
            assert (ROOT / said).is_file(), f"{block}: {said} is not there"
            assert Path(block.page).name in (ROOT / said).read_text(), f"{block}: {said} does not read the page"


@pytest.mark.parametrize("block", blocks(), ids=str)
def test_every_command_exists_with_its_options(block: Block) -> None:
    for line in block.lines:
        for words in _words(line):
            if words[:1] == ["tanghulu"] or words[:1] == [".venv/bin/tanghulu"]:
                _is_known(words[1:], line)
            elif words[:2] == ["python", "-m"]:
                assert words[2].partition(".")[0] in ENGINES or importlib.util.find_spec(words[2]), line
            elif words[:1] == ["make"]:
                assert re.search(rf"^{re.escape(words[1])}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line


def _is_known(words: list[str], line: str) -> None:
    """Assert that there is such a command, down to its options; [--optional] ones, too."""
    words = [word.strip("[]") for word in words]
    if words[:1] == ["--config"]:
        words = words[2:]
    command = load_command(words[0])
    assert command is not None, line
    at = 1
    while isinstance(command, click.Group):
        assert words[at] in command.commands, line
        command, at = command.commands[words[at]], at + 1
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    used = {word.partition("=")[0] for word in words[at:] if word.startswith("--")}
    assert used <= known | {"--help"}, f"{line}: {used - known}"
