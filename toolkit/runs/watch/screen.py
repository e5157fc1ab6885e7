"""Renders the view of ``watch`` for a terminal of any size. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from sm_train.toolkit.records.live_state import (
    LiveState,
    NodeState,
    node_states,
    notices,
    progress_of,
    saved_checkpoints,
    stragglers,
)
from sm_train.toolkit.records.stage_state import StageState
from sm_train.toolkit.runs.watch.controller import WatchResult
from sm_train.toolkit.runs.watch.gpu_metrics import live_nodes
from sm_train.toolkit.terminal.formatting import format_duration, format_number, format_usd
from sm_train.toolkit.terminal.rich_table import rich_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_LABEL_WIDTH = 10
_MAX_NOTICES, _MAX_STRAGGLERS = 5, 3
_FIXED_LINES = 16
"""Lines of the view besides its nodes, notices and stragglers."""

_MIN_RELATIVE_RANGE = 0.1
"""The least height of the it/s sparkline, relative to its maximum: noise stays flat."""

_LATE_HEARTBEAT_SECONDS = 180.0

_LEVELS = "▁▂▃▄▅▆▇█"
_STATE_STYLES = {
    "training": "green",
    "starting": "cyan",
    "done": "green",
    "restarting": "cyan",
    "stalled": "red",
    "failed": "red",
    "lost": "red",
    "no-results": "red",
    "stopping": "yellow",
    "stopped": "yellow",
}


@dataclass(frozen=True)
class ScreenState:
    """What the view shows: the last poll, the job's live state, GPU utilization by CloudWatch."""

    result: WatchResult
    live: LiveState
    gpus: Mapping[str, float] = field(default_factory=dict)
    footer: str = ""


def screen(model: ScreenState, now: float, width: int, height: int | None = None) -> RenderableType:
    """Return the view at ``now`` (Unix seconds by AWS's clock), of at most ``height`` lines."""
    from rich.console import Group

    max_notices = _MAX_NOTICES
    if height is not None:
        max_notices = max(1, min(_MAX_NOTICES, (height - _FIXED_LINES) // 3))
    stage = model.result.state.current
    parts: list[RenderableType] = [_header(model, now, width)]
    if stage is not None:
        parts += _training(model, stage, now, width)
    if model.result.state.run.platform.is_paid:
        parts.append(_cost(model))
    if stage is not None and stage.job is not None and stage.job.live:
        lines = None
        if height is not None:
            lines = height - _FIXED_LINES - min(max_notices, len(notices(model.live)))
        parts += _cluster(model, now, width, lines)
    parts += _notice_lines(model, max_notices)
    if model.footer:
        parts += ["", _text(model.footer, "dim")]
    return Group(*parts)


# ------------------------------------------------------------------ rows


def _text(content: str, style: str = "") -> Text:
    """Return one line that is truncated at the terminal's width."""
    from rich.text import Text

    return Text(content, style, no_wrap=True, overflow="ellipsis")


def _row(label: str, *parts: str | tuple[str, str]) -> Text:
    """Return a labelled line; a part is text, or text with its style."""
    line = _text(f"{label:<{_LABEL_WIDTH}}", "bold")
    for part in parts:
        line.append(*((part, "not bold") if isinstance(part, str) else part))
    return line


def _header(model: ScreenState, now: float, width: int) -> Text:
    state = model.result.state
    stage = state.current
    line = _text(state.run.name, "bold")
    if stage is None:
        line.append("  done", _STATE_STYLES["done"])
    else:
        number = [run_stage.name for run_stage in state.stages].index(stage.name) + 1
        count = f" ({number} of {len(state.stages)})" if len(state.stages) > 1 else ""
        line.append(f"  {stage.name}{count}  ", "not bold")
        line.append(stage.state, f"bold {_STATE_STYLES.get(stage.state, 'default')}")
        if stage.job is not None:
            line.append(f"  {stage.job.name}", "not bold")
            is_known = stage.job.secondary_status in ("", stage.job.status)
            if stage.state != "training" and not is_known:
                line.append(f" ({stage.job.secondary_status})", "not bold")
    right = f"{state.run.short_place}  {datetime.fromtimestamp(now):%H:%M:%S}"
    if (gap := width - len(line.plain) - len(right)) >= 2:
        line.append(" " * gap + right, "not bold dim")
    return line


def _training(
    model: ScreenState, stage: StageState, now: float, width: int
) -> list[RenderableType]:
    """Return the rows about the stage: progress, speed, loss, remaining time and checkpoint."""
    live, step = model.live, max(stage.step, _newest_step(model.live))
    fraction = min(1.0, step / stage.max_steps)
    figures = f" {100 * fraction:5.1f} %  {step:,} of {stage.max_steps:,}"
    bar = max(5, min(50, width - _LABEL_WIDTH - len(figures)))
    filled = round(fraction * bar)
    progress = progress_of(live)
    speed = _curve(
        live,
        "steps_per_second",
        width,
        format_number,
        _MIN_RELATIVE_RANGE,
        progress.steps_per_second,
    )
    rows = [
        _row("step", ("━" * filled, "green"), ("─" * (bar - filled), "dim not bold"), figures),
        _row("it/s", *speed),
        _row("loss", *_curve(live, "loss", width, lambda value: f"{value:.4f}", 0.0)),
    ]
    newest = live.newest["step"].event if "step" in live.newest else {}
    shares = {"data wait": progress.data_wait_share, "MFU": newest.get("mfu")}
    metrics = [f"{label} {_share(share)}" for label, share in shares.items() if share is not None]
    if newest.get("images_per_second") is not None:
        metrics.append(f"{newest['images_per_second']:,.0f} images/s")
    if metrics:
        rows.append(_row("", "   ".join(metrics)))
    rows.append(_row("remaining", _remaining(live, stage, step, now)))
    rows.append(_row("saved", _saved(live, stage, now)))
    return [*rows]


def _newest_step(live: LiveState) -> int:
    return int(live.newest["step"].event["step"]) if "step" in live.newest else 0


def _curve(
    live: LiveState,
    key: str,
    width: int,
    format_value: Callable[[float], str],
    min_relative_range: float,
    figure: float | None = None,
) -> Sequence[str | tuple[str, str]]:
    """Return a figure, by default the newest value, and a sparkline of the values with their range
    and duration.
    """
    points = [
        (logged.time, float(logged.event[key]))
        for logged in live.steps
        if logged.event[key] is not None
    ]
    if not live.steps:
        return ["unknown until the first steps"]
    if not points or live.steps[-1].event[key] is None:
        return [("NaN", "red not bold")]
    values = [value for _, value in points]
    newest = f"{format_value(values[-1] if figure is None else figure):<8}"
    if len(points) < 2:
        return [newest]
    extent = (
        f" {format_value(min(values))} to {format_value(max(values))}, "
        f"{brief(points[-1][0] - points[0][0])}"
    )
    columns = min(60, width - _LABEL_WIDTH - len(newest) - len(extent))
    if columns < 8:
        return [newest, extent]
    return [newest, (sparkline(points, columns, min_relative_range), "cyan not bold"), extent]


def sparkline(points: Sequence[tuple[float, float]], width: int, min_relative_range: float) -> str:
    """Draw ``points`` (time, value) over ``width`` columns; a column without points is blank.

    The height spans the values, but at least ``min_relative_range`` of the maximum.
    """
    begin, end = points[0][0], points[-1][0]
    low, high = min(value for _, value in points), max(value for _, value in points)
    low = min(low, high - min_relative_range * abs(high))
    # Fewer points than columns are drawn side by side, without blanks.
    width = min(width, len(points)) if end > begin else 1
    columns: list[list[float]] = [[] for _ in range(width)]
    for at, value in points:
        position = (at - begin) / (end - begin) if width > 1 else 0.0
        columns[min(width - 1, int(position * width))].append(value)
    heights = [
        (sum(column) / len(column) - low) / (high - low) if high > low else 1.0
        for column in columns
        if column
    ]
    bars = iter(_LEVELS[min(7, int(8 * height))] for height in heights)
    return "".join(next(bars) if column else " " for column in columns)


def _remaining(live: LiveState, stage: StageState, step: int, now: float) -> str:
    speed = progress_of(live).measured_speed or stage.measured_speed
    if step >= stage.max_steps:
        return "nothing"
    if not speed:
        return "unknown"
    seconds = (stage.max_steps - step) / speed
    if stage.state != "training":
        return f"{format_duration(seconds)} of training"
    end = datetime.fromtimestamp(now + seconds)
    return f"{format_duration(seconds)}, until {end:%H:%M}" + (
        f" on {end:%b %-d}" if seconds > 43200 else ""
    )


def _saved(live: LiveState, stage: StageState, now: float) -> str:
    """Describe the newest checkpoint that was logged, and the newest complete one in storage."""
    saved, stored = saved_checkpoints(live), stage.stored.step
    if not saved:
        return "nothing yet" if stored is None else f"step {stored:,}, stored"
    time, step = saved[-1]
    held = "not stored yet" if stored is None else f"stored: step {stored:,}"
    held = "stored" if stored is not None and stored >= step else held
    return f"step {step:,}, {brief(now - time)} ago; {held}"


def _cost(model: ScreenState) -> Text:
    state = model.result.state
    budget = state.run.config.budget
    amounts, projected = str(state.projection), state.projection.total_usd
    if budget is None:
        return _row("cost", amounts)
    over_budget = projected is not None and projected > budget.usd
    style = "red" if over_budget else "not bold"
    return _row("cost", amounts, (f", budget {format_usd(budget.usd)}", style))


def brief(seconds: float) -> str:
    """Format an age: seconds below two minutes, minutes below two hours, else hours."""
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


# ------------------------------------------------------------------ nodes


def _cluster(model: ScreenState, now: float, width: int, lines: int | None) -> list[RenderableType]:
    """Return the node table and the stragglers, in about ``lines`` lines."""
    nodes = node_states(model.live, live_nodes(model.result.state), now, model.gpus)
    if not nodes:
        return []
    slow = _straggler_rows(model.live)
    rows = len(nodes) if lines is None else max(2, lines - len(slow))
    parts: list[RenderableType] = ["", _table(_worst(nodes, rows), width)]
    if rows < len(nodes):
        remainder = f"and {len(nodes) - rows} more with recent heartbeats and busier GPUs"
        parts.append(_text(remainder, "dim"))
    return parts + slow


def _straggler_rows(live: LiveState) -> list[RenderableType]:
    """Return a row for each straggler, slowest first, or one that says that there is none."""
    slow = stragglers(live)
    if not slow:
        return [_row("straggler", ("unknown" if slow is None else "none", "dim"))]
    lines = [
        f"{straggler.node}: "
        f"{'every rank' if straggler.rank is None else f'rank {straggler.rank}'} is busy for "
        f"{straggler.busy_seconds:.3g} s of each step, {straggler.ratio:.2f} × the others"
        for straggler in slow[:_MAX_STRAGGLERS]
    ]
    return [_row("straggler", (line, "yellow not bold")) for line in lines]


def _worst(nodes: Sequence[NodeState], count: int) -> list[NodeState]:
    """Return the ``count`` nodes with the oldest heartbeats or the least busy GPUs, in order."""

    def severity(node: NodeState) -> tuple[float, float]:
        age = float("inf") if node.heartbeat_age_seconds is None else node.heartbeat_age_seconds
        busy = node.gpu_utilization
        # Below the limit, ages differ only by when the heartbeats happen to be sent.
        late = -age if age > _LATE_HEARTBEAT_SECONDS else 0.0
        return (late, busy if busy is not None else 101.0)

    chosen = {node.node for node in sorted(nodes, key=severity)[:count]}
    return [node for node in nodes if node.node in chosen]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} %"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e6:,.0f}"


def _heartbeat(node: NodeState) -> str:
    if node.heartbeat_age_seconds is None:
        return "–"
    return f"{brief(node.heartbeat_age_seconds)}{' compiling' if node.compiling else ''}"


_COLUMNS: tuple[tuple[int, str, Callable[[NodeState], str]], ...] = (
    (0, "node", lambda node: node.node),
    (0, "heartbeat", _heartbeat),
    (60, "step", lambda node: "–" if node.step is None else f"{node.step:,}"),
    (0, "GPU util", lambda node: _percent(node.gpu_utilization)),
    (50, "GPU min", lambda node: _percent(node.gpu_utilization_min)),
    (
        70,
        "memory",
        lambda node: (
            "–" if node.gpu_memory_bytes is None else f"{node.gpu_memory_bytes / 2**30:.0f} GiB"
        ),
    ),
    (80, "data wait", lambda node: _share(node.data_wait_share)),
    (
        100,
        "GPU temp",
        lambda node: "–" if node.gpu_temperature is None else f"{node.gpu_temperature:.0f} °C",
    ),
    (110, "in MB/s", lambda node: _rate(node.receive_bytes_per_second)),
    (110, "out MB/s", lambda node: _rate(node.send_bytes_per_second)),
)
"""Minimum width of the terminal, title, and cell; unknown values are a dash."""


def _table(nodes: Sequence[NodeState], width: int) -> Table:
    columns = [(title, cell) for min_width, title, cell in _COLUMNS if width >= min_width]
    titles = [title for title, _ in columns]
    table = rich_table(titles, right=[title for title in titles if title != "node"], wrap=False)
    for node in nodes:
        late = (
            node.heartbeat_age_seconds is None
            or node.heartbeat_age_seconds > _LATE_HEARTBEAT_SECONDS
        )
        table.add_row(*(cell(node) for _, cell in columns), style="yellow" if late else "")
    return table


# ------------------------------------------------------------------ notices


def _notice_lines(model: ScreenState, max_notices: int) -> list[RenderableType]:
    """Return the budget warning and the newest warnings and errors of the job."""
    lines: list[RenderableType] = []
    if model.result.warning is not None:
        lines.append(_text(f"warning: {model.result.warning}", "red"))
    for notice in notices(model.live)[-max_notices:]:
        repeated = f" ({notice.count} times)" if notice.count > 1 else ""
        at = f"{datetime.fromtimestamp(notice.time):%H:%M:%S}"
        line = _text(f"{at} {notice.node} ", "dim")
        style = "not dim red" if notice.level == "error" else "not dim yellow"
        line.append(f"{notice.code}{repeated}: ", style)
        line.append(notice.message, "not dim")
        lines.append(line)
    return ["", *lines] if lines else []
