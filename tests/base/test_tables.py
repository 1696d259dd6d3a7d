"""Names from files cannot control the terminal."""

from __future__ import annotations

import io
import logging

import pytest

from varuna_capslog.base.tables import Table, log_to, printable
from varuna_capslog.commands import shared

EVIL = "\x1b]0;PWN\x07\x1b[31mevil\x1b[2J"
SHOWN = r"\x1b]0;PWN\x07\x1b[31mevil\x1b[2J"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (EVIL, SHOWN),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("jpg.\u202egpj\u2066", r"jpg.\u202egpj\u2066"),
        ("a\u2028b\ufeff", r"a\u2028b\ufeff"),
        ("\udcff\ud800", r"\udcff\ud800"),
        ("läuf 名 \U0001f600 [/x] :car:", "läuf 名 \U0001f600 [/x] :car:"),
    ],
)
def test_what_drives_a_terminal_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_table_shows_names_as_they_are_and_no_escape_sequence() -> None:
    """A layer's name in a stranger's profile set the title and the colour of the planning user's terminal; a name with
    [/x] in it ended the command.
    """
    text = Table(f"t{EVIL}", ["layer"], [[EVIL], ["[/x] [bold]b[/bold] :car:"]], [0], [f"n{EVIL}"]).text()
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.count(SHOWN) == 3
    assert "[/x] [bold]b[/bold] :car:" in text


def test_lines_and_log_records_are_said_without_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.tell(f"layer {EVIL}")
    shared.say(f"layer {EVIL}")
    shared.say("x" * 100_000)
    out, err = capsys.readouterr()
    assert err == f"capslog: layer {SHOWN}\n"
    first, long = out.splitlines()
    assert (first, len(long)) == (f"layer {SHOWN}", 4005)
    root, stream = logging.RootLogger(logging.WARNING), io.StringIO()
    monkeypatch.setattr(logging, "root", root)
    log_to(stream)
    root.warning("%s: torn\nline 2", EVIL)
    assert stream.getvalue() == f"{SHOWN}: torn\nline 2\n"


def test_a_table_without_headings_has_no_row_for_them_and_keeps_to_a_page() -> None:
    table = Table("run", ("", ""), [["steps", "193"], ["productive", "70 % of the time " * 8]], (0, 1))
    lines = table.text().splitlines()
    assert "steps" in lines[2]
    assert max(map(len, lines)) == 80
    assert "thead" not in table.html()
