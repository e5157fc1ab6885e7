"""``watch --once`` as a scheduled Lambda function, by the same code.

``SM_TRAIN_RUNS`` names the runs, separated by commas. A run that cannot be polled does not keep
the others from being polled; the function fails at the end, so that its own alarm fires.
"""

from __future__ import annotations

import json
import os
from typing import Any

from sm_train.toolkit.aws.session import open_session
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.targets.resolved_run import resolve_run
from sm_train.toolkit.watch.controller import reconcile
from sm_train.toolkit.watch.output import watch_status


def handler(event: dict[str, Any], context: Any) -> dict[str, dict[str, Any]]:
    """Poll each run once; print and return what `watch --once --json` prints, by run.

    Raises:
        RuntimeError: a run could not be polled; the message names each.
    """
    region = os.environ["AWS_REGION"]
    session = open_session(None, region)
    documents: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    for name in filter(None, (part.strip() for part in os.environ["SM_TRAIN_RUNS"].split(","))):
        try:
            run = resolve_run(session, name, region)
            documents[name] = watch_status(reconcile(session, run, dry_run=False)).document
        except UserError as error:
            failed.append(f"{name}: {error}")
    print(json.dumps(documents))
    if failed:
        raise RuntimeError("; ".join(failed))
    return documents
