"""Write the messages of the tuned logs of the corpus to toolkit/diagnose/messages.toml.

`diagnose` compares unknown messages with them (toolkit/diagnose/similar.py). Held-out logs are left
out: they measure what the comparison is worth.

    python benchmarks/diagnose_messages.py
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from sm_train.toolkit.diagnose import similar
from sm_train.toolkit.diagnose.diagnosis import UNKNOWN
from sm_train.toolkit.diagnose.signatures import signatures

from tests.toolkit.diagnose.log_corpus import corpus, parts

_MAX_TEXT = 300
"""Characters of a message: later ones are paths and values."""


def main() -> None:
    """Write one line per message, by code."""
    messages: defaultdict[str, set[str]] = defaultdict(set)
    for log in parts(corpus())["tuned"]:
        found = log.diagnose()
        if not log.nameable or not found.evidence:
            continue
        is_right = log.accepts(found) and found.cause in signatures()
        if is_right or (found.cause == UNKNOWN and log.causes[0] in signatures()):
            code = found.cause if is_right else log.causes[0]
            messages[code].add(found.evidence[0 if is_right else -1].text[:_MAX_TEXT])
    lines = [
        "# Messages of real logs that failed for a reason, by the signature's code: condensed from",
        "# public issue threads (tests/toolkit/diagnose/corpus/manifest.toml has their addresses).",
        "# `python benchmarks/diagnose_messages.py` writes this file.",
    ]
    for code, texts in sorted(messages.items()):
        # Strings of JSON are strings of TOML.
        shown = [f"    {json.dumps(text, ensure_ascii=False)}," for text in sorted(texts)]
        lines += ["", f"{code} = [", *shown, "]"]
    path = Path(similar.__file__).with_name("messages.toml")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
