"""``make demo``: the whole workflow on real data, from raw images to a price, in a few minutes.

Every step is a command that a user would run. Scikit-learn's 1,797 handwritten digits are
packed, checked, planned, trained on with two processes on two emulated instances, sampled, and
judged by a classifier that was trained on real digits only.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.entrypoints.job_interface.checkpoint_layout import parse_step_folder, step_folders
from sm_train.toolkit.base.errors import ExitCode
from sm_train.toolkit.demo.digits import (
    NAMES,
    caption,
    frechet_distance,
    sample_digits,
    train_judge,
    write_digits,
)
from sm_train.toolkit.records.job_logs import Event, read_events
from sm_train.toolkit.terminal.console import note, stderr_console
from sm_train.toolkit.terminal.interrupts import delayed_interrupts
from sm_train.toolkit.terminal.rich_table import rich_table

if TYPE_CHECKING:
    from rich.table import Table

OUTPUT = Path("demo-out")
_STAGE = OUTPUT / "run" / "digits"
MODEL = _STAGE / "nodes" / "algo-1" / "model"
_SAMPLES_PER_DIGIT = 30


def main(options: Sequence[str]) -> None:
    """Run the demonstration in ``demo-out``; exit with the code of the first step that fails.

    ``options`` are more options of the local run, such as ``--set stages.digits.max_steps=100``.
    """
    try:
        _demonstrate(options)
    except KeyboardInterrupt:
        # A second Ctrl-C would print a traceback of the exit.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        note("interrupted; the demonstration starts over when you run it again")
        # Python's own exit would also end libraries, which may be in the middle of a native call.
        os._exit(ExitCode.INTERRUPTED)


def _demonstrate(options: Sequence[str]) -> None:
    started = time.monotonic()
    plan()
    _command(
        "6 · The same bundle here: 2 emulated instances, 1 process each",
        *["submit", "run.yaml", "--local", "--nodes", "2", "--output", "run", *options],
    )
    write_atomic(OUTPUT / "prompts.txt", _prompts().encode())
    _command(
        "7 · Samples",
        *["sample", str(MODEL.relative_to(OUTPUT)), "--prompts", "prompts.txt"],
        *["--guidance", "2", "--steps", "25"],
    )
    results = judge()
    plot_results(list(read_events(_STAGE)), OUTPUT / "grid.png", OUTPUT / "demo.png")
    _command(
        "8 · The measured speed, priced on 4 × p4de (only an illustration)",
        *["cost", "--instance", "ml.p4de.24xlarge", "--instances", "4"],
        *["--measured", "run/digits", "--steps", "100000"],
    )
    _summary(results, time.monotonic() - started)


def plan() -> None:
    """Write the data and the run file, check it and show its plan."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    _title("1 · The data: 1,797 handwritten digits, each with a caption")
    write_digits(OUTPUT / "digits")
    _command("2 · Shards", "pack", "digits", "packed", "--shard-size", "240KB")
    _command("3 · A run file", "init", "run.yaml", "--preset", "demo")
    _command(
        "4 · Checks before submitting: they name what to fill in for AWS",
        *["check", "run.yaml", "--offline"],
        accepted=(ExitCode.OK, ExitCode.PREFLIGHT),
    )
    _command("5 · The plan for SageMaker", "submit", "run.yaml", "--dry-run")


@dataclass(frozen=True)
class JudgeResult:
    """The judge's result for a checkpoint's samples.

    ``recognized`` is the share that it classifies as the prompted digit, ``distance`` the samples'
    Fréchet distance from real digits.
    """

    name: str
    recognized: float
    distance: float


def judge() -> list[JudgeResult]:
    """Judge every checkpoint, oldest first, and finally real digits for reference."""
    classifier = train_judge()
    results = []
    for checkpoint in reversed(step_folders(_STAGE / "checkpoints")):
        images, digits = sample_digits(checkpoint, _SAMPLES_PER_DIGIT)
        share, distance = classifier.recognized(images, digits), classifier.distance(images)
        results.append(JudgeResult(f"step {parse_step_folder(checkpoint.name)}", share, distance))
    # The distance between two disjoint sets of real digits: what chance alone causes.
    shuffled = np.random.default_rng(0).permutation(classifier.real)
    count = _SAMPLES_PER_DIGIT * len(NAMES)
    distance = frechet_distance(shuffled[:count], shuffled[count:])
    return [*results, JudgeResult("real digits", classifier.accuracy, distance)]


def _prompts() -> str:
    return "".join(f"{caption(digit)}\n" for _ in range(4) for digit in range(len(NAMES)))


def _title(text: str) -> None:
    stderr_console().print(f"\n[bold]{text}[/]")


def _command(title: str, *arguments: str, accepted: Sequence[ExitCode] = (ExitCode.OK,)) -> None:
    _title(title)
    stderr_console().print(f"[dim]$ sm-train {shlex.join(arguments)}[/]", soft_wrap=True)
    program = [sys.executable, "-c", "from sm_train.toolkit.cli import main; main()"]
    # A terminal sends Ctrl-C to the command as well, which then stops its processes. subprocess
    # would kill the command after 0.25 s, and its processes would stay.
    with delayed_interrupts(signal.SIGINT):
        done = subprocess.run([*program, *arguments], cwd=OUTPUT, check=False)
    if done.returncode not in accepted:
        sys.exit(done.returncode)


def plot_results(events: list[Event], grid: Path, out: Path) -> None:
    """Plot the loss curve above the sample grid, as one PNG."""
    import io

    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from PIL import Image

    steps = [event for event in events if event["kind"] == "step"]
    figure, (curve, samples) = plt.subplots(
        2, 1, figsize=(9, 8.4), height_ratios=[1, 1.6], layout="constrained"
    )
    curve.plot([event["step"] for event in steps], [event["loss"] for event in steps])
    curve.set(xlabel="step", ylabel="loss", yscale="log", title="Training loss")
    curve.grid(alpha=0.3, which="both")
    samples.imshow(np.asarray(Image.open(grid)))
    samples.set_title("Samples, as prompted")
    samples.axis("off")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    plt.close(figure)
    write_atomic(out, content.getvalue())


def _summary(results: list[JudgeResult], seconds: float) -> None:
    events = list(read_events(_STAGE))
    start = next(event for event in events if event["kind"] == "start")
    end = next(event for event in reversed(events) if event["kind"] == "end")
    last = next(event for event in reversed(events) if event["kind"] == "step")
    count = _SAMPLES_PER_DIGIT * len(NAMES)
    table = rich_table(title="The demonstration")
    for name, value in [
        ("parameters", f"{start['parameters']:,}"),
        ("processes", f"{start['world_size']} on {start['nodes']} emulated instances"),
        ("steps", f"{end['step']:,} of {start['effective_batch_size']} images"),
        ("speed", f"{end['steps_per_second']:.1f} it/s, {end['training_seconds']:.0f} s"),
        ("last loss", f"{last['loss']:.4f}"),
        ("total time", f"{seconds / 60:.1f} minutes"),
        ("picture", str(OUTPUT / "demo.png")),
    ]:
        table.add_row(name, value)
    stderr_console().print()
    stderr_console().print(_results_table(results, count))
    stderr_console().print(table)


def _results_table(results: list[JudgeResult], count: int) -> Table:
    header, title = ("checkpoint", "recognized", "Fréchet distance"), f"{count} sampled digits"
    table = rich_table(header, right=header[1:], title=f"{title} (chance level: 10 %)")
    for result in results:
        table.add_row(result.name, f"{result.recognized:.1%}", f"{result.distance:.1f}")
    return table


if __name__ == "__main__":
    main(sys.argv[1:])
