"""Numbers as people read them, and the axes of charts."""

from __future__ import annotations

import re

import pytest

from lightning_afd.report.charts import MOST_POINTS, Curve, line_chart
from lightning_afd.report.markup import bytes_text, count_text, element, seconds_text, table, three_digits, ticks


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0"), (2.5e-5, "25 us"), (9.9999e-4, "1.00 ms"), (0.0456, "45.6 ms"), (1.5, "1.50 s"), (12345, "12,345 s")],
)
def test_seconds(seconds: float, shown: str) -> None:
    assert seconds_text(seconds) == shown


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_999_999, "1.00 GB"), (2.5e11, "250 GB"), (3e15, "3,000 TB")],
)
def test_bytes(nbytes: float, shown: str) -> None:
    assert bytes_text(nbytes) == shown


def test_three_digits_and_counts() -> None:
    assert [three_digits(value) for value in (0, 0.01234, 9.996, 99.96)] == ["0.00", "0.0123", "10.0", "100"]
    assert [count_text(n, what) for n, what in ((1, "step"), (2, "step"), (3, "micro-batch"))] == [
        *("1 step", "2 steps", "3 micro-batches")
    ]


@pytest.mark.parametrize(
    ("low", "high", "count", "found"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (0.3, 0.9, 3, [0.4, 0.6, 0.8]),
        (-5, 5, 2, [-5, 0, 5]),
        (990, 1010, 4, [990, 995, 1000, 1005, 1010]),
    ],
)
def test_ticks_are_round(low: float, high: float, count: int, found: list[float]) -> None:
    assert ticks(low, high, count) == pytest.approx(found)


def test_elements_escape_what_stands_in_attributes() -> None:
    assert element("a", "<b/>", class_="x", data_y='"<') == '<a class="x" data-y="&quot;&lt;"><b/></a>'
    assert table(("a", "<"), [["r", "<i>1</i>"]]).count("&lt;") == 1


def places(chart: str) -> list[list[float]]:
    line = re.search(r'points="([^"]*)"', chart)
    assert line is not None
    return [[float(number) for number in point.split(",")] for point in line[1].split()]


def test_lines_go_from_the_first_point_to_the_last() -> None:
    first, second, third = places(line_chart([Curve(name="x", points=((0, 1), (5, 2), (10, 3)))], "step", height=116))
    assert [first[0], second[0], third[0]] == [0, 500, 1000]
    assert first[1] > second[1] == 58 > third[1]  # y grows downwards


def test_one_point_is_a_dot_in_the_middle() -> None:
    chart = line_chart([Curve(name="x", points=((7, 2.0),))], "step", height=100)
    assert places(chart) == [[500, 50]] and 'cx="50.00%" cy="50.0"' in chart


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    points = tuple((float(x), 1.0 + (x == 9_999)) for x in range(10_000))
    thinned = places(line_chart([Curve(name="x", points=points)], "step"))
    assert len(thinned) <= MOST_POINTS + 1
    assert thinned[-1][0] == 1000 and thinned[-1][1] < thinned[-2][1]
