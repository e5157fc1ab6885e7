"""The view of ``watch``: a picture of what is known, for a terminal of any size. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from sm_train.toolkit.jobs.live_state import (
    LiveState,
    NodeState,
    Straggler,
    node_states,
    notices,
    stragglers,
)
from sm_train.toolkit.jobs.stage_state import StageState
from sm_train.toolkit.terminal.formatting import format_duration, format_number, format_usd
from sm_train.toolkit.watch.controller import WatchResult
from sm_train.toolkit.watch.gpu_metrics import hosts_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_LABEL = 9
_NOTICES, _SLOW = 5, 3
_LINES = 16
"""Of a view beside its nodes, warnings and slow machines."""

_STEADY = 0.1
"""A sparkline of it/s shows at least so much of the highest as its height: noise stays flat."""

_LEVELS = "▁▂▃▄▅▆▇█"
_STATES = {
    "training": "green",
    "starting": "cyan",
    "done": "green",
    "stalled": "red",
    "failed": "red",
    "stopping": "yellow",
    "stopped": "yellow",
}


@dataclass(frozen=True)
class ScreenState:
    """What is known: the last look, all that the job has said, its GPUs by CloudWatch."""

    seen: WatchResult
    live: LiveState
    gpus: Mapping[str, float] = field(default_factory=dict)
    footer: str = ""


def screen(model: ScreenState, now: float, width: int, height: int | None = None) -> RenderableType:
    """The view at ``now`` (Unix seconds by AWS's clock); of ``height`` lines at most, if given."""
    from rich.console import Group

    most = _NOTICES if height is None else max(1, min(_NOTICES, (height - _LINES) // 3))
    stage = model.seen.state.current
    parts: list[RenderableType] = [_head(model, now, width)]
    if stage is not None:
        parts += _training(model, stage, now, width)
    parts.append(_money(model))
    if stage is not None and stage.job is not None and stage.job.live:
        room = None if height is None else height - _LINES - min(most, len(notices(model.live)))
        parts += _cluster(model, now, width, room)
    parts += _warnings(model, most)
    if model.footer:
        parts += ["", _text(model.footer, "dim")]
    return Group(*parts)


# ------------------------------------------------------------------ lines


def _text(words: str, style: str = "") -> Text:
    """One line of the terminal, whatever its width."""
    from rich.text import Text

    return Text(words, style, no_wrap=True, overflow="ellipsis")


def _row(label: str, *parts: str | tuple[str, str]) -> Text:
    line = _text(f"{label:<{_LABEL}}", "bold")
    for part in parts:
        line.append(*((part, "not bold") if isinstance(part, str) else part))
    return line


def _head(model: ScreenState, now: float, width: int) -> Text:
    state = model.seen.state
    stage = state.current
    line = _text(state.run.name, "bold")
    if stage is None:
        line.append("  done", _STATES["done"])
    else:
        place = [one.name for one in state.stages].index(stage.name) + 1
        many = f" ({place} of {len(state.stages)})" if len(state.stages) > 1 else ""
        line.append(f"  {stage.name}{many}  ", "not bold")
        line.append(stage.state, f"bold {_STATES.get(stage.state, 'default')}")
        if stage.job is not None:
            line.append(f"  {stage.job.name}", "not bold")
            if stage.state != "training" and stage.job.secondary:
                line.append(f" ({stage.job.secondary})", "not bold")
    right = f"{state.run.region}  {datetime.fromtimestamp(now):%H:%M:%S}"
    if (gap := width - len(line.plain) - len(right)) >= 2:
        line.append(" " * gap + right, "not bold dim")
    return line


def _training(
    model: ScreenState, stage: StageState, now: float, width: int
) -> list[RenderableType]:
    live, step = model.live, max(stage.step, _step(model.live))
    share = min(1.0, step / stage.max_steps)
    words = f" {100 * share:5.1f} %  {step:,} of {stage.max_steps:,}"
    room = max(5, min(50, width - _LABEL - len(words)))
    filled = round(share * room)
    rows = [
        _row("step", ("━" * filled, "green"), ("─" * (room - filled), "dim not bold"), words),
        _row("it/s", *_curve(live, "steps_per_second", width, format_number, _STEADY)),
        _row("loss", *_curve(live, "loss", width, lambda value: f"{value:.4f}", 0.0)),
    ]
    newest = live.newest["step"].event if "step" in live.newest else {}
    shares = [
        f"{label} {_share(newest[key])}"
        for label, key in (("data wait", "data_wait_share"), ("MFU", "mfu"))
        if newest.get(key) is not None
    ]
    if newest.get("images_per_second") is not None:
        shares.append(f"{newest['images_per_second']:,.0f} images/s")
    if shares:
        rows.append(_row("", "   ".join(shares)))
    rows.append(_row("left", _left(live, stage, step, now)))
    rows.append(_row("saved", _saved(live, stage, now)))
    return [*rows]


def _step(live: LiveState) -> int:
    return int(live.newest["step"].event["step"]) if "step" in live.newest else 0


def _curve(
    live: LiveState, key: str, width: int, words: Callable[[float], str], steady: float
) -> Sequence[str | tuple[str, str]]:
    """The newest value, how it came to it, and between what."""
    points = [
        (said.time, float(said.event[key])) for said in live.steps if said.event[key] is not None
    ]
    if not live.steps:
        return ["unknown until the first steps"]
    if not points or live.steps[-1].event[key] is None:
        return [("no number", "red not bold")]
    values = [value for _, value in points]
    shown = f"{words(values[-1]):<8}"
    if len(points) < 2:
        return [shown]
    range_ = f" {words(min(values))} to {words(max(values))}, {brief(points[-1][0] - points[0][0])}"
    room = min(60, width - _LABEL - len(shown) - len(range_))
    if room < 8:
        return [shown, range_]
    return [shown, (sparkline(points, room, steady), "cyan not bold"), range_]


def sparkline(points: Sequence[tuple[float, float]], width: int, steady: float) -> str:
    """``points`` (time, value) over the whole width; where there are none is a gap.

    The height is from the least to the greatest, but at least the share ``steady`` of the latter.
    """
    begin, end = points[0][0], points[-1][0]
    low, high = min(value for _, value in points), max(value for _, value in points)
    low = min(low, high - steady * abs(high))
    # With fewer points than columns they are drawn side by side.
    width = min(width, len(points)) if end > begin else 1
    columns: list[list[float]] = [[] for _ in range(width)]
    for at, value in points:
        place = (at - begin) / (end - begin) if width > 1 else 0.0
        columns[min(width - 1, int(place * width))].append(value)
    heights = [
        (sum(column) / len(column) - low) / (high - low) if high > low else 1.0
        for column in columns
        if column
    ]
    drawn = iter(_LEVELS[min(7, int(8 * height))] for height in heights)
    return "".join(next(drawn) if column else " " for column in columns)


def _left(live: LiveState, stage: StageState, step: int, now: float) -> str:
    speed = (
        live.newest["step"].event["steps_per_second"] if "step" in live.newest else None
    ) or stage.words.steps_per_second
    if step >= stage.max_steps:
        return "nothing"
    if not speed:
        return "unknown"
    seconds = (stage.max_steps - step) / speed
    if stage.state != "training":
        return f"{format_duration(seconds)} of training"
    at = datetime.fromtimestamp(now + seconds)
    return f"{format_duration(seconds)}, until {at:%H:%M}" + (
        f" on {at:%b %-d}" if seconds > 43200 else ""
    )


def _saved(live: LiveState, stage: StageState, now: float) -> str:
    """The newest checkpoint: by what the job says, or by what is whole in S3."""
    said = live.newest.get("checkpoint")
    if said is not None:
        return f"step {said.event['step']:,}, {brief(now - said.time)} ago"
    return "nothing yet" if stage.stored.step is None else f"step {stage.stored.step:,}"


def _money(model: ScreenState) -> Text:
    state = model.seen.state
    budget = state.run.config.budget
    words = f"{format_usd(state.spent_usd)} spent, {format_usd(state.projected_usd)} in the end"
    if budget is None:
        return _row("dollars", words)
    over = state.projected_usd is not None and state.projected_usd > budget.usd
    return _row(
        "dollars", words, (f", budget {format_usd(budget.usd)}", "red" if over else "not bold")
    )


def brief(seconds: float) -> str:
    """An age: seconds, below two minutes; minutes, below two hours; then hours."""
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


# ------------------------------------------------------------------ machines


def _cluster(model: ScreenState, now: float, width: int, room: int | None) -> list[RenderableType]:
    """The machines, in about ``room`` lines."""
    nodes = node_states(model.live, hosts_of(model.seen.state), now, model.gpus)
    if not nodes:
        return []
    slow = _slow(model.live)[:_SLOW]
    most = len(nodes) if room is None else max(2, room - len(slow))
    parts: list[RenderableType] = ["", _table(_worst(nodes, most), width)]
    if most < len(nodes):
        words = f"and {len(nodes) - most} more, which were heard lately and are busier"
        parts.append(_text(words, "dim"))
    return parts + [_row("slow", (words, "yellow not bold")) for words in slow]


def _slow(live: LiveState) -> list[str]:
    """A line for each machine with ranks that keep others waiting, the slowest first."""
    by_host: dict[str, list[Straggler]] = {}
    for one in stragglers(live):
        by_host.setdefault(one.host, []).append(one)
    return [
        f"{host}: {found[0].ratio:.2f} × the median step, {found[0].step_seconds:.3g} s; "
        f"{'ranks' if len(found) > 1 else 'rank'} "
        f"{', '.join(str(rank) for rank in sorted(one.rank for one in found))}"
        for host, found in by_host.items()
    ]


def _worst(nodes: Sequence[NodeState], most: int) -> list[NodeState]:
    """The ``most`` that were not heard for longest, or are least busy, in their own order."""

    def order(node: NodeState) -> tuple[float, float]:
        age = float("inf") if node.heartbeat_age is None else node.heartbeat_age
        busy = node.gpu_utilization
        # Ages that differ by a beat or so say nothing.
        return (-age if age > 180 else 0.0, busy if busy is not None else 101.0)

    chosen = {node.host for node in sorted(nodes, key=order)[:most]}
    return [node for node in nodes if node.host in chosen]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} %"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e6:,.0f}"


_COLUMNS: tuple[tuple[int, str, Callable[[NodeState], str]], ...] = (
    (0, "node", lambda node: node.host),
    (0, "heard", lambda node: "–" if node.heartbeat_age is None else brief(node.heartbeat_age)),
    (60, "step", lambda node: "–" if node.step is None else f"{node.step:,}"),
    (0, "GPUs", lambda node: _percent(node.gpu_utilization)),
    (50, "idlest", lambda node: _percent(node.gpu_utilization_min)),
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
        "hottest",
        lambda node: "–" if node.gpu_temperature is None else f"{node.gpu_temperature:.0f} °C",
    ),
    (110, "in MB/s", lambda node: _rate(node.receive)),
    (110, "out MB/s", lambda node: _rate(node.send)),
)
"""Least width of the terminal, title, and cell; what is unknown is a dash."""


def _table(nodes: Sequence[NodeState], width: int) -> Table:
    from rich.table import Table

    columns = [(title, cell) for least, title, cell in _COLUMNS if width >= least]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title, _ in columns:
        table.add_column(title, justify="left" if title == "node" else "right", no_wrap=True)
    for node in nodes:
        late = node.heartbeat_age is None or node.heartbeat_age > 180
        table.add_row(*(cell(node) for _, cell in columns), style="yellow" if late else "")
    return table


# ------------------------------------------------------------------ warnings


def _warnings(model: ScreenState, most: int) -> list[RenderableType]:
    found: list[RenderableType] = []
    if model.seen.warning is not None:
        found.append(_text(f"warning: {model.seen.warning}", "red"))
    for one in notices(model.live)[-most:]:
        times = f" ({one.count} times)" if one.count > 1 else ""
        at = f"{datetime.fromtimestamp(one.time):%H:%M:%S}"
        line = _text(f"{at} {one.host} ", "dim")
        line.append(
            f"{one.code}{times}: ", "not dim red" if one.level == "error" else "not dim yellow"
        )
        line.append(one.message, "not dim")
        found.append(line)
    return ["", *found] if found else []
