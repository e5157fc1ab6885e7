"""Prints the time of each folder of tests and the slowest tests, from pytest's JUnit reports.

python tests/tiers/times.py REPORT...
"""

from __future__ import annotations

import sys
from collections import Counter
from xml.etree import ElementTree

_SLOWEST = 10


def main(reports: list[str]) -> None:
    seconds: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            module, name = case.get("classname", ""), case.get("name", "")
            took = float(case.get("time", 0))
            # tests.toolkit.packing.test_pack → toolkit/packing
            folder = "/".join(module.split(".")[1:-1][:2]) or "tests"
            folders[folder] += 1
            seconds[folder] += took
            tests[f"{module.replace('.', '/')}.py::{name}"] += took
    print(f"\n{'tests':>6} {'seconds':>8}  folder")
    for folder, took in seconds.most_common():
        print(f"{folders[folder]:6} {took:8.0f}  {folder}")
    print(f"{folders.total():6} {seconds.total():8.0f}  all; of several workers together")
    print(f"\n{'seconds':>8}  slowest tests")
    for test, took in tests.most_common(_SLOWEST):
        print(f"{took:8.1f}  {test}")


if __name__ == "__main__":
    main(sys.argv[1:])
