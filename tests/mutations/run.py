"""Puts drawn faults into a copy of the product and runs the tests of their subject.

    python -m tests.mutations.run [NUMBER ...] [--jobs N]

Prints for each fault the first test that fails, or "survived", and exits with 1 if that is not
argued below. ``--constants`` doubles each number instead that decides dollars, a stop or an alarm.
Run it in the environment of the tests; it needs no network and leaves the working tree alone.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutations.draw import ROOT, Mutation, constants

LIST = Path(__file__).with_name("mutations.json")
TIME_LIMIT = 1200.0

# The tests of each subject, those that find most first. A folder stands for both of its tiers.
TESTS = {
    "object store": ("tests/entrypoints/storage",),
    "leases": ("tests/entrypoints/storage", "tests/entrypoints/data_prep/work"),
    "checkpoints": (
        "tests/entrypoints/checkpoints",
        "tests/test_newest_checkpoint.py",
        "tests/order/test_checkpoints.py",
        "tests/entrypoints/base",
        "tests/cluster/test_states.py",
    ),
    "removal": (
        "tests/toolkit/data_prep/removal",
        "tests/entrypoints/shards",
        "tests/order/test_folders.py",
    ),
    "costing": ("tests/cost", "tests/toolkit/planning"),
    "remediation": (
        "tests/toolkit/runs/test_remediation.py",
        "tests/lives",
        "tests/toolkit/runs/watch",
        "tests/toolkit/runs",
        "tests/toolkit/platforms",
        "tests/toolkit/submit/local",
    ),
    "watching": (
        "tests/toolkit/runs/watch",
        "tests/entrypoints/clusters",
        "tests/lives",
        "tests/toolkit/platforms",
        "tests/toolkit/runs",
        "tests/toolkit/screens",
    ),
    "heartbeats": (
        "tests/entrypoints/monitoring",
        "tests/entrypoints/monitoring/watchdog",
        "tests/cluster/test_stalls.py",
    ),
    "jobs": ("tests/toolkit/records", "tests/lives", "tests/toolkit/runs/test_remediation.py"),
}


ARGUED = {
    "params.update(expected)\n            context[": "both only write, to two dictionaries",
    "if (newest.marker is None):": "newest_complete returns a name and its marker, or neither",
    'on node {node}")\n            holders': "neither is read before both are written",
    "os.close(descriptor)\n            self.exit": "/proc has a zombie's exit code in any case",
    "message, straggler))\n            self._events": "a thread sends later, in no promised order",
}
"""What faults of the list put in that changes no behavior, and why."""


class Copy:
    """The files that git knows, with an environment that imports the product from them."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.environment = folder / "tree", folder / "environment"
        names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        for name in filter(None, names.split("\0")):
            target = self.tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
        venv.create(self.environment, symlinks=True)
        self._link_packages()

    def _link_packages(self) -> None:
        """Everything from the present environment, but the product from this copy.

        A path that a ``.pth`` file adds is not read for further ``.pth`` files, so the product's
        editable installation in the present environment stays out.
        """
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        present = Path(sys.prefix) / "lib" / version / "site-packages"
        packages = self.environment / "lib" / version / "site-packages"
        (packages / "packages.pth").write_text(f"{present}\n")
        for path in present.glob("__editable__*sm_train*"):
            text = path.read_text().replace(str(ROOT), str(self.tree))
            (packages / path.name).write_text(text)
        for script in (Path(sys.prefix) / "bin").iterdir():
            target = self.environment / "bin" / script.name
            if target.exists() or not script.is_file():
                continue
            content = script.read_bytes()
            old, new = f"#!{sys.prefix}/".encode(), f"#!{self.environment}/".encode()
            target.write_bytes(content.replace(old, new, 1) if content[:2] == b"#!" else content)
            target.chmod(0o755)
        optional = Path(sys.prefix) / "optional"
        if optional.exists():
            (self.environment / "optional").symlink_to(optional)

    def judged(self, mutation: Mutation) -> str:
        """Which test notices the fault."""
        path = self.tree / mutation.path
        source = path.read_text()
        if source.count(mutation.before) != 1:
            return "does not apply"
        path.write_text(source.replace(mutation.before, mutation.after))
        try:
            return self._first_failure(TESTS[mutation.subject])
        finally:
            path.write_text(source)

    def _first_failure(self, tests: tuple[str, ...]) -> str:
        for mark in ("not integration and not slow", "integration and not slow"):
            command = [str(self.environment / "bin/python"), "-m", "pytest", "-x", "-q", "-m", mark]
            present = [test for test in tests if (self.tree / test).exists()]
            try:
                run = subprocess.run(
                    [*command, "-p", "no:randomly", *present],
                    cwd=self.tree,
                    capture_output=True,
                    text=True,
                    timeout=TIME_LIMIT,
                )
            except subprocess.TimeoutExpired:
                return "not judged: the time limit"
            failed = re.search(r"^FAILED (.*?)( - .*)?$", run.stdout, re.MULTILINE)
            if run.returncode == 1 and failed:
                return f"caught: {failed[1]}"
            if run.returncode not in (0, 5):
                return f"not judged: {run.stdout[-300:]}{run.stderr[-300:]}"
        return "survived"

    def passes(self, subject: str) -> str:
        """Return what fails without a fault, which would seem to catch all of them."""
        verdict = self._first_failure(TESTS[subject])
        return "" if verdict == "survived" else verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("numbers", nargs="*", type=int, help="which faults (all of them)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="run the tests without a fault")
    parser.add_argument("--constants", action="store_true", help="every constant that decides")
    options = parser.parse_args()
    mutations = [Mutation(**fields) for fields in json.loads(LIST.read_text())]
    if options.constants:
        mutations = constants()
    numbers = options.numbers or range(len(mutations))
    survived = list[int]()
    if options.check:
        with tempfile.TemporaryDirectory() as name:
            copy = Copy(Path(name))
            failing = {subject: copy.passes(subject) for subject in TESTS}
        print("\n".join(f"{subject}: {found or 'passes'}" for subject, found in failing.items()))
        return 1 if any(failing.values()) else 0
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as threads:
        copies, local = (
            iter([Copy(Path(name) / str(n)) for n in range(options.jobs)]),
            threading.local(),
        )

        def judge(number: int) -> None:
            if not hasattr(local, "copy"):
                local.copy = next(copies)
            mutation = mutations[number]
            verdict = local.copy.judged(mutation)
            what = mutation.before if mutation.kind == "constant" else mutation.subject
            print(f"{number:3} {what}, {mutation.kind}: {verdict}", flush=True)
            argued = [why for text, why in ARGUED.items() if text in mutation.after]
            if verdict == "survived" and argued:
                print(f"    {argued[0]}", flush=True)
            elif not verdict.startswith("caught"):
                survived.append(number)

        list(threads.map(judge, numbers))
    print(f"neither caught nor argued: {sorted(survived)}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
