"""``tanghulu replay --plot``: what is drawn, and what is refused before a replay begins."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tanghulu.conductor.replay.main import COMMAND
from tanghulu.conductor.replay.plot import check_plot
from tanghulu.errors import ConfigError

EXCERPT = Path(__file__).parent / "data" / "conversation_excerpt.jsonl.gz"
ARGUMENTS = (str(EXCERPT), "--limit", "60", "--warmup", "0", "--policy", "ttft-min,round-robin")


def plotted(path: Path, *arguments: str) -> bytes:
    pytest.importorskip("matplotlib", reason="extra: plot is not installed")
    result = CliRunner().invoke(COMMAND, [*ARGUMENTS, *arguments, "--plot", str(path)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "round-robin" in result.output, "the figures are printed as ever"
    return path.read_bytes()


def test_a_page_holds_every_panel_and_the_figures(tmp_path):
    page = plotted(tmp_path / "plot.html").decode()
    assert page.count('<g id="axes_') == 4
    assert page.count("<tr><td>conversation_excerpt</td>") == 2
    assert "<td>ttft-min</td>" in page
    assert not re.findall(r'(?:src|href)="(?!#)', page), "it needs no network"


def test_the_same_replay_draws_the_same_and_another_one_another(tmp_path):
    first, second = (plotted(tmp_path / f"{name}.html", "--json") for name in "ab")
    assert first == second
    assert first != plotted(tmp_path / "c.html", "--speedup", "3")


def test_a_picture(tmp_path):
    data = plotted(tmp_path / "plot.png")
    assert data.startswith(b"\x89PNG\r\n")
    assert len(data) > 20_000


@pytest.mark.parametrize("name", ["plot.pdf", "plot", "absent/plot.png"])
def test_a_path_that_cannot_be_is_refused_before_the_replay(tmp_path, name):
    with pytest.raises(ConfigError, match="--plot"):
        CliRunner().invoke(COMMAND, [*ARGUMENTS, "--plot", str(tmp_path / name)], catch_exceptions=False)


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[plot\]"):
        check_plot(tmp_path / "plot.png")
