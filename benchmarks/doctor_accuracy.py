"""How often the doctor accuses the right link of four emulated nodes, and nobody if all are well.

Each round examines four network namespaces of 400 Mbit/s four times: with one link of 40 Mbit/s and
without it, on an otherwise idle machine and next to busy loops, one for each CPU core. A run is
right if the doctor's findings about nodes and links name the slow link and nothing else. Needs
root, for the namespaces.

    python benchmarks/doctor_accuracy.py --rounds 50
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support.cluster.doctor_support import cluster_on
from tests.support.cluster.network_namespaces import network_namespaces, unavailable_reason

NODES, MBIT, SLOW_MBIT = 4, 400, 40
# A busy loop ends with its parent, even if SIGKILL ended that.
BUSY_LOOP = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(10**6))"
ACCUSATIONS = ("link", "node-slow", "node-unreachable", "pairs")


def main() -> None:
    """Measure on this computer; exit with 1 if a run was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    options = parser.parse_args()
    first, rounds = options.first, options.rounds
    if reason := unavailable_reason():
        print(f"skipped: {reason}")
        return
    # Stopped by SIGTERM, it deletes its processes and namespaces as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    right: Counter[tuple[bool, bool]] = Counter()
    for number in range(first, first + rounds):
        for slow, busy in itertools.product((True, False), (False, True)):
            link = random.Random(number).sample(range(NODES), 2) if slow else None
            with hogs() if busy else contextlib.nullcontext():
                result = examine(link)
            accused = accusations(result)
            expected = [("link-slow", sorted(f"algo-{node + 1}" for node in link))] if link else []
            is_right = accused == expected
            right[slow, busy] += is_right
            print(
                f"{number} {'slow' if slow else 'healthy'}{' busy' if busy else ''} load "
                f"{os.getloadavg()[0]:.1f}: {'right' if is_right else f'WRONG {accused}'}; "
                f"{shares(result)}",
                flush=True,
            )
    for (slow, busy), count in sorted(right.items()):
        where = "next to busy loops" if busy else "alone"
        print(f"{'slow link' if slow else 'healthy'}, {where}: right in {count} of {rounds} runs")
    sys.exit(sum(right.values()) < 4 * rounds)


def examine(link: list[int] | None) -> dict[str, Any]:
    """Return the doctor's stored result on a new cluster."""
    with tempfile.TemporaryDirectory() as folder, network_namespaces(NODES) as hosts:
        for host in range(NODES):
            hosts.limit_egress(host, MBIT)
        if link:
            hosts.limit_link(link[0], link[1], SLOW_MBIT)
        # Four interpreters that import PyTorch next to busy loops may take longer than the 60 s of
        # the tests, after which nothing would be measured.
        return cluster_on(Path(folder), hosts, timeout=180).run()[0]


def accusations(result: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the findings about nodes and links."""
    findings = result["verdict"]["findings"]
    return [
        (finding["code"], sorted(finding["nodes"]))
        for finding in findings
        if finding["code"].startswith(ACCUSATIONS)
    ]


def shares(result: dict[str, Any]) -> str:
    """Return each pair's bandwidth in every pass, in Mbit/s."""
    parts = []
    for pair in result["measurements"]["pairs"]:
        passes = [f"{value * 8e-6:.0f}" for value in pair["passes"] if value is not None]
        parts.append(f"{pair['nodes'][0]}-{pair['nodes'][1]} {'/'.join(passes)}")
    return ", ".join(parts) or f"no pair was measured: {reasons(result)}"


def reasons(result: dict[str, Any]) -> str:
    """Return what the doctor knows about why it measured no pair."""
    measured = result["measurements"]
    known = {
        "timed out": measured["timed_out"],
        "seconds": measured["seconds"],
        "missing ranks": measured["missing_ranks"],
        "late ranks": measured["late_ranks"],
        "lost ranks": measured["lost_ranks"],
        "errors": measured["errors"],
        "all ranks' collectives": measured["world"] is not None,
    }
    return ", ".join(f"{name}: {value}" for name, value in known.items() if value not in ([], {}))


@contextlib.contextmanager
def hogs() -> Iterator[None]:
    """Keep every CPU core busy."""
    processes = [
        subprocess.Popen([sys.executable, "-c", BUSY_LOOP, str(os.getpid())])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
