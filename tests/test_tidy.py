"""The layout of the code keeps to CONTRIBUTING.md: folders, modules, parameters, names.

Each rule lists what it forgives, with a reason; what is forgiven and no longer needs it fails too.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click

from tanghulu.cli.main import load_command, root

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "conductor", "store", "transfer_engine", "workers", "src/tanghulu")
MIN_LINES = 40
MAX_PARAMETERS = 7

#: What a rule forgives: the thing -> why.
FORGIVEN: dict[str, str] = {
    "small: tanghulu.aio": "a name for users",
    "class: Chunk": "what a get returns, and what a node keeps: the same thing on either side of the wire",
    "parameters: tanghulu.workers.compute.attention.triton_decode._decode": "a kernel of Triton takes plain numbers",
    "word: tanghulu.cli.progress: SpinnerColumn": "a class of rich",
}

#: Words that only this code used for things that have a name in the field, as parts of identifiers.
PRIVATE_WORDS = frozenset(
    """
    desk desks proclaim proclaims proclaimed proclaiming proclamation proclamations promise promises promised verdict
    verdicts forsake forsaken bereft wish wishes door doors roster rosters heat reception workshop cargo spinner
    spinning landing landings putting shell shells told untold heard hear unheard owed owes
    unhurried hasten forgo forgone
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Module:
    """One module as it stands on disk."""

    name: str
    path: Path
    tree: ast.Module
    num_lines: int

    @property
    def is_package(self) -> bool:
        """Whether the module is the ``__init__`` of a folder."""
        return self.path.name == "__init__.py"

    @property
    def is_benchmark(self) -> bool:
        """Whether the module measures, and is no part of tanghulu; each is a program with class names of its own."""
        return self.name.startswith("benchmarks")


@cache
def modules() -> tuple[Module, ...]:
    """Every production module but generated ones, and the benchmarks."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            relative = path.relative_to(ROOT / "src" if folder.startswith("src/") else ROOT).with_suffix("")
            parts = [part for part in relative.parts if part != "__init__"]
            name = ".".join(parts if parts[0] in ("benchmarks", "tanghulu") else ["tanghulu", *parts])
            found.append(Module(name, path, ast.parse(text), text.count("\n")))
    return tuple(found)


@cache
def importers() -> dict[str, set[str]]:
    """Which modules import each module, for type checking too; benchmarks count as importers of benchmarks alone."""
    names = {module.name for module in modules()}
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        for node in ast.walk(module.tree):
            for target in _targets(node, names):
                if target != module.name and (target.startswith("benchmarks.") or not module.is_benchmark):
                    found[target].add(module.name)
    return found


def _targets(node: ast.AST, names: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in names)
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        for alias in node.names:
            yield from (name for name in (f"{node.module}.{alias.name}", node.module) if name in names)


def _all_but_forgiven(rule: str, found: set[str]) -> None:
    forgiven = {thing.removeprefix(f"{rule}: ") for thing in FORGIVEN if thing.startswith(f"{rule}: ")}
    assert not found - forgiven, "\n".join(sorted(found - forgiven))
    assert not forgiven - found, f"forgiven for nothing: {sorted(forgiven - found)}"


def test_every_folder_says_what_lives_there() -> None:
    packages = {module.path.parent: module for module in modules() if module.is_package}
    silent = {str(folder) for folder, module in packages.items() if not ast.get_docstring(module.tree)}
    bare = {str(module.path.parent) for module in modules() if module.path.parent not in packages}
    assert not silent | bare


def test_a_small_module_serves_several() -> None:
    crumbs = {
        module.name
        for module in modules()
        if module.num_lines < MIN_LINES and not module.is_package and len(importers()[module.name]) == 1
    }
    _all_but_forgiven("small", crumbs)


def test_a_function_takes_at_most_7_parameters() -> None:
    long = set()
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args) if arg.arg not in ("self", "cls")]
                if len(names) > MAX_PARAMETERS:
                    long.add(f"{module.name}.{node.name}")
    _all_but_forgiven("parameters", long)


def test_a_public_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for module in (each for each in modules() if not each.is_benchmark):
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.name)
    _all_but_forgiven("class", {name for name, where in places.items() if len(where) > 1})


def test_identifiers_are_made_of_the_fields_words() -> None:
    found = set()
    for module in modules():
        for identifier in _identifiers(module):
            if PRIVATE_WORDS.intersection(_parts(identifier)):
                found.add(f"{module.name}: {identifier}")
    _all_but_forgiven("word", found)


#: Phrases that a native engineer would not write in a help text, and what is meant (CONTRIBUTING.md).
STILTED = {
    r"\bso (long|many|much|often)\b": "seconds, or a number",
    r"(^|\W)-?[01](\.0)?: ": "'0 disables it', '0 means ...'",
    r"^(what|who|whose|how)\b|\b(who|whoever)\b": "a noun: clients, callers, the tenant of",
    r"\b(told|tells? of|heard|hears?|said|says|asked for)\b": "report, receive, state, request",
    r"\bof late\b|\bbe it\b|\bahead of need\b": "plain words",
    r"\b(let|lets|taken) in\b|\bunder way\b": "accept, allow; running, in flight",
}


def _help_texts(command: click.Command, words: str) -> Iterator[tuple[str, str]]:
    yield words, command.help or ""
    for param in command.params:
        yield f"{words} {param.opts[0]}", getattr(param, "help", None) or ""
    for name, each in getattr(command, "commands", {}).items():
        yield from _help_texts(each, f"{words} {name}")


def test_help_is_plain_english() -> None:
    commands = {name: load_command(name) for name in root.list_commands(click.Context(root))}
    found = {
        f"{words}: {text!r} ({better})"
        for name, command in commands.items()
        for words, text in _help_texts(command, name)
        for pattern, better in STILTED.items()
        if re.search(pattern, text)
    }
    assert not found, "\n".join(sorted(found))


#: The same of the first sentence of a docstring; what a boolean attribute says may begin with "Whether".
STILTED_SENTENCES = {
    r"^(What|Who|Whoever|Whose|Where|How|When)\b": "a noun phrase or an imperative",
    r"\b(told|heard|untold)\b": "report, receive, state",
    r"\bso (long|many|much|often)\b": "seconds, or a number",
    r": never\b": "'0 disables it'",
}


def test_docstrings_begin_in_plain_english() -> None:
    found = set()
    for module in (each for each in modules() if not each.is_benchmark):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                sentence = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()).partition(". ")[0]
                if any(re.search(pattern, sentence) for pattern in STILTED_SENTENCES):
                    found.add(f"{module.name}.{getattr(node, 'name', '')}: {sentence}")
    _all_but_forgiven("sentence", found)


def _identifiers(module: Module) -> set[str]:
    found = {module.name.rpartition(".")[2]}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return found


def _parts(identifier: str) -> set[str]:
    return {part.lower() for part in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", identifier)}
