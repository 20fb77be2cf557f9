"""Axes, fronts and labels of plots."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvq_cli.report.axes import Axis
from kvq_cli.report.charts import Point, best_points
from kvq_cli.report.labels import Box, place
from kvq_cli.report.markup import join, tag

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / "results/reproduction/smollm2/compare-2bit/comparison.json"

positive = st.floats(1e-6, 1e6)


@given(st.lists(positive, min_size=1, max_size=9), st.booleans())
def test_axis_contains_all_values_and_has_ticks(values, log):
    axis = Axis.around(values, 40, 390, log)
    places = [axis.at(value) for value in sorted(values)]
    assert places == sorted(places) and places[0] >= 40 and places[-1] <= 390
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 12
    assert ticks == sorted(set(ticks)) and axis.low <= ticks[0] and ticks[-1] <= axis.high * (1 + 1e-9)


def test_linear_axis_is_affine_and_log_axis_affine_in_the_logarithm():
    assert [Axis(0, 4, 100, 300).at(value) for value in (0, 1, 4, 9)] == [100, 150, 300, 300]
    assert [round(Axis(1, 100, 300, 100, log=True).at(value), 9) for value in (1, 10, 100)] == [300, 200, 100]


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
    import re

    picture = (ROOT / "docs" / "quality.svg").read_text(encoding="utf-8")
    labels = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="middle" class="label">([^<]+)<', picture)
    methods = json.loads(SMOLLM2.read_text())["methods"]
    assert {text for *_, text in labels} == methods.keys() - {"fp16"}
    boxes = [Box(float(x) - 3 * len(t), float(y) - 10, float(x) + 3 * len(t), float(y) + 2) for x, y, t in labels]
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
