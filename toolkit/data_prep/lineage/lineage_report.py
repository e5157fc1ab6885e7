"""Describes where a sample is and which runs have seen it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

from sm_train.toolkit.data_prep.lineage.follow import SampleStory
from sm_train.toolkit.data_prep.lineage.recorded_runs import RecordedStage
from sm_train.toolkit.data_prep.lineage.seen_steps import SeenSteps
from sm_train.toolkit.terminal.formatting import plural

_MAX_NAMED = 8


class ShardDocument(TypedDict):
    """A shard that has the sample at ``number``, or had it before it was ``replaced``."""

    shard: str
    number: int
    replaced: bool


class SeenDocument(TypedDict):
    """A stage that has trained on the data set.

    ``steps`` are those that trained on the sample if they are ``exact``; else the first and the
    last in which it may have been read, for the ``reason``. They are known until the step
    ``until``. ``checkpoints`` are the steps of the checkpoints that have seen it, and ``final`` is
    whether the final model has; both are upper bounds if the steps are. ``components`` are the
    identities of the frozen components that the stage was trained with, as far as they are known.
    """

    run: str
    stage: str
    location: str
    exact: bool
    reason: str | None
    steps: list[int]
    until: int
    checkpoints: list[int]
    final: bool
    components: dict[str, str]


class LineageDocument(TypedDict):
    """A sample in the output of ``lineage --json``."""

    key: str
    source: str | None
    removed: str | None
    shards: list[ShardDocument]
    seen: list[SeenDocument]


def lineage_document(story: SampleStory) -> LineageDocument:
    """Return what ``lineage --json`` prints of a sample."""
    return {
        "key": story.key,
        "source": story.source,
        "removed": story.removed,
        "shards": [
            {"shard": shard, "number": number, "replaced": replaced}
            for shard, number, replaced in story.shards
        ],
        "seen": [_seen_document(stage, seen) for stage, seen in story.seen],
    }


def _seen_document(stage: RecordedStage, seen: SeenSteps) -> SeenDocument:
    return {
        "run": stage.run,
        "stage": stage.stage,
        "location": stage.location,
        "exact": seen.exact,
        "reason": seen.reason,
        "steps": list(seen.steps),
        "until": seen.until,
        "checkpoints": _checkpoints(stage, seen),
        "final": stage.final and bool(seen.steps),
        "components": dict(stage.components),
    }


def _checkpoints(stage: RecordedStage, seen: SeenSteps) -> list[int]:
    """Return the checkpoints that exist and were written after the first of the steps."""
    return [step for step in stage.checkpoints if seen.steps and step >= seen.steps[0]]


def lineage_lines(story: SampleStory, places: int) -> Iterator[str]:
    """Yield the lines on a sample; ``places`` is the number of places with runs."""
    name = story.key if story.source is None else f"{story.key} ({story.source})"
    yield name if story.removed is None else f"{name}: removed {story.removed}"
    for shard, number, replaced in story.shards:
        yield f"  {'was in' if replaced else 'in'} {shard}, sample {number}"
    for stage, seen in story.seen:
        yield f"  {stage.run} {stage.stage}: {_describe(stage, seen)}"
        if stage.components:
            named = ", ".join(f"{name} {each}" for name, each in sorted(stage.components.items()))
            yield f"    trained with the frozen components {named} (sampled)"
    if places and not story.seen:
        yield "  no recorded run has trained on these shards"


def _describe(stage: RecordedStage, seen: SeenSteps) -> str:
    until = f"until step {seen.until:,}"
    if not seen.steps:
        return f"did not see it {until}"
    stored = _checkpoints(stage, seen)
    models = [f"{plural(len(stored), 'checkpoint')} from step {stored[0]:,} on"] if stored else []
    models += ["the final model"] if stage.final else []
    after = f"; in {' and '.join(models)}" if models else "; no checkpoint with it is left"
    if not seen.exact:
        return (
            f"may have seen it in steps {seen.steps[0]:,} to {seen.steps[-1]:,} ({seen.reason})"
            f"{after}"
        )
    named = ", ".join(f"{step:,}" for step in seen.steps[:_MAX_NAMED])
    more = ", …" if len(seen.steps) > _MAX_NAMED else ""
    noun = "step" if len(seen.steps) == 1 else "steps"
    return f"saw it in {noun} {named}{more} ({plural(len(seen.steps), 'time')} {until}){after}"
