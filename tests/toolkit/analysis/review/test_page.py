"""Tests of the review page as text: well formed, safe, deterministic, and its content."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.base.pip_install import install_command
from sm_train.toolkit.analysis.review import comparison_table, waterfall
from sm_train.toolkit.analysis.review.charts import render_chart, steps_at, time_axis
from sm_train.toolkit.analysis.review.comparison_table import short_names
from sm_train.toolkit.analysis.review.review_model import (
    LEVELS,
    Chart,
    Curve,
    Figures,
    JobReview,
    Mark,
    Review,
    SampleImage,
    Verdict,
)
from sm_train.toolkit.analysis.review.review_page import page, write_page
from sm_train.toolkit.analysis.review.series import resample
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.report_html.html_page import template
from sm_train.toolkit.report_html.svg import COLORS

from tests.support.sample_reviews import healthy, offline, stalled, three_jobs

VOID = {"meta", "link", "br", "hr", "img", "input"}
PARTS = ["useful", "start_up", "restarts", "stalls", "data_wait"]

texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
numbers = st.floats(0, 1e12) | st.floats(-1e30, 1e30)
maybe = st.none() | numbers
positive = st.none() | st.floats(0, 1e9)


@st.composite
def lines(draw: st.DrawFn) -> Curve:
    count = draw(st.integers(0, 6))
    times = sorted(draw(st.lists(st.floats(0, 1e6), min_size=count, max_size=count)))
    sides = [draw(st.lists(maybe, min_size=count, max_size=count)) for _ in range(3)]
    if draw(st.booleans()):
        return Curve(draw(texts), times, sides[0])
    return Curve(draw(texts), times, *sides)


charts = st.builds(
    Chart, texts, texts, texts, st.lists(lines(), max_size=8).map(tuple), st.none() | numbers
)
figures = st.builds(
    Figures,
    status=st.none() | texts,
    instances=st.none() | st.integers(1, 1000),
    resolution=st.none() | st.integers(1, 4096),
    effective_batch_size=st.none() | st.integers(1, 10**6),
    steps_per_second=maybe,
    loss=maybe,
    goodput=positive,
    restarts=st.none() | st.integers(0, 9),
    billable_seconds=positive,
    billed_usd=positive,
    difference_usd=maybe,
    seconds=st.none() | st.dictionaries(st.sampled_from([*PARTS, "another"]), st.floats(0, 1e7)),
)
verdicts = st.builds(
    Verdict,
    texts,
    st.sampled_from(LEVELS),
    texts,
    texts,
    st.lists(texts, max_size=2).map(tuple),
    st.none() | texts,
)
marks = st.builds(
    Mark,
    st.sampled_from(["start", "stall", "checkpoint", "evaluation", "error", "end"]),
    st.floats(0, 1e6),
    st.floats(0, 1e5),
    texts,
)
jobs = st.builds(
    lambda length, **fields: JobReview(begin=1e9, passed_seconds=length, **fields),
    st.floats(0, 1e7),
    name=texts,
    run=st.none() | texts,
    stage=st.none() | texts,
    figures=figures,
    verdicts=st.lists(verdicts, max_size=3).map(tuple),
    charts=st.lists(charts, max_size=1).map(tuple),
    marks=st.lists(marks, max_size=4).map(tuple),
)
reviews = st.builds(
    Review,
    st.lists(jobs, min_size=1, max_size=5).map(tuple),
    st.lists(texts, max_size=1).map(tuple),
)


class Reader(HTMLParser):
    """Collects elements, attributes and text, and checks that all elements are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(key, value or "") for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, key: str) -> list[str]:
        return [value for name, value in self.attributes if name == key]


def check(text: str) -> Reader:
    """Check the properties that all pages share."""
    read = Reader(text)
    assert read.elements["h1"] == read.elements["main"] == 1
    assert not read.elements.keys() & {"script", "img", "iframe", "object", "base", "form"}
    assert not [key for key, _ in read.attributes if key.startswith("on") or key == "src"]
    ids = read.all("id")
    assert len(ids) == len(set(ids))
    links = [link for link in read.all("href") if link != "data:,"]
    assert {link[0] for link in links} <= {"#"}
    assert {link[1:] for link in links} <= set(ids)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)
    named = " ".join(read.all("aria-labelledby")).split()
    assert set(named) <= set(ids)
    assert not [path for path in read.all("d") if "nan" in path]
    return read


@pytest.fixture(scope="module")
def three() -> str:
    return page(three_jobs())


@pytest.mark.integration
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(reviews)
def test_any_review_renders_a_well_formed_page(review: Review) -> None:
    check(page(review))


@pytest.mark.slow
def test_page_is_deterministic(tmp_path: Path) -> None:
    review = Review((stalled(),))
    write_page(tmp_path / "page.html", review)
    assert (tmp_path / "page.html").read_bytes() == page(review).encode()


def test_untrusted_text_is_escaped() -> None:
    hostile = (
        "</script></style></title><script>alert(1)</script><img src=x onerror='a()'>\"$x^2$&lt;"
    )
    harmless, attacked = (_named(offline(), name) for name in ("x", hostile))
    plain = check(page(Review((harmless,), ("x",))))
    read = check(page(Review((attacked,), (hostile,))))
    assert read.elements == plain.elements
    assert "".join(read.texts).count(hostile) >= 20


def _named(job: JobReview, name: str) -> JobReview:
    line = Curve(name, (1.0, 2.0), (1.0, 2.0))
    return replace(
        job,
        name=name,
        run=name,
        stage=name,
        figures=replace(job.figures, status=name, instance_type=name, backend=name),
        verdicts=(Verdict(name, "bad", name, name, (name,), name),),
        charts=(Chart(name, name, name, (line, line)),),
        marks=(Mark("stall", 1.0, 2.0, name),),
    )


@pytest.mark.slow
def test_page_is_self_contained(three: str) -> None:
    check(three)
    assert not re.search(r"https?:|@import|//[a-z]", three)
    assert len(three) < 1e6
    assert "default-src 'none'" in three


def test_missing_folder_is_reported_and_no_file_is_left(tmp_path: Path) -> None:
    review = Review((offline(),))
    with pytest.raises(UserError, match=r"--html: .*nowhere: no such folder; create it first"):
        write_page(tmp_path / "nowhere" / "page.html", review)
    with pytest.raises(UserError, match="Is a directory; name another file"):
        write_page(tmp_path, review)
    assert list(tmp_path.iterdir()) == []


def test_missing_extra_names_what_to_install() -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from sm_train.toolkit.analysis.review.review_page import page\n"
        "from sm_train.toolkit.analysis.review.review_model import Review\n"
        "from sm_train.toolkit.base.errors import UserError\n"
        "from tests.support.sample_reviews import *\n"
        "try: page(Review((offline(),)))\n"
        "except UserError as error: print(error)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[4],
    ).stdout
    command = install_command("report")
    assert output == f"matplotlib: is not installed; a page with charts needs it: {command}\n"


def test_headline_counts_problems_and_known_costs(three: str) -> None:
    assert "3 jobs: 3 problems, 4 warnings, 2 open questions" in three
    assert "at least $42,252" in three
    assert "1 job: no problems · about $5.00 · 2.0 h" in page(Review((_healthy_job(),)))


def _healthy_job() -> JobReview:
    return JobReview(
        "a",
        None,
        None,
        0.0,
        7200.0,
        Figures(billed_usd=5.0),
        (Verdict("loss", "good", "Is the loss healthy?", "Yes."),),
        (),
        (),
    )


def _with(job: JobReview, **figures: object) -> JobReview:
    return replace(job, figures=replace(job.figures, **figures))  # type: ignore[arg-type]


def test_jobs_are_ranked_only_where_comparable() -> None:
    jobs = (healthy(1), stalled(), offline())
    ranks = {
        row.label: [cell.rank for cell in row.cells]
        for _, rows in comparison_table.table(jobs)
        for row in rows
    }
    assert ranks["goodput"] == ["best", "worst", None]
    assert ranks["waiting for data"] == ["best", "worst", None]
    # The resolutions differ, and the third job's is unknown.
    assert ranks["it/s"] == [None] * 3
    jobs = tuple(_with(job, resolution=256, effective_batch_size=2048) for job in jobs)
    rows = dict(comparison_table.table(jobs))["Speed"]
    assert [cell.rank for cell in rows[0].cells] == [None, "worst", "best"]
    jobs = (jobs[0], _with(jobs[2], steps_per_second=1.8021))
    rows = dict(comparison_table.table(jobs))["Speed"]
    assert [(cell.text, cell.rank) for cell in rows[0].cells] == [("1.8", None)] * 2
    single = comparison_table.table(jobs[:1])
    assert {cell.rank for _, rows in single for row in rows for cell in row.cells} == {None}
    assert "GPU utilization" in comparison_table.unknown(jobs[1])


def test_charts_have_a_step_axis(three: str) -> None:
    # 780,000 steps in 5.2 days: round steps below the days.
    first = three[three.index('id="job-1"') : three.index('id="job-2"')]
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", first)
    assert {"step", "200k", "400k", "600k"} <= set(labels)


@pytest.mark.slow
def test_jobs_are_overlaid_by_step() -> None:
    job = healthy(1)
    chart = next(chart for chart in job.charts if chart.code == "loss")
    progress = job.progress
    assert progress is not None
    reached = steps_at(progress, chart.lines[0].times_seconds)
    assert reached == sorted(reached)
    assert reached[-1] == pytest.approx(780_000, rel=0.02)
    text = page(Review((healthy(1), stalled())))
    overlaid = text[text.index("<h3>Charts</h3>") : text.index('id="job-1"')]
    assert '<th scope="col">step</th>' in overlaid
    assert "since the start" not in overlaid
    # Without the steps of one job, time is all they share.
    without = Review((healthy(1), replace(stalled(), progress=None)))
    text = page(without)
    assert '<th scope="col">step</th>' not in text


@pytest.mark.slow
def test_different_settings_are_listed(three: str) -> None:
    start = three.index("<h3>Different settings</h3>")
    rows = three[start : three.index("<h3>Charts</h3>")]
    assert "<code>training.learning_rate</code>" in rows
    assert all(value in rows for value in ("0.0001", "5e-05", "not set"))
    two = page(Review((healthy(1), stalled())))
    assert "cluster.backend" not in two
    same = page(Review((healthy(1), healthy(2))))
    assert "Different settings" not in same


def test_samples_are_shown_by_step_and_left_out_of_json() -> None:
    image = SampleImage(
        2000, "s3://bucket/samples/step-00002000.png", "data:image/jpeg;base64,AA=="
    )
    review = Review((replace(healthy(1), samples=(image,)),))
    text = page(review)
    assert '<img src="data:image/jpeg;base64,AA=="' in text
    assert "<figcaption>step 2,000</figcaption>" in text
    [job] = review.document()["jobs"]
    assert job["samples"] == [{"step": 2000, "location": image.location, "address": None}]


def test_names_of_jobs_are_shown_without_what_they_share() -> None:
    assert short_names(["out/a/256px", "out/b/256px"]) == ["…/a", "…/b"]
    assert short_names(["out/a/256px", "out/a/512px"]) == ["…/256px", "…/512px"]
    assert short_names(["/logs/job", "/logs/job/retry"]) == ["…/job", "…/job/retry"]
    assert short_names(["job-1", "job-2"]) == ["job-1", "job-2"]
    assert short_names(["/logs/job"]) == ["/logs/job"]


def test_values_that_look_the_same_get_the_same_badge() -> None:
    jobs = (healthy(1), healthy(2), stalled())
    jobs = tuple(
        _with(job, goodput=goodput)
        for job, goodput in zip(jobs, (0.9701, 0.9699, 0.8), strict=True)
    )
    [row] = [
        row for _, rows in comparison_table.table(jobs) for row in rows if row.label == "goodput"
    ]
    assert [(cell.text, cell.rank) for cell in row.cells] == [
        ("97.0%", "best"),
        ("97.0%", "best"),
        ("80.0%", "worst"),
    ]


def test_waterfall_leads_from_all_time_to_training() -> None:
    review = Review((stalled(),))
    bars = waterfall.waterfall_bars(review.jobs[0], review.parts)
    assert [bar.label for bar in bars] == [
        "billed",
        "start-up",
        "restarts",
        "repeated work",
        "stalls",
        "checkpoints",
        "waiting for data",
        "shut-down",
        "training",
    ]
    assert (bars[0].start, bars[0].width, bars[0].cost) == (0, 100, "$1,232")
    for before, after in pairwise(bars[1:]):
        assert after.start + after.width == pytest.approx(before.start)
    assert bars[-1].start == 0
    assert bars[4].time == "39 min"
    assert bars[4].share == "6.9%"
    assert bars[4].cost == "$85.21"
    assert waterfall.waterfall_bars(offline(), review.parts) == []


values = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=90)


@given(st.lists(values, min_size=1, max_size=3), st.integers(1, 50))
def test_resampled_table_stays_within_measured_values(
    curves: list[list[float | None]], most: int
) -> None:
    timed = [([float(index) for index in range(len(points))], points) for points in curves]
    rows = resample(timed, most)
    assert len(rows) <= most
    longest = max(map(len, curves))
    if longest <= most:
        assert [row.time_seconds for row in rows] == [*range(longest)]
        assert [row.values[0] for row in rows][: len(curves[0])] == curves[0]
    for column, curve in enumerate(curves):
        measured = [value for value in curve if value is not None]
        resampled = [row.values[column] for row in rows if row.values[column] is not None]
        assert bool(resampled) == bool(measured)
        for value in resampled:
            assert value is not None
            assert min(measured) - 1e-6 <= value <= max(measured) + 1e-6


def test_outlier_among_many_nodes_is_named() -> None:
    chart = healthy().charts[2]
    shown = render_chart("chart", chart, time_axis(1e5))
    assert shown.legend[0].label == "algo-8, lowest on average"
    assert [entry.label for entry in shown.legend[1:]] == [
        "median of all 16",
        "others; shaded: lowest to highest",
    ]
    assert shown.svg is not None
    assert len(re.findall(r'id="chart-line-\d+"', shown.svg)) == 16
    assert len(shown.columns) == 16
    assert len(shown.rows) == 40


def test_chart_and_line_without_values_are_reported() -> None:
    empty = Curve("gpu 1", (1.0, 2.0), (None, None))
    full = Curve("gpu 0", (1.0, 2.0), (3.0, None))
    review = Review(
        (
            replace(
                offline(),
                charts=(Chart("a", "Alone", "", (empty,)), Chart("b", "Two", "", (full, empty))),
            ),
        )
    )
    text = page(review)
    assert text.count('class="plot"') == 1
    assert "There are no measurements." in text
    assert "No values: gpu 1." in text


def test_shares_are_shown_as_percent() -> None:
    line = Curve("node", (1.0, 2.0), (0.5, None), (0.25, None), (0.75, None))
    shown = render_chart(
        "chart",
        Review(
            (replace(offline(), charts=(Chart("gpu", "GPU utilization", "share", (line,), 1.0),)),)
        )
        .jobs[0]
        .charts[0],
        time_axis(9),
    )
    assert (shown.unit, shown.rows) == ("%", (("1", "50"), ("2", "–")))
    assert shown.summary == "always 50%; the maximum is 100."


def test_backticks_become_code_elements() -> None:
    changed = (
        replace(
            _healthy_job().verdicts[0], fix="see `sm-train diagnose <a>` first", evidence=("a ` b",)
        ),
    )
    text = page(Review((replace(_healthy_job(), verdicts=changed),)))
    assert "see <code>sm-train diagnose &lt;a&gt;</code> first" in text
    assert "a ` b" in text


def test_interruptions_are_numbered_and_routine_is_counted() -> None:
    text = page(Review((stalled(),)))
    events = re.findall(r'<tr><th scope="row">(\d)</th><td>(\w+)</td><td>([^<]*)</td>', text)
    assert events == [("1", "stall", "3.1 h"), ("2", "error", "3.8 h"), ("3", "restart", "4.0 h")]
    assert "Ticks at the bottom: 8 checkpoints" in text
    assert "collective 4711 &lt;ALLREDUCE&gt; timed out" in text


def themes() -> Iterator[dict[str, str]]:
    """Yield the custom properties of the light and the dark theme."""
    light, dark = template("page.css").split("@media (prefers-color-scheme: dark)")
    for text in (light, light + dark.split("}")[0]):
        yield dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", text))


def luminance(color: str) -> float:
    """Return the relative luminance by WCAG 2.2."""
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(color: str, other: str) -> float:
    low, high = sorted((luminance(color), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_plots_have_enough_contrast_in_both_themes() -> None:
    light, dark = themes()
    assert {key for key in light if light[key] == dark[key]} == set()
    for theme in (light, dark):
        assert set(COLORS) <= theme.keys()
        for ground in ("page", "card"):
            for text in ("text", "muted", "link", "good", "warning", "bad", "unknown"):
                assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)
            for color in (*COLORS, "focus"):
                if color != "rule":
                    assert contrast(theme[color], theme[ground]) >= 3, (color, ground)
