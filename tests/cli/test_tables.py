"""Tables: plain text everywhere, rich on a terminal, Markdown for documents."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from mla.cli import main, tables
from mla.cli.tables import Table, markdown, plain, show

TABLE = Table("weather [today]", ("place", "sky"), [("here", "grey | wet"), ("far away", "[red]blue")])


def test_plain_text_is_aligned_and_has_no_trailing_blanks() -> None:
    assert plain(TABLE).splitlines() == [
        "weather [today]",
        "place     sky",
        "-----     ---",
        "here      grey | wet",
        "far away  [red]blue",
    ]


def test_markdown_escapes_bars() -> None:
    assert markdown(TABLE).splitlines()[2] == "| here | grey \\| wet |"


def on_terminal(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)


def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "find_spec", lambda name: None)


@pytest.mark.parametrize(("style", "terminal"), [("auto", True), ("rich", False)])
def test_rich_draws_on_a_terminal_or_when_asked(
    style: str, terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    on_terminal(monkeypatch, terminal)
    show([TABLE], style)
    told = capsys.readouterr().out
    assert "─" in told
    assert "weather [today]" in told
    assert "[red]blue" in told, "a bracket in a message is no markup"


@pytest.mark.parametrize(("style", "terminal"), [("auto", False), ("plain", True), ("plain", False)])
def test_plain_text_elsewhere(
    style: str, terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_terminal(monkeypatch, terminal)
    show([TABLE, TABLE], style)
    assert capsys.readouterr().out == f"{plain(TABLE)}\n\n{plain(TABLE)}\n"


def test_without_rich_a_terminal_gets_plain_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_rich(monkeypatch)
    on_terminal(monkeypatch, True)
    show([TABLE])
    assert capsys.readouterr().out == plain(TABLE) + "\n"


@pytest.mark.parametrize("command", ["env", "backends"])
def test_asking_for_rich_without_rich_is_bad_usage(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_rich(monkeypatch)
    with pytest.raises(SystemExit) as end:
        main([command, "--style", "rich"])
    assert end.value.code == 2
    assert "--style rich needs the package rich, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["env", "backends"])
def test_both_styles_tell_the_same_words(command: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "400")
    rich_words = set(run(command, "--style", "rich").replace("─", " ").split())
    assert set(run(command, "--style", "plain").split()) - rich_words <= {"-" * n for n in range(1, 40)}
