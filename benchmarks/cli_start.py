"""How long a command takes to answer, against bare Python and a named peer, interleaved.

Prints medians and spread in milliseconds, and each median's ratio to ``python -c pass``. A command
that is not installed or does not answer is left out, and the reason is printed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 7
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
"""As installed by pip, which compiles the modules; the first run does so here."""
BIN = Path(sys.executable).parent
READ = "import yaml; yaml.safe_load(open("
PRICE = ["cost", "--instance", "ml.p4de.24xlarge", "--instances", "4"]
PRICE += ["--its", "1.8", "--steps", "550000"]


def commands(run: str) -> dict[str, list[str]]:
    tool = str(BIN / "sm-train")
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "python reading RUN's YAML": [sys.executable, "-c", f"{READ}{run!r}))"],
        "sm-train --help": [tool, "--help"],
        "sm-train cost (options)": [tool, *PRICE],
        "sm-train cost RUN (3 stages)": [tool, "cost", run],
        "sm-train submit RUN --dry-run": [tool, "submit", run, "--dry-run", "--json"],
        "accelerate launch --help (peer)": [str(BIN / "accelerate"), "launch", "--help"],
    }


def is_available(name: str, command: list[str]) -> bool:
    """Return whether ``command`` runs; this first run also fills the page cache."""
    if not Path(command[0]).exists():
        print(f"skipped: {name}: {command[0]} is not installed")
        return False
    first = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    if first.returncode:
        messages = first.stderr.strip().splitlines() or ["no error message"]
        print(f"skipped: {name}: exit {first.returncode}: {messages[-1]}")
    return first.returncode == 0


def main() -> None:
    """Run every command in turn, ``ROUNDS`` times."""
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "bria.yaml")
        subprocess.run(
            [BIN / "sm-train", "init", run, "--preset", "bria-2.0"], check=True, capture_output=True
        )
        timed = {
            name: command for name, command in commands(run).items() if is_available(name, command)
        }
        seconds: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(ROUNDS):
            for name, command in timed.items():
                started = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True, env=ENVIRONMENT)
                seconds[name].append(time.perf_counter() - started)
    bare = statistics.median(seconds["python -c pass"])
    print(f"{ROUNDS} rounds, interleaved, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'command':<34}{'median':>9}{'least':>9}{'most':>9}{'ratio':>9}")
    for name, values in seconds.items():
        median = statistics.median(values)
        row = "".join(f"{1000 * value:>6.0f} ms" for value in (median, min(values), max(values)))
        print(f"{name:<34}{row}{median / bare:>8.1f}×")


if __name__ == "__main__":
    main()
