"""HTML elements of a report, and its style sheet.

Every text that comes from a run is escaped here, as HTML or as JSON, and nowhere else. A page is one file: pictures,
plotly.js and data are inside, and its policy refuses every request to the network.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from varuna_capslog.base.errors import needed
from varuna_capslog.base.tables import printable
from varuna_capslog.base.units import format_bytes
from varuna_capslog.reports.plots import Plot

__all__ = [
    "UNKNOWN",
    "Box",
    "Markup",
    "cell_bar",
    "code",
    "described",
    "duration",
    "facts",
    "figure",
    "folded",
    "gallery",
    "in_words",
    "join",
    "moment",
    "note",
    "page",
    "paragraph",
    "percent",
    "picture",
    "plain",
    "plural",
    "preformatted",
    "script_json",
    "section",
    "significant",
    "table",
]


class Markup(str):
    """Text that is HTML already; any other text is escaped where it enters the page."""


def escape(text: str) -> str:
    """Return the text as HTML, with escapes for characters that control a terminal or are invisible."""
    return html.escape("\n".join(map(printable, text.split("\n"))))


_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy: the page, plotly.js and text mistaken for markup can neither load nor send anything."""
_DRAW = """\
const draw = (place) => {
  const figure = JSON.parse(place.nextElementSibling.textContent);
  figure.layout.showlegend = figure.data.length > 1 && (innerWidth > 600 || figure.data.length < 8);
  figure.layout.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
  const buttons = [["zoom2d", "pan2d", "resetScale2d", "toImage"]];
  Plotly.newPlot(place, figure.data, figure.layout,
    {responsive: true, displaylogo: false, modeBarButtons: buttons});
};
const shown = new IntersectionObserver((entries) => entries.forEach((entry) => {
  if (entry.isIntersecting) { shown.unobserve(entry.target); draw(entry.target); }
}), {rootMargin: "100000px 0px"});
document.querySelectorAll(".plot").forEach((place) => shown.observe(place));
"""
"""Passes every figure to plotly.js once it has a width; in a folded part, when the part is opened."""


def page(title: str, subtitle: str, sections: Sequence[Markup]) -> Markup:
    """Return the whole document. Raises CapslogError where plotly is not installed."""
    with needed("a report"):
        from plotly.offline import get_plotlyjs

    return Markup(
        "<!DOCTYPE html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<header>\n<h1>{escape(title)}</h1>\n<p>{escape(subtitle)}</p>\n</header>\n"
        + "\n".join(sections)
        + f"\n</main>\n<script>{get_plotlyjs()}</script>\n<script>\n{_DRAW}</script>\n</body>\n</html>\n"
    )


def section(name: str, heading: str, parts: Sequence[Markup], folded: bool = False) -> Markup:
    """Return a part of the page; `name` is its anchor. folded: closed until the reader opens it."""
    head, content = f"<h2>{escape(heading)}</h2>\n", "\n".join(parts)
    if folded:
        return Markup(f'<section id="{escape(name)}">\n{_folded(head, content)}\n</section>\n')
    return Markup(f'<section id="{escape(name)}">\n{head}{content}\n</section>\n')


def folded(heading: str, parts: Sequence[Markup]) -> Markup:
    """Return parts of a section that stay closed until the reader opens them."""
    return _folded(escape(heading), "\n".join(parts))


def _folded(head: str, content: str) -> Markup:
    return Markup(f"<details>\n<summary>{head}</summary>\n{content}\n</details>")


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


def figure(drawn: Plot, description: str, caption: str) -> Markup:
    """Return a picture that plotly.js draws; `description` is its alternative text."""
    height = drawn["layout"]["height"]
    return Markup(
        f'<figure>\n<div class="plot" role="img" aria-label="{escape(description)}" '
        f'style="height:{height:d}px"></div>\n'
        f'<script type="application/json">{script_json(drawn)}</script>\n'
        + (f"<figcaption>{_inner(caption)}</figcaption>\n</figure>" if caption else "</figure>")
    )


def script_json(value: object) -> str:
    """Return JSON for a script element, in ASCII and without characters by which a text could end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def picture(jpeg: str, width: int, height: int, caption: str, boxes: Sequence[Box] = ()) -> Markup:
    """Return a picture with boxes, each shown while its score reaches the page's threshold.

    jpeg: in base64. width, height: of the picture, in whose pixels the boxes are.
    """
    size = max(width / 24, height / 20)
    return Markup(
        f'<figure><svg viewBox="0 0 {width:d} {height:d}" role="img" aria-label="{escape(caption)}">'
        f'<image href="data:image/jpeg;base64,{escape(jpeg)}" width="{width:d}" height="{height:d}"/>'
        + "".join(_box(box, size) for box in boxes)
        + f"</svg><figcaption>{escape(caption)}</figcaption></figure>"
    )


class Box(NamedTuple):
    """Box of corners x0 y0 x1 y1 in a picture, with its name and score."""

    corners: Sequence[float]
    name: str
    score: float
    colour: str


def _box(box: Box, size: float) -> str:
    x0, y0, x1, y1 = box.corners
    place = f'x="{x0:.1f}" y="{y0:.1f}" width="{max(0, x1 - x0):.1f}" height="{max(0, y1 - y0):.1f}"'
    baseline = y0 - 0.3 * size if y0 > 1.3 * size else y0 + 1.1 * size
    return (
        f'<g class="box" style="--score:{box.score:.3f};color:{box.colour}"><rect {place}/>'
        f'<text x="{x0 + 0.2 * size:.1f}" y="{baseline:.1f}" font-size="{size:.1f}">'
        f"{escape(box.name)} {box.score:.2f}</text></g>"
    )


def gallery(pictures: Sequence[Markup], threshold: float | None = None) -> Markup:
    """Return pictures side by side; threshold: the first position of a slider that hides boxes of lower scores."""
    slider = ""
    if threshold is not None:
        move = "this.closest('.samples').style.setProperty('--threshold',this.value);"
        move += "this.nextElementSibling.value=this.value"
        slider = (
            '<p><label>boxes with a score of at least <input type="range" min="0.05" max="0.95" step="0.05" '
            f'value="{threshold}" oninput="{move}"> <output>{threshold}</output></label></p>\n'
        )
    style = "" if threshold is None else f' style="--threshold:{threshold}"'
    return Markup(
        f'<div class="samples"{style}>\n{slider}<div class="gallery">\n' + "\n".join(pictures) + "\n</div></div>"
    )


def facts(name: str, rows: Mapping[str, str]) -> Markup:
    """Return a table of two columns, names and values."""
    body = "".join(
        f'<tr><th scope="row">{escape(key)}</th><td>{_inner(value)}</td></tr>\n' for key, value in rows.items()
    )
    return Markup(
        f'<div class="wide"><table class="facts" id="{escape(name)}">\n<tbody>\n{body}</tbody>\n</table></div>'
    )


def table(
    name: str, headings: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,), most_beside: int = 4
) -> Markup:
    """Return a table of numbers, aligned to the right; the columns in `left` hold text. On a narrow screen, a row of
    more than `most_beside` cells becomes a block with one line, heading and value, for each cell.
    """

    def cells(tag: str, row: Sequence[str]) -> str:
        kind = ("", ' class="left"')
        names = [f' data-name="{escape(heading)}"' if tag == "td" else "" for heading in headings]
        return "".join(
            f"<{tag}{kind[column in left]}{names[column]}>{_inner(value)}</{tag}>" for column, value in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    stacked = ' class="stacked"' if len(headings) > most_beside else ""
    return Markup(
        f'<div class="wide"><table{stacked} id="{escape(name)}">\n<thead><tr>{cells("th", headings)}</tr></thead>\n'
        f"<tbody>\n{body}</tbody>\n</table></div>"
    )


def join(*parts: str) -> Markup:
    """Return the parts one after the other; parts that are not HTML yet are escaped."""
    return Markup("".join(_inner(part) for part in parts))


def described(name: str, meaning: str) -> Markup:
    """Return a name with its meaning in small type below it, for a table's cell."""
    return Markup(f"{escape(name)}<small>{escape(meaning)}</small>")


def cell_bar(share: float) -> Markup:
    """Return a bar inside a table's cell, `share` (0 .. 1) of the cell long."""
    return Markup(f'<span class="bar"><span style="width:{100 * min(1.0, max(0.0, share)):.1f}%"></span></span>')


def _inner(text: str) -> str:
    return text if isinstance(text, Markup) else escape(text)


_STYLE = """\
:root { color-scheme: light dark; --ink: #22303c; --soft: #5c6873; --line: #dfe4e8; --pale: #eceff2; --page: #f6f7f8;
  --card: #fff; --blue: #2a6bab; --amber: #d9962b; }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe5ea; --soft: #a3afba; --line: #36414b; --pale: #2a333c;
  --page: #10151a; --card: #181f26; --blue: #62a5e0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", Arial, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 3rem 3.2rem 4rem; background: var(--card); min-height: 100vh; }
header { border-bottom: 3px solid var(--blue); padding-bottom: .9rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; overflow-wrap: break-word; }
header p { margin: .4rem 0 0; color: var(--soft); }
h2 { font-size: 1.25rem; margin: 2.8rem 0 .8rem; }
p { max-width: 46rem; margin: .7rem 0; overflow-wrap: break-word; }
.note { color: var(--soft); border-left: 3px solid var(--amber); padding: .1rem 0 .1rem .8rem; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--blue); }
summary h2 { display: inline-block; margin: .5rem 0; color: var(--ink); }
figure { margin: 1.2rem 0 1.6rem; }
figcaption { margin-top: .5rem; max-width: 46rem; font-size: .88rem; line-height: 1.45; color: var(--soft);
  overflow-wrap: break-word; }
pre { max-width: 46rem; white-space: pre-wrap; overflow-wrap: break-word; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; line-height: 1.4; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .8rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
td { white-space: nowrap; }
th { font-weight: 600; }
thead th { border-bottom: 1.5px solid var(--soft); }
.left, .facts th, .facts td { text-align: left; }
td.left, .facts td { white-space: normal; }
td.left { min-width: 5rem; }
td small { display: block; max-width: 30rem; color: var(--soft); }
.facts { width: 100%; }
.facts th { width: 15rem; padding-left: 0; font-weight: 400; color: var(--soft); }
code { font: .92em/1.4 ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace; }
.bar { display: inline-block; width: 9rem; height: .7em; background: var(--pale); }
.bar span { display: block; height: 100%; background: var(--blue); }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: 1.2rem; }
.gallery figure { margin: 0; }
.gallery svg { display: block; width: 100%; aspect-ratio: 4 / 3; background: var(--pale); }
.box { opacity: calc(1000 * (var(--score) - var(--threshold) + .0005)); }
.box rect { fill: none; stroke: currentColor; stroke-width: 2px; vector-effect: non-scaling-stroke; }
.box text { fill: #fff; stroke: currentColor; stroke-width: .22em; paint-order: stroke; font-weight: 600; }
input[type=range] { vertical-align: middle; width: 12rem; max-width: 100%; accent-color: var(--blue); }
.plot .main-svg text:not(.bartext-inside) { fill: var(--ink) !important; }
.plot .heatmap-label { font-weight: 600; }
.plot .gridlayer path { stroke: var(--line) !important; }
.plot .hoverlayer .legend .bg, .plot .hoverlayer .hovertext path { fill: var(--card) !important;
  stroke: var(--soft) !important; }
.plot .modebar-group { background: none !important; }
.plot .modebar-btn path { fill: var(--soft) !important; }
@media (max-width: 50rem) {
  main { padding: 1.5rem 1rem; }
  th, td { padding: .32rem .5rem; }
  .facts, .facts tbody, .facts tr, .facts th, .facts td { display: block; width: auto; }
  .facts th { border: 0; padding: .5rem 0 0; }
  .facts td { padding: 0 0 .4rem; overflow-wrap: break-word; }
  .stacked, .stacked tbody, .stacked tr, .stacked td { display: block; }
  .stacked thead { display: none; }
  .stacked tr { border-bottom: 1px solid var(--line); padding: .4rem 0; }
  .stacked td, .stacked td.left { border: 0; padding: .05rem 0; text-align: left; white-space: normal;
    overflow-wrap: break-word; }
  .stacked td::before { content: attr(data-name) ": "; color: var(--soft); }
  .stacked td[data-name=""] { font-weight: 600; }
  .stacked td[data-name=""]::before { content: none; }
  td:has(.bar), :is(th, td):empty, .modebar { display: none; }
}
@media print {
  body, main { background: #fff; }
  body { font-size: 10.5pt; }
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
    """Return seconds in the usual unit for their size: 12.3 ms, 4.56 s, 3 min 20 s, 2 h 05 min."""
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        factor, unit = second_unit(seconds)
        return f"{significant(seconds * factor, digits)} {unit}"
    minutes, remaining_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remaining_seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def second_unit(seconds: float) -> tuple[float, str]:
    """Return (units per second, name) of the largest unit, s, ms or µs, in which the seconds are at least 1."""
    return (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def percent(share: float) -> str:
    """Return a signed share of 1 as percent: +1.3 %."""
    return f"{100 * share:+.1f} %"


def significant(value: float | None, digits: int = 3) -> str:
    """Return a number with this many significant digits; with an exponent below 0.001 and from a million on."""
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


def in_words(details: Mapping[str, Any], longest: int = 200) -> list[str]:
    """Return a text such as "step time 12.3 ms" for each entry of a JSON object, with the unit that its key names. A
    list longer than `longest` characters becomes its length, a longer text is cut. Zeros and empty entries are omitted.
    """
    words = []
    for key, entry in details.items():
        name, number = key.replace("_", " "), isinstance(entry, (int, float)) and not isinstance(entry, bool)
        if not entry:
            continue
        if number and (key.endswith("seconds") or key == "deadline"):
            words.append(f"{name.removesuffix('seconds').strip() or 'took'} {duration(entry)}")
        elif number and key.endswith("bytes"):
            words.append(f"{name.removesuffix('bytes').strip()} {format_bytes(int(entry))}")
        elif isinstance(entry, dict):
            words += [f"{name} ({', '.join(inner)})"] if (inner := in_words(entry, longest)) else []
        elif entry is True:
            words.append(name)
        elif len(text := plain(entry)) > longest:
            words.append(
                f"{name} of {len(entry):,}" if isinstance(entry, (list, tuple)) else f"{name} {text[:longest]}…"
            )
        else:
            words.append(f"{name} {text}")
    return words


def plural(number: int, noun: str, ending: str = "s") -> str:
    """Return a count with its noun: 1 step, 2 steps; 2 microbatches with the ending "es"."""
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def moment(seconds: float | None) -> str:
    """Return a time since 1970 as date and time of day in UTC."""
    try:
        return UNKNOWN if seconds is None else f"{datetime.fromtimestamp(seconds, tz=timezone.utc):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, OSError, ValueError):  # outside the calendar
        return UNKNOWN
