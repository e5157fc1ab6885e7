"""The reference of ``import sm_train``: directives for mkdocstrings, one per public name."""

from __future__ import annotations

import sm_train

HEAD = """\
# Python API

```python
import sm_train
```

Importing `sm_train` loads neither PyTorch nor boto3: each name is imported when it is used. Errors
are subclasses of `sm_train.Error`.
"""


def render() -> str:
    """Return the page with a directive for the definition of each public name."""
    parts = [HEAD]
    for name in sorted(sm_train.__all__, key=str.lower):
        source = sm_train._SOURCES.get(name)
        if source is not None:
            module, attribute = source
            parts.append(
                f"\n## sm_train.{name}\n\n::: {module}.{attribute}\n"
                "    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n"
            )
    return "".join(parts)
