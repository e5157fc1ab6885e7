"""``watch --once`` as a scheduled Lambda function, by the same code.

``SM_TRAIN_RUNS`` names the runs, separated by commas. A run that cannot be polled does not keep
the others from being polled; the function fails at the end, so that its own alarm fires.
"""

from __future__ import annotations

import json
import os
from typing import Any

from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.platforms.find_run import find_run
from sm_train.toolkit.runs.watch.controller import poll_run
from sm_train.toolkit.runs.watch.output import watch_status


def handler(event: dict[str, Any], context: Any) -> dict[str, dict[str, Any]]:
    """Poll each run once; print and return what `watch --once --json` prints, by run.

    Raises:
        RuntimeError: a run could not be polled; the message names each.
    """
    options: dict[str, Any] = {"region": os.environ["AWS_REGION"], "profile": None, "sessions": {}}
    documents: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    for name in filter(None, (part.strip() for part in os.environ["SM_TRAIN_RUNS"].split(","))):
        try:
            result = poll_run(find_run(name, options), dry_run=False)
            documents[name] = watch_status(result).document
        except UserError as error:
            failed.append(f"{name}: {error}")
    print(json.dumps(documents))
    if failed:
        raise RuntimeError("; ".join(failed))
    return documents
