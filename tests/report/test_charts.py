"""Plots of a page: where points, bars and ticks are; colors, tooltips and texts; fronts and labels."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq_cli.report.charts import Plot, Point, Series, best_points, draw, draw_intervals, legend
from kvq_cli.report.labels import Box, place
from kvq_cli.report.markup import join, tag
from kvq_cli.report.svg import colors, style_sheet

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / "results/reproduction/smollm2/compare-2bit/comparison.json"
HOSTILE = '"><script>alert(1)</script> $x_1$ \\ \x1b'


def example(points, **options):
    return Plot("a title", "x label", "y label", [Series("name", 3, points)], **options)


def numbers(text):
    return [float(number) for number in re.findall(r"-?[\d.]+", text)]


def drawn(svg):
    """Frame of a plot as left, top, right, bottom; places of its markers; its tick labels; the other paths by color."""
    root = ElementTree.fromstring(svg)
    paths = [(path.get("style", ""), path.get("transform"), numbers(path.get("d"))) for path in root.iter("path")]
    [frame] = [d for style, _, d in paths if "var(--faint)" in style and "0.8" in style]
    marks = [numbers(transform) for _, transform, _ in paths if transform]
    lines = [(style, np.reshape(d, (-1, 2))) for style, transform, d in paths if not transform]
    texts = {text.text: (float(text.get("x")), float(text.get("y"))) for text in root.iter("text")}
    return (min(frame[::2]), min(frame[1::2]), max(frame[::2]), max(frame[1::2])), marks, texts, lines


positive = st.floats(1e-6, 1e6)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(positive, st.floats(0.01, 3)), min_size=1, max_size=9), st.booleans(), st.booleans())
def test_points_bars_and_ticks_are_inside_the_frame(pairs, log, zero):
    """A bar from below zero ends at the frame, also on a logarithmic axis."""
    zero &= not log
    points = [Point(index, y, f"{index}", y * error) for index, (y, error) in enumerate(pairs)]
    (left, top, right, bottom), marks, texts, lines = drawn(draw(example(points, log_y=log, zero=zero)))
    assert len(marks) == len(points)
    assert all(left <= x <= right and top <= y <= bottom for x, y in marks)
    order = sorted(range(len(points)), key=lambda index: points[index].y)
    assert [marks[index][1] for index in order] == sorted((y for _, y in marks), reverse=True)
    bars = [line for style, line in lines if style == "stroke:var(--c3)" and len(set(line[:, 0])) == 1]
    assert len(bars) >= len(points)
    assert all(top - 0.1 <= y <= bottom + 0.1 or zero for line in bars for y in line[:, 1])
    ticks = [y for text, (x, y) in texts.items() if x < left and text != "y label"]
    assert 2 <= len(ticks) <= 12 and all(top <= y <= bottom + 5 for y in ticks)


@pytest.mark.parametrize("log", [False, True])
def test_places_are_affine_in_the_values_or_their_logarithms(log):
    values = [1, 2, 5, 10, 100]
    _, marks, _, _ = drawn(draw(example([Point(y, y, f"{y}") for y in values], log_x=log, log_y=log)))
    scaled = np.log(values) if log else np.array(values)
    for axis, sign in ((0, 1), (1, -1)):
        places = np.array(marks)[:, axis]
        line = np.polyfit(scaled, places, 1)
        assert sign * line[0] > 0 and np.polyval(line, scaled) == pytest.approx(places, abs=0.11)


def test_a_plot_has_axes_bars_baseline_front_and_tooltips():
    points = [Point(1, 4, "one: 4", 0.5, "one"), Point(2, 3, "two: 3", None, "two")]
    svg = draw(example(points, baseline=("fp16", 2.0), frontier=-1, direct=True))
    (left, _, right, _), marks, texts, lines = drawn(svg)
    assert {"x label", "y label", "fp16", "one", "two", "1", "2", "3", "4"} <= texts.keys()
    titles = [title.text for title in ElementTree.fromstring(svg).iter("title")]
    assert titles == ["a title", "one: 4", "two: 3"]
    [(_, bar)] = [line for line in lines if len(line[1]) == 3 and line[0] == "stroke:var(--c3)"]
    assert list(bar[:, 0]) == [marks[0][0]] * 3
    assert bar[0, 1] - bar[1, 1] == pytest.approx(bar[1, 1] - bar[2, 1], abs=0.2) and bar[0, 1] > bar[1, 1]
    assert bar[1, 1] == marks[0][1]
    [front, baseline] = sorted((line for style, line in lines if "dasharray" in style), key=lambda line: line[0, 1])
    assert front == pytest.approx(np.array(marks))
    assert [left, right] == pytest.approx(list(baseline[:, 0])) and texts["fp16"][0] > right


def test_intervals_are_bars_beside_their_names_and_a_line_at_zero():
    rows = [("a", 0, -1.0, -2.0, 0.5, "a: -1"), ("b", 1, 2.0, 1.0, 3.0, "b: 2")]
    svg = draw_intervals("a title", "x label", rows)
    _, marks, texts, lines = drawn(svg)
    [[(x, _), _]] = [line for style, line in lines if "var(--ink)" in style]
    first, second = (next(line for style, line in lines if style == f"stroke:var(--c{n})") for n in (0, 1))
    assert first[0, 0] < first[1, 0] == marks[0][0] < x < first[2, 0] < marks[1][0] < second[2, 0]
    assert texts["a"][1] == pytest.approx(marks[0][1], abs=6) and texts["b"][1] == pytest.approx(marks[1][1], abs=6)
    assert [title.text for title in ElementTree.fromstring(svg).iter("title")] == ["a title", "a: -1", "b: 2"]


def test_a_plot_has_colors_of_the_theme_and_neither_ids_nor_links():
    """Several plots on a page have no ids in common."""
    svg = draw(example([Point(1, 4, "#1f6fb4", 0.5, "#1f6fb4"), Point(2, 3, "b")], direct=True, frontier=1))
    assert not re.search(r" (id|href|xlink:href|clip-path)=|url\(|<style|<metadata", svg + legend([("a", 1), ("b", 2)]))
    assert svg.count("#") == svg.count("#1f6fb4") == 2, "colors are variables; texts are as they were"
    light, dark = style_sheet().split("@media")
    named = set(re.findall(r"var\(--(\w+)\)", svg))
    assert {"rule", "faint", "c3"} == named <= colors().keys()
    assert all(f"--{name}: #" in theme for name in colors() for theme in (light, dark))
    alone = draw(example([Point(1, 2, "a")]), alone=True)
    assert style_sheet() in alone and 'xmlns="http://www.w3.org/2000/svg"' in alone and 'width="400"' in alone


def test_the_same_plot_has_the_same_bytes_whatever_the_settings():
    plot = example([Point(1, 4, "a", 0.5, "a"), Point(2, 3, "b", 0.1, "b")], direct=True, baseline=("fp16", 2.0))
    first = draw(plot)
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False, "lines.linewidth": 9, "svg.fonttype": "path"}):
        assert draw(plot) == first
        assert matplotlib.rcParams["font.size"] == 30


def test_texts_are_neither_markup_nor_formulas():
    series = [Series(HOSTILE, 0, [Point(1, 2, HOSTILE, 1, HOSTILE)])]
    plot = Plot(HOSTILE, HOSTILE, HOSTILE, series, direct=True, baseline=(HOSTILE, 3.0))
    root = ElementTree.fromstring(draw(plot).replace("\x1b", ""))
    assert {element.tag for element in root.iter()} == {"svg", "title", "g", "path", "text"}
    shown = [element.text for element in root.iter() if element.text]
    assert sum(text.startswith(HOSTILE[:-1]) for text in shown) == 6
    [name] = ElementTree.fromstring(legend([(HOSTILE[:-1], 0)])).itertext()
    assert name == HOSTILE[:-1]


def test_matplotlib_is_not_imported_before_a_plot_is_drawn():
    code = "import sys, kvq_cli.report.page; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


points = st.lists(st.builds(Point, st.integers(0, 9), st.integers(0, 9), st.just("")), min_size=1, max_size=12)


@given(points, st.sampled_from([1, -1]))
def test_front_holds_the_points_that_no_other_excels(points, better):
    found = {(point.x, point.y) for point in best_points(points, better)}

    def excelled(point):
        """Another point needs no more bits, is no worse, and differs."""
        return any(
            other.x <= point.x and better * other.y >= better * point.y and (other.x, other.y) != (point.x, point.y)
            for other in points
        )

    assert found == {(point.x, point.y) for point in points if not excelled(point)}


def test_labels_of_the_readme_picture_do_not_overlap():
    _, _, texts, _ = drawn((ROOT / "docs" / "quality.svg").read_text(encoding="utf-8").replace(" xmlns=", " name="))
    methods = json.loads(SMOLLM2.read_text())["methods"].keys() - {"fp16"}
    assert methods <= texts.keys()
    boxes = [Box(x - 3 * len(t), y - 10, x + 3 * len(t), y + 2) for t, (x, y) in texts.items() if t in methods]
    assert not any(one.overlap(other) for one, other in itertools.combinations(boxes, 2))


def test_labels_avoid_each_other_and_the_points():
    """Eight points in a small cluster."""
    points = [(150 + 12 * (index % 3), 100 + 14 * (index // 3)) for index in range(8)]
    boxes = place(points, [f"method-{index}" for index in range(8)], 11, Box(0, 0, 400, 250))
    assert not any(one.overlap(other) for one, other in itertools.combinations(boxes, 2))
    marks = [Box(x - 3, y - 3, x + 3, y + 3) for x, y in points]
    assert not any(box.overlap(mark) for box in boxes for mark in marks)


def test_only_markup_is_not_escaped():
    inner = tag("b", "a < b", title='"quoted"')
    assert tag("td", inner, " & ", None, [1, 2.5]) == '<td><b title="&quot;quoted&quot;">a &lt; b</b> &amp; 12.5</td>'
    assert join("<i>", tag("i")) == "&lt;i&gt;<i></i>"
