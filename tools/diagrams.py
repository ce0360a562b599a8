"""Draw the diagrams of the docs, as SVG that needs nothing else.

    python tools/diagrams.py            # write docs/pictures/concept-*.svg and architecture.svg
    python tools/diagrams.py --check    # fail if they differ

Those of docs/concepts/ come from the boxes and arrows below: a box has a column and a row; an arrow leads from one to
another, with its label at its middle. The architecture comes from the folders and from the import contracts in
pyproject.toml: a row may import what stands in the rows below it.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
_WIDE, _HIGH = 164, 54  # a box
_COLUMN, _ROW, _EDGE = 240, 104, 16
_LINE = 15  # from one line of text to the next
_INK, _FILL, _MARKED = "#333", "#f4f6fb", "#fde7ea"


@dataclass(frozen=True)
class Box:
    """A box: where it stands, and its lines of text; a marked one has another colour."""

    column: float
    row: float
    text: str
    marked: bool = False


@dataclass(frozen=True)
class Arrow:
    """An arrow between two boxes by their numbers; a dashed one is what happens beside."""

    start: int
    end: int
    label: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Diagram:
    """What it shows, in words for who cannot see it, and of what it consists."""

    title: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


DIAGRAMS = {
    "prefix-hashes": Diagram(
        "Two prompts share the hashes of two blocks and part at the third",
        (
            Box(0, 0.5, "root\nmodel, salt"),
            Box(1, 0.5, "h1\nblock 1", True),
            Box(2, 0.5, "h2\nblocks 1 to 2", True),
            Box(3, 0, "h3\nblocks 1 to 3 of A"),
            Box(3, 1, "h3'\nblocks 1 to 3 of B"),
        ),
        (Arrow(0, 1), Arrow(1, 2), Arrow(2, 3, "prompt A"), Arrow(2, 4, "prompt B")),
    ),
    "store": Diagram(
        "A client puts into a node and commits at the master; another finds the node there and reads from it",
        (
            Box(0, 0, "client\nputs"),
            Box(1, 1, "node\nsegment, chunks", True),
            Box(1, 0, "master\nkey: nodes"),
            Box(2, 0, "client\ngets"),
            Box(0, 1, "SSD tier"),
            Box(2, 1, "another node"),
        ),
        (
            Arrow(0, 1, "reserve, fill"),
            Arrow(0, 2, "commit"),
            Arrow(1, 2, "report"),
            Arrow(3, 2, "where?"),
            Arrow(3, 1, "read under a lease"),
            Arrow(1, 4, "evict"),
            Arrow(1, 5, "copies", dashed=True),
        ),
    ),
    "transfer": Diagram(
        "A batch is cut into slices, each goes along a path into the segment of another process",
        (
            Box(0, 0.5, "batch\nof requests"),
            Box(1, 0.5, "slices"),
            Box(2, 0, "path 1\ndevice, endpoint"),
            Box(2, 1, "path 2\ndevice, endpoint"),
            Box(3, 0.5, "segment\naccess table", True),
        ),
        (
            Arrow(0, 1, "cut"),
            Arrow(1, 2, "post"),
            Arrow(1, 3, "retry"),
            Arrow(2, 4, "lease?"),
            Arrow(3, 4, "lease?"),
        ),
    ),
    "scheduling": Diagram(
        "A policy is shown the request and the workers, and names a pair of workers and what to fetch",
        (
            Box(0, 0, "request\nblock hashes"),
            Box(0, 1, "workers' reports\nqueue, speed, room"),
            Box(1, 0, "prefix index\nwho has which blocks"),
            Box(1, 1, "in flight\nsent, not reported"),
            Box(2, 0.5, "policy", True),
            Box(3, 0, "prefill worker\nand what to fetch"),
            Box(3, 1, "decode worker\na slot reserved"),
        ),
        (Arrow(0, 2), Arrow(1, 3), Arrow(2, 4, "hits"), Arrow(3, 4, "load"), Arrow(4, 5), Arrow(4, 6)),
    ),
    "hand-over": Diagram(
        "The prefill worker computes, the decode worker pulls its blocks, the conductor passes the request on",
        (
            Box(1, 0, "conductor"),
            Box(0, 1, "prefill worker\nprompt, first token"),
            Box(2, 1, "decode worker\nall other tokens", True),
            Box(1, 2, "store"),
        ),
        (
            Arrow(0, 1, "1 request"),
            Arrow(0, 2, "3 request, first token"),
            Arrow(1, 2, "2 KV, block by block"),
            Arrow(1, 3, "new blocks", dashed=True),
            Arrow(3, 2, "what is missing", dashed=True),
        ),
    ),
    "migration": Diagram(
        "A worker dies; the conductor sends prompt and tokens so far to another, which loads what the store has",
        (
            Box(1, 0, "conductor\nprompt, tokens so far", True),
            Box(0, 1, "worker A\ndies"),
            Box(2, 1, "worker B\ngoes on"),
            Box(1, 2, "store\nblocks of A"),
            Box(2, 0, "client\na pause, no error"),
        ),
        (
            Arrow(1, 0, "lost"),
            Arrow(0, 2, "sent again"),
            Arrow(1, 3, "before", dashed=True),
            Arrow(3, 2, "prefix"),
            Arrow(0, 4, "tokens"),
        ),
    ),
}


def _centre(box: Box) -> tuple[float, float]:
    return _EDGE + box.column * _COLUMN + _WIDE / 2, _EDGE + box.row * _ROW + _HIGH / 2


def _at_border(box: Box, towards: tuple[float, float]) -> tuple[float, float]:
    """Where the line from the middle of ``box`` to ``towards`` leaves it."""
    x, y = _centre(box)
    dx, dy = towards[0] - x, towards[1] - y
    share = min(_WIDE / 2 / abs(dx) if dx else 1.0, _HIGH / 2 / abs(dy) if dy else 1.0)
    return x + dx * share, y + dy * share


def _box(box: Box) -> str:
    x, y = _centre(box)
    lines = box.text.split("\n")
    top = y - (len(lines) - 1) * _LINE / 2 + 4
    text = ""
    for number, line in enumerate(lines):
        weight = "" if number else ' font-weight="bold"'
        text += f'<text x="{x:g}" y="{top + number * _LINE:g}"{weight}>{escape(line, quote=False)}</text>'
    fill = _MARKED if box.marked else _FILL
    at = f'x="{x - _WIDE / 2:g}" y="{y - _HIGH / 2:g}" width="{_WIDE}" height="{_HIGH}"'
    return f'<rect {at} rx="8" fill="{fill}" stroke="{_INK}"/>{text}'


def _arrow(arrow: Arrow, boxes: tuple[Box, ...]) -> str:
    start, end = boxes[arrow.start], boxes[arrow.end]
    (x1, y1), (x2, y2) = _at_border(start, _centre(end)), _at_border(end, _centre(start))
    dash = ' stroke-dasharray="5 4"' if arrow.dashed else ""
    line = f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{_INK}"{dash} marker-end="url(#head)"/>'
    if not arrow.label:
        return line
    x, y, wide = (x1 + x2) / 2, (y1 + y2) / 2, len(arrow.label) * 6.4 + 6
    behind = f'<rect x="{x - wide / 2:.1f}" y="{y - 9:.1f}" width="{wide:.1f}" height="16" fill="#fff"/>'
    return f'{line}{behind}<text x="{x:.1f}" y="{y + 3:.1f}">{escape(arrow.label, quote=False)}</text>'


def svg(diagram: Diagram) -> str:
    """The picture; white behind it, so that it can be read in the dark, too."""
    wide = 2 * _EDGE + _WIDE + max(box.column for box in diagram.boxes) * _COLUMN
    high = 2 * _EDGE + _HIGH + max(box.row for box in diagram.boxes) * _ROW
    head = '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}" width="{wide:g}" height="{high:g}" '
        'font-family="sans-serif" font-size="12" text-anchor="middle" role="img">',
        f"<title>{escape(diagram.title, quote=False)}</title>",
        f'<defs>{head}<path d="M0 0L8 4L0 8z" fill="{_INK}"/></marker></defs>',
        '<rect width="100%" height="100%" rx="8" fill="#fff"/>',
        *(_arrow(each, diagram.boxes) for each in diagram.arrows),
        *map(_box, diagram.boxes),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


_WIDTH, _BAND = 960, 20


def architecture() -> str:
    """The components in the order in which they may import each other, each with its folders and its sentence."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["layers"][0] == "tanghulu.cli")
    rows = [[name.strip().removeprefix("tanghulu.") for name in layer.split("|")] for layer in layers]
    rows = [kept for row in rows if (kept := [name for name in row if (ROOT / "src/tanghulu" / name).is_dir()])]
    parts, top = [], _EDGE
    for row in rows:
        boxes = [_component(name, (_WIDTH - _EDGE * (len(row) - 1)) // len(row)) for name in row]
        high = max(len(lines) for lines in boxes) * _LINE + _BAND
        for i, lines in enumerate(boxes):
            wide = (_WIDTH - _EDGE * (len(row) - 1)) / len(row)
            left = _EDGE + i * (wide + _EDGE)
            parts.append(
                f'<rect x="{left:g}" y="{top}" width="{wide:g}" height="{high}" rx="6" fill="{_FILL}" stroke="{_INK}"/>'
            )
            for j, line in enumerate(lines):
                weight = ' font-weight="bold"' if j == 0 else ""
                at = f'x="{left + 10:g}" y="{top + _BAND + j * _LINE}"'
                parts.append(f'<text {at}{weight} fill="{_INK}">{escape(line, quote=False)}</text>')
        top += high + _EDGE // 2
    size = f'viewBox="0 0 {_WIDTH + 2 * _EDGE} {top + _EDGE}" width="{_WIDTH + 2 * _EDGE}" height="{top + _EDGE}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12" role="img">'
    title = "<title>The components of tanghulu: each row may import what stands below it</title>"
    return "\n".join([head, title, '<rect width="100%" height="100%" rx="8" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def _component(name: str, wide: int) -> list[str]:
    """A component's name, the first sentence of its docstring and its folders, in lines of that width."""
    folder = ROOT / "src/tanghulu" / name
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    sentence = " ".join(said.split("\n\n")[0].split()).partition(". ")[0].rstrip(".").replace("`", "") + "."
    below = sorted(each.name for each in folder.iterdir() if (each / "__init__.py").is_file())
    return [name, *_wrapped(sentence, wide), *(_wrapped("/ ".join(below) + "/", wide) if below else ())]


def _wrapped(text: str, wide: int) -> list[str]:
    """``text`` in lines of about ``wide`` pixels."""
    lines, most = [""], wide // 7
    for word in text.split():
        if len(lines[-1]) + len(word) > most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def main() -> int:
    """Write the pictures; with --check only compare."""
    drawn = {FOLDER / f"concept-{name}.svg": svg(diagram) for name, diagram in DIAGRAMS.items()}
    drawn[FOLDER / "architecture.svg"] = architecture()
    if "--check" in sys.argv[1:]:
        stale = [file for file, text in drawn.items() if not file.exists() or file.read_text() != text]
        for file in stale:
            print(f"{file} is not what tools/diagrams.py draws; run it", file=sys.stderr)
        return 1 if stale else 0
    for file, text in drawn.items():
        file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
