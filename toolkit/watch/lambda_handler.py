"""``watch --once`` as a scheduled Lambda function: the same look, by the same code.

``SM_TRAIN_RUNS`` names the runs, with commas between them. One that cannot be looked at does not
keep the others from being; the function fails in the end, so that its own alarm rings.
"""

from __future__ import annotations

import json
import os
from typing import Any

from sm_train.toolkit.aws.session import open_session
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.runs.resolve import resolve_run
from sm_train.toolkit.watch.controller import reconcile
from sm_train.toolkit.watch.output import watch_document


def handler(event: dict[str, Any], context: Any) -> dict[str, Any]:
    """Look at each run once; what is returned and printed is what `watch --once --json` prints.

    Raises:
        RuntimeError: a run could not be looked at; the message names each.
    """
    region = os.environ["AWS_REGION"]
    session = open_session(None, region)
    seen: dict[str, Any] = {}
    failed: list[str] = []
    for name in filter(None, (one.strip() for one in os.environ["SM_TRAIN_RUNS"].split(","))):
        try:
            seen[name] = watch_document(
                reconcile(session, resolve_run(session, name, region), act=True)
            )
        except UserError as error:
            failed.append(f"{name}: {error}")
    print(json.dumps(seen))
    if failed:
        raise RuntimeError("; ".join(failed))
    return seen
