"""Elements of HTML and SVG, tables, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import ceil, floor, log10

NONE = "–"


def element(name: str, content: str = "", **attributes: object) -> str:
    """`<name ...>content</name>`; `class_` stands for class, `stroke_width` for stroke-width. Content is markup."""
    pairs = (f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items())
    return f"<{name}{''.join(pairs)}>{content}</{name}>"


def text(content: object) -> str:
    """Any text as markup."""
    return escape(str(content))


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], class_: str = "", spans: Sequence[tuple[str, int]] = ()
) -> str:
    """A table of markup; the first column names its row. `spans` are names above so many columns each."""
    above = "".join(element("th", text(name), colspan=width, scope="colgroup") for name, width in spans)
    top = (element("tr", above) if spans else "") + element(
        "tr", "".join(element("th", text(name), scope="col") for name in head)
    )
    body = (
        element("tr", element("th", row[0], scope="row") + "".join(element("td", cell) for cell in row[1:]))
        for row in rows
    )
    whole = element("table", element("thead", top) + element("tbody", "".join(body)), class_=class_)
    return element("div", whole, class_="wide")


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """What colours mean: (CSS class with a background, name)."""
    items = (element("li", element("i", class_=class_) + text(name)) for class_, name in entries)
    return element("ul", "".join(items), class_="legend")


def seconds_text(seconds: float) -> str:
    """`1.23 s`, `45.6 ms` or `789 us`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{seconds * 1e6:.0f} us" if seconds else "0"


def bytes_text(nbytes: float) -> str:
    """`1.23 GB`, decimal units."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * size:
            return f"{three_digits(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def three_digits(value: float) -> str:
    """At least three digits, no exponent: `1.23`, `12.3`, `123`, `12,345`."""
    rounded = float(f"{value:.3g}")
    size = floor(log10(abs(rounded))) if rounded else 0
    return f"{value:,.{max(0, min(6, 2 - size))}f}"


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About so many round numbers between two different ones."""
    raw = (high - low) / count
    size = 10.0 ** floor(log10(raw))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= raw * 0.999)
    return [index * step for index in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def tick_text(value: float) -> str:
    """The shortest text of a round number."""
    return f"{value:.6g}"


def count_text(number: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {what}" + ("" if number == 1 else "es" if what.endswith("ch") else "s")
