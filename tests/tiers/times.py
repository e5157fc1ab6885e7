"""Prints the processor time of each folder of tests and of the most expensive tests.

python tests/tiers/times.py REPORT...

Reads pytest's JUnit reports, in which tests/tiers/cpu_time.py states the time of each test.
"""

from __future__ import annotations

import sys
from collections import Counter
from xml.etree import ElementTree

_MOST = 10


def main(reports: list[str]) -> None:
    seconds: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            module, name = case.get("classname", ""), case.get("name", "")
            stated = case.find("properties/property[@name='cpu_seconds']")
            used = 0.0 if stated is None else float(stated.get("value", 0))
            # tests.toolkit.data_prep.packing.test_pack → toolkit/data_prep/packing
            folder = "/".join(module.split(".")[1:-1][:2]) or "tests"
            folders[folder] += 1
            seconds[folder] += used
            tests[f"{module.replace('.', '/')}.py::{name}"] += used
    print(f"\n{'tests':>6} {'seconds':>8}  folder (CPU)")
    for folder, used in seconds.most_common():
        print(f"{folders[folder]:6} {used:8.0f}  {folder}")
    print(f"{folders.total():6} {seconds.total():8.0f}  all")
    print(f"\n{'seconds':>8}  tests with most CPU")
    for test, used in tests.most_common(_MOST):
        print(f"{used:8.1f}  {test}")


if __name__ == "__main__":
    main(sys.argv[1:])
