"""Accuracy of `diagnose` on the corpus of real logs: precision and recall, tuned and held out.

Precision is the share of confident answers (medium or high confidence) that are right, and of all
answers with those of low confidence; recall is the share of logs which show a cause whose
cause is found. Failures of the held-out part are only counted.

    python benchmarks/diagnose_accuracy.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.toolkit.analysis.diagnose.log_corpus import corpus, parts, score


def main() -> None:
    """Print the scores and the wrong answers of the tuned part."""
    for name, logs in parts(corpus()).items():
        result = score(logs)
        nameable = sum(log.nameable for log in logs)
        print(
            f"{name:<8}  {len(logs):3} logs, {nameable:3} with a cause  precision "
            f"{result.precision:.3f} ({result.precision_of_all:.3f} of all answers)  "
            f"recall {result.recall:.3f}  wrong rank or node {len(result.wrong_origin)}"
        )
        if name == "tuned":
            for line in dict.fromkeys((*result.wrong, *result.missed, *result.wrong_origin)):
                print(f"  {line}")


if __name__ == "__main__":
    main()
