"""Judges whether the job's checkpoints reached storage."""

from __future__ import annotations

from sm_train.entrypoints.records.upload_lag import StorageLag, storage_lag
from sm_train.toolkit.analysis.review.job_facts import JobFacts
from sm_train.toolkit.analysis.review.review_model import Verdict
from sm_train.toolkit.records.job_logs import Event

_QUESTION = "Did the checkpoints reach storage?"
_FIX = (
    "check that the job's role may write to the checkpoints' prefix, and the node's network; until "
    "then a lost node costs the steps since the stored checkpoint"
)


def storage(facts: JobFacts) -> Verdict:
    """Judge by what the job knew to be stored at each of its checkpoints."""
    events = [event for event in facts.log.events["checkpoint"] if "stored_step" in event]
    if not events:
        return Verdict("storage", "unknown", _QUESTION, "no checkpoint says what was stored")
    newest = events[-1]
    lags = [lag for number in range(len(events)) if (lag := _lag(events[: number + 1])) is not None]
    worst = max(lags, key=lambda lag: lag.seconds, default=None)
    if worst is None or not worst.is_too_long:
        return Verdict("storage", "good", _QUESTION, f"yes: {_stored(newest)}")
    return Verdict("storage", "bad", _QUESTION, worst.describe(), (_stored(newest),), _FIX)


def _lag(events: list[Event]) -> StorageLag | None:
    """Return how far storage was behind at the last of ``events``."""
    last = events[-1]
    saved = [(float(event["time"]), int(event["step"])) for event in events]
    return storage_lag(saved, last["stored_step"], float(last["time"]))


def _stored(event: Event) -> str:
    stored = event["stored_step"]
    held = "none was known to be stored" if stored is None else f"step {stored:,} was stored"
    return f"when step {event['step']:,} was saved, {held}"
