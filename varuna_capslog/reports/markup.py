"""HTML elements of a report, and its style sheet.

Every text that comes from a run is escaped here and nowhere else. No scripts, no fonts, nothing from the network: a
page must read the same from a zipped folder in ten years.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

from varuna_capslog.base.tables import printable

__all__ = [
    "UNKNOWN",
    "Markup",
    "cell_bar",
    "code",
    "duration",
    "facts",
    "figure",
    "gallery",
    "join",
    "moment",
    "note",
    "page",
    "paragraph",
    "percent",
    "plain",
    "plural",
    "preformatted",
    "section",
    "significant",
    "table",
]


class Markup(str):
    """Text that is HTML already; any other text is escaped where it enters the page."""


def escape(text: str) -> str:
    """Return the text as HTML, with escapes for characters that control a terminal or are invisible."""
    return html.escape("\n".join(map(printable, text.split("\n"))))


def page(title: str, subtitle: str, sections: Sequence[Markup]) -> Markup:
    """Return the whole document."""
    return Markup(
        "<!DOCTYPE html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<header>\n<h1>{escape(title)}</h1>\n<p>{escape(subtitle)}</p>\n</header>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def section(name: str, heading: str, parts: Sequence[Markup]) -> Markup:
    """Return a part of the page; `name` is its anchor."""
    return Markup(f'<section id="{escape(name)}">\n<h2>{escape(heading)}</h2>\n' + "\n".join(parts) + "\n</section>\n")


def paragraph(text: str) -> Markup:
    """Return running text."""
    return Markup(f"<p>{_inner(text)}</p>")


def note(text: str) -> Markup:
    """Return a sentence about missing or doubtful content."""
    return Markup(f'<p class="note">{_inner(text)}</p>')


def preformatted(text: str) -> Markup:
    """Return a text with its own line breaks."""
    return Markup(f"<pre>{escape(text)}</pre>")


def code(text: str) -> Markup:
    """Return a name as in a file."""
    return Markup(f"<code>{escape(text)}</code>")


def figure(source: str, description: str, caption: str) -> Markup:
    """Return a picture from a file beside the page; `description` is its alternative text."""
    return Markup(
        f'<figure>\n<img src="{escape(source)}" alt="{escape(description)}">\n'
        f"<figcaption>{_inner(caption)}</figcaption>\n</figure>"
    )


def gallery(sources: Mapping[str, str]) -> Markup:
    """Return pictures side by side, each a link to itself in full size; source -> caption."""
    items = (
        f'<figure><a href="{escape(source)}"><img src="{escape(source)}" alt="{escape(caption)}"></a>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        for source, caption in sources.items()
    )
    return Markup('<div class="gallery">\n' + "\n".join(items) + "\n</div>")


def facts(name: str, rows: Mapping[str, str]) -> Markup:
    """Return a table of two columns, names and values."""
    body = "".join(
        f'<tr><th scope="row">{escape(key)}</th><td>{_inner(value)}</td></tr>\n' for key, value in rows.items()
    )
    return Markup(f'<table class="facts" id="{escape(name)}">\n<tbody>\n{body}</tbody>\n</table>')


def table(name: str, headings: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> Markup:
    """Return a table of numbers, set to the right; the columns in `left` hold text."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kind = ("", ' class="left"')
        return "".join(f"<{tag}{kind[column in left]}>{_inner(value)}</{tag}>" for column, value in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    return Markup(
        f'<div class="wide"><table id="{escape(name)}">\n<thead><tr>{cells("th", headings)}</tr></thead>\n'
        f"<tbody>\n{body}</tbody>\n</table></div>"
    )


def join(*parts: str) -> Markup:
    """Return the parts one after the other; parts that are not HTML yet are escaped."""
    return Markup("".join(_inner(part) for part in parts))


def cell_bar(share: float) -> Markup:
    """Return a bar inside a table's cell, `share` (0 .. 1) of the cell long."""
    return Markup(f'<span class="bar"><span style="width:{100 * min(1.0, max(0.0, share)):.1f}%"></span></span>')


def _inner(text: str) -> str:
    return text if isinstance(text, Markup) else escape(text)


_STYLE = """\
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f8; color: #22303c;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", Arial, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 3rem 3.2rem 4rem; background: #fff; min-height: 100vh; }
header { border-bottom: 3px solid #2a5f8f; padding-bottom: .9rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
header p { margin: .4rem 0 0; color: #5c6873; }
h2 { font-size: 1.25rem; margin: 2.8rem 0 .8rem; }
p { max-width: 46rem; margin: .7rem 0; }
.note { color: #5c6873; border-left: 3px solid #e8b44f; padding: .1rem 0 .1rem .8rem; overflow-wrap: anywhere; }
figure { margin: 1.2rem 0 1.6rem; }
figure img { display: block; width: 100%; height: auto; }
figcaption { margin-top: .5rem; max-width: 46rem; font-size: .88rem; line-height: 1.45; color: #5c6873; }
pre { max-width: 46rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; line-height: 1.4; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .8rem; border-bottom: 1px solid #e3e7ea; text-align: right; vertical-align: top; }
td { white-space: nowrap; }
th { font-weight: 600; }
thead th { border-bottom: 1.5px solid #8a949e; }
.left, .facts th, .facts td { text-align: left; }
td.left, .facts td { white-space: normal; overflow-wrap: anywhere; }
.facts { width: 100%; }
.facts th { width: 15rem; padding-left: 0; font-weight: 400; color: #5c6873; }
code { font: .92em/1.4 ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace; }
.bar { display: inline-block; width: 9rem; height: .7em; background: #eceff2; }
.bar span { display: block; height: 100%; background: #2a5f8f; }
.gallery { display: flex; flex-wrap: wrap; gap: 1.4rem 1.2rem; }
.gallery figure { margin: 0; flex: 1 1 17rem; max-width: 28rem; }
.gallery figcaption { overflow-wrap: anywhere; }
@media (max-width: 50rem) { main { padding: 1.5rem 1rem; } .facts th { width: 8rem; } }
@media print {
  body { background: #fff; font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  .bar span, .bar { print-color-adjust: exact; }
}
"""


# -- Numbers as a report writes them: bytes, seconds, scores, times, and unknown values.
#
# One kind of number looks alike everywhere. Pictures have axes instead.


UNKNOWN = "\N{EN DASH}"
"""Text of a table for a number that is in no file."""


def duration(seconds: float | None, digits: int = 3) -> str:
    """Return seconds in the unit that people use: 12.3 ms, 4.56 s, 3 min 20 s, 2 h 05 min."""
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
        return f"{significant(seconds * factor, digits)} {unit}"
    minutes, remaining_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remaining_seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def percent(share: float) -> str:
    """Return a signed share of 1 as percent: +1.3 %."""
    return f"{100 * share:+.1f} %"


def significant(value: float | None, digits: int = 3) -> str:
    """Return a number with this many significant digits, without an exponent where people do not use one."""
    if value is None:
        return UNKNOWN
    if value and not 1e-3 <= abs(value) < 10**6:
        return f"{value:.{digits - 1}e}"
    whole_digits = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(0, digits - whole_digits)}f}" if whole_digits else f"{value:.{digits}g}"


def plain(value: object) -> str:
    """Return a value from a JSON file for people: text as it is, numbers shortened, lists and objects in one line."""
    if isinstance(value, float):
        return significant(value, 4)
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(plain(entry) for entry in value)}]"
    return UNKNOWN if value is None else str(value)


def plural(number: int, noun: str, ending: str = "s") -> str:
    """Return a count with its noun: 1 step, 2 steps; 2 microbatches with the ending "es"."""
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def moment(seconds: float | None) -> str:
    """Return a time since 1970 as date and time of day in UTC."""
    try:
        return UNKNOWN if seconds is None else f"{datetime.fromtimestamp(seconds, tz=timezone.utc):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, OSError, ValueError):  # no calendar has it
        return UNKNOWN
