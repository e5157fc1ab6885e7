"""The view of ``watch`` on terminals of any size, for a made-up cluster."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from sm_train.toolkit.records.live_state import LiveState
from sm_train.toolkit.runs.watch.screen import _share, brief, screen, sparkline

from tests.toolkit.runs.watch.screen_support import NOW, cluster, model


@given(
    st.lists(st.tuples(st.integers(0, 3600), st.floats(-1e6, 1e6)), min_size=1, max_size=200),
    st.integers(1, 80),
)
def test_sparkline_fits_and_spans_all_points(points: list[tuple[float, float]], width: int) -> None:
    line = sparkline(sorted(points), width, 0.0)
    assert 1 <= len(line) <= width
    assert set(line) <= set(" ▁▂▃▄▅▆▇█")
    assert " " not in (line[0], line[-1])


def test_sparkline_has_gaps_without_points_and_keeps_noise_flat() -> None:
    busy = [(float(at), 1.0 + at % 2 / 1000) for at in range(100)]
    later = [(at + 900.0, value) for at, value in busy]
    line = sparkline(busy + later, 10, 0.1)
    assert line[1:9].strip() == ""
    assert set(line) - {" "} <= set("▇█")
    assert sparkline([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)], 30, 0.1) == "▁▅█"


@pytest.mark.parametrize(
    ("seconds", "expected"), [(-1, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h")]
)
def test_ages_are_formatted_briefly(seconds: float, expected: str) -> None:
    assert brief(seconds) == expected


# ------------------------------------------------------------------ a cluster


def rendered(live: LiveState, nodes: int, width: int, height: int | None = None) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, no_color=True)
    with console.capture() as capture:
        console.print(screen(model(live, nodes), NOW.timestamp(), width, height))
    return re.sub(r"\x1b\[[0-9;]*m", "", capture.get()).splitlines()


@pytest.mark.parametrize(("width", "titles"), [(36, 3), (50, 4), (80, 7), (100, 8), (120, 10)])
def test_each_width_shows_the_columns_that_fit(width: int, titles: int) -> None:
    lines = rendered(cluster(4), 4, width)
    assert max(map(len, lines)) <= width
    [header] = [line for line in lines if line.startswith("node ")]
    assert len(re.split(r"\s{2,}", header.strip())) == titles, header
    assert any(line.startswith("algo-3") and "7 min" in line for line in lines)


def test_view_shows_all_known_values() -> None:
    text = "\n".join(rendered(cluster(4), 4, 120))
    for expected in (
        "demo  256px  training  demo--256px-0001",
        "72.2 %  14,444 of 20,000",
        "1.2 to 1.8, 60 min",
        "data wait 2.1 %   MFU 41.2 %   3,686 images/s",
        "remaining 1.3 h, until ",
        "saved     step 14,000",
        "spent $1,204, remaining $1,406, total $2,610, budget $2,500",
        "97 %",
        "91 %",
        "71 GiB",
        "3.0 %",
        "67 °C",
        "31,001",
        "30,000",
        "straggler algo-3: rank 16 is busy for 0.7 s of each step, 1.40 × the others",
        "warning: the run is projected to cost",
        "algo-1 code-2: a long message",
    ):
        assert expected in text, expected


def test_job_without_events_has_a_view() -> None:
    lines = rendered(LiveState(), 2, 100)
    assert "demo  256px  starting  demo--256px-0001 (Training)" in lines[0]
    assert "it/s      unknown until the first steps" in lines
    assert "remaining unknown" in lines
    assert [line.split() for line in lines if line.startswith("algo-")] == [
        [f"algo-{number}", *"–" * 7] for number in (1, 2)
    ]


@pytest.mark.parametrize(("nodes", "warnings"), [(1, 0), (128, 0), (128, 9), (16, 2)])
@pytest.mark.parametrize("height", [24, 30, 50])
def test_low_terminal_shows_the_worst_nodes(nodes: int, warnings: int, height: int) -> None:
    lines = rendered(cluster(nodes, warnings), nodes, 80, height)
    assert len(lines) < height
    assert "next poll" in lines[-1]
    if nodes > 3:
        assert any(line.startswith("algo-3 ") for line in lines)
    if nodes == 128:
        shown = sum(bool(re.match(r"algo-\d", line)) for line in lines)
        assert f"and {128 - shown} more" in "\n".join(lines)
    assert sum("code-" in line for line in lines) >= min(1, warnings)


@settings(max_examples=30)
@given(st.integers(20, 200), st.integers(20, 80), st.integers(0, 40), st.integers(0, 6))
def test_view_fits_any_size_and_cluster(width: int, height: int, nodes: int, warnings: int) -> None:
    lines = rendered(cluster(nodes, warnings), max(1, nodes), width, height)
    assert max(map(len, lines)) <= width


def test_a_share_is_shown_in_percent() -> None:
    assert _share(0.0525) == "5.2 %"
    assert _share(None) == "–"
