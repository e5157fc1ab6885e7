"""How long a command takes to answer, against bare Python and a named peer, interleaved.

Prints medians and spread in milliseconds, and each median's ratio to ``python -c pass``. A command
that is not installed or does not answer is left out, and the reason is printed.

Libraries look for plugins in the metadata of all installed packages, so a command starts slower
where many are: an environment with fewer than 150 gets the metadata of as many more.
"""

from __future__ import annotations

import importlib.metadata
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
PACKAGES = 150
"""Packages of an environment in which a team works, with its notebooks and its training code."""

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


def add_packages(folder: Path) -> int:
    """Create the metadata of packages until there are :data:`PACKAGES`; return their number."""
    installed = len({each.name for each in importlib.metadata.distributions()})
    for number in range(PACKAGES - installed):
        metadata = folder / f"package{number}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Name: package{number}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[plugins{number}]\nname = package:function\n")
    ENVIRONMENT["PYTHONPATH"] = f"{folder}:{ENVIRONMENT.get('PYTHONPATH', '')}".rstrip(":")
    return max(installed, PACKAGES)


def main() -> None:
    """Run every command in turn, ``ROUNDS`` times."""
    with tempfile.TemporaryDirectory() as folder:
        packages = add_packages(Path(folder) / "packages")
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
    print(
        f"{ROUNDS} rounds, interleaved, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"{packages} packages"
    )
    print(f"{'command':<34}{'median':>9}{'least':>9}{'most':>9}{'ratio':>9}")
    for name, values in seconds.items():
        median = statistics.median(values)
        row = "".join(f"{1000 * value:>6.0f} ms" for value in (median, min(values), max(values)))
        print(f"{name:<34}{row}{median / bare:>8.1f}×")


if __name__ == "__main__":
    main()
