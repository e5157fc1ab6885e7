"""The reference of failure causes, from the signatures of ``sm-train diagnose``."""

from __future__ import annotations

import re
from pathlib import Path

from sm_train.toolkit.analysis.diagnose import signatures as signature_table
from sm_train.toolkit.analysis.diagnose.signatures import Signature, signatures
from tables import code

HEAD = """\
# Failure causes

Every failure that `sm-train diagnose` recognizes in logs ({count}), with a real message, the fix
and the source. Search this page for a phrase of your error message.

- *cause*: explains a failure without further evidence. *symptom*: shows that something failed, not
why.
- *echo*: a message of other ranks after one has failed; never reported as the cause.
- *warning*: worth reporting, ends no job.
- *retryable*: the same job is likely to succeed when it is restarted.

```
sm-train diagnose my-run
```
"""


def render() -> str:
    """Return the page, with the signatures under the headings of their table."""
    found = signatures()
    headings = _headings()
    parts = [HEAD.format(count=len(found))]
    for signature in found.values():
        if signature.code in headings:
            parts.append(f"\n## {headings[signature.code]}\n")
        parts.append(_entry(signature))
    return "".join(parts)


def _headings() -> dict[str, str]:
    """Return the table's headings by the code of the first signature below each."""
    text = Path(signature_table.__file__).with_name("signatures.toml").read_text(encoding="utf-8")
    pairs = re.findall(r"^# -{5,} (.+?)\n.*?^code = \"([^\"]+)\"", text, flags=re.M | re.S)
    return {first: title[0].upper() + title[1:] for title, first in pairs}


def _entry(signature: Signature) -> str:
    retry = "retryable" if signature.retryable else "not retryable"
    example = signature.examples[0].replace("```", "'''")
    source = re.sub(r"(https?://[^\s,)]+)", r"<\1>", signature.source)
    return (
        f"\n### {signature.code}\n\n**{_plain(signature.title)}** · {signature.role} "
        f"· {signature.confidence} confidence · {retry}\n\n```text\n{example}\n```\n\n"
        f"**Fix.** {_plain(signature.action)}\n\n"
        f"**Source.** {source}\n"
        + (
            f"\n**Explains** {', '.join(map(code, sorted(signature.explains)))}.\n"
            if signature.explains
            else ""
        )
    )


def _plain(text: str) -> str:
    """Escape what Markdown would format."""
    return re.sub(r"([*_<])", r"\\\1", text)
