"""Writes a report on data sets in the order of the European Commission's template.

The order is that of the "Template for the Public Summary of Training Content for general-purpose AI
models required by Article 53 (1)(d) of Regulation (EU) 2024/1689 (AI Act)", published on 24 July
2025 (https://digital-strategy.ec.europa.eu, communication C(2025) 8311 of 5 December 2025). The
report states what the index, the list of removed samples and the records of runs say, and leaves
everything else to the provider.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sm_train.entrypoints.lineage.data_facts import DataFacts, data_facts, fact_rows
from sm_train.entrypoints.sample_metadata.row_filter import ConditionError
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.lineage.follow import normal_address
from sm_train.toolkit.data_prep.lineage.recorded_runs import RecordedStage
from sm_train.toolkit.data_prep.packing.shard_set import ShardSet
from sm_train.toolkit.terminal.formatting import plural

TEMPLATE = (
    "Template for the Public Summary of Training Content for general-purpose AI models required by "
    "Article 53 (1)(d) of Regulation (EU) 2024/1689 (AI Act)"
)
PUBLISHED = "European Commission, 24 July 2025"

_STATE = "*To be stated by the provider.*"


@dataclass(frozen=True)
class ReportedSet:
    """A data set of a report: its address, its facts, and the stages that trained on it."""

    address: str
    facts: DataFacts
    stages: tuple[RecordedStage, ...]


def report_on(
    shards: ShardSet,
    columns: Sequence[str] | None,
    where: str | None,
    stages: Sequence[RecordedStage],
) -> ReportedSet:
    """Collect what is known of a data set.

    Raises:
        UserError: it has no index, a column does not exist, or the condition is invalid.
    """
    with shards.open_index() as (index, _):
        for name in columns or ():
            if name not in index.header.columns:
                known = ", ".join(index.header.columns) or "none"
                raise UserError(f"--column: {shards.address} has no column {name}; it has {known}")
        try:
            facts = data_facts(index, shards.read_list(), columns, where)
        except ConditionError as error:
            raise UserError(f"--where: {str(error).partition(': ')[2]}") from None
    location = normal_address(shards.storage.address(shards.index_file))
    used = tuple(
        stage
        for stage in stages
        if any(
            channel.index is not None and normal_address(channel.index) == location
            for attempt in stage.attempts
            for channel in attempt.record.channels
        )
    )
    return ReportedSet(shards.address, facts, used)


def report_document(sets: Sequence[ReportedSet]) -> dict[str, Any]:
    """Return what ``data-report --json`` prints."""
    return {
        "template": TEMPLATE,
        "published": PUBLISHED,
        "sets": [
            {
                "address": reported.address,
                **asdict(reported.facts),
                "stages": [
                    {"run": stage.run, "stage": stage.stage, "location": stage.location}
                    for stage in reported.stages
                ],
            }
            for reported in sets
        ],
    }


def report_markdown(sets: Sequence[ReportedSet]) -> str:
    """Return the report as Markdown."""
    return "\n".join(_lines(sets)) + "\n"


def _lines(sets: Sequence[ReportedSet]) -> Iterator[str]:
    images = sum(reported.facts.samples for reported in sets)
    yield "# Training content"
    yield ""
    yield (
        f"In the order of: {TEMPLATE} ({PUBLISHED}). sm-train wrote the figures. It does not claim "
        "that this report complies with the template or the regulation."
    )
    yield ""
    yield "## 1. General information"
    yield from _section("1.1. Provider identification", _STATE)
    yield from _section("1.2. Model identification", *_models(sets))
    yield from _section(
        "1.3. Modalities, overall training data size and other characteristics",
        f"Images with captions: {images:,} in {plural(len(sets), 'data set')}, {_bytes(sets)}.",
        "Latest date of acquisition, languages and other characteristics: to be stated by the "
        "provider, unless a column of a data set below has them.",
    )
    yield ""
    yield "## 2. List of data sources"
    yield from _section(
        "2.1. Publicly available datasets",
        "sm-train does not know which of the data sets below are public. " + _STATE,
    )
    yield ""
    yield "### 2.2. Private non-publicly available datasets obtained from third parties"
    for reported in sets:
        yield ""
        yield f"#### {reported.address}"
        yield ""
        yield "| | |"
        yield "|---|---|"
        yield from (f"| {name} | {text} |" for name, text in fact_rows(reported.facts))
    yield from _section("2.3. Data crawled and scraped from online sources", _STATE)
    yield from _section("2.4. User data", _STATE)
    yield from _section("2.5. Synthetic data", *map(_synthetic, sets), _STATE)
    yield from _section("2.6. Other sources of data", _STATE)
    yield ""
    yield "## 3. Data processing aspects"
    yield from _section(
        "3.1. Respect of reservation of rights from text and data mining exception or limitation",
        *(_removals(reported) for reported in sets),
        _STATE,
    )
    yield from _section("3.2. Removal of illegal content", _STATE)
    yield from _section("3.3. Other information", *(_processing(reported) for reported in sets))


def _section(title: str, *paragraphs: str) -> Iterator[str]:
    yield ""
    yield f"### {title}"
    for paragraph in paragraphs:
        yield ""
        yield paragraph


def _models(sets: Sequence[ReportedSet]) -> Iterator[str]:
    stages = {(stage.run, stage.stage): stage for reported in sets for stage in reported.stages}
    if not stages:
        yield f"No record of a run that trained on these data was named or found. {_STATE}"
        return
    named = ", ".join(f"`{run}` (`{stage}`)" for run, stage in stages)
    yield f"Stages that have trained on these data, by the records of their jobs: {named}."


def _bytes(sets: Sequence[ReportedSet]) -> str:
    return f"{sum(reported.facts.bytes for reported in sets) / 1e9:,.3f} GB"


def _removals(reported: ReportedSet) -> str:
    removed = sum(reported.facts.removed.values())
    return (
        f"{reported.address}: {plural(removed, 'image')} removed from the data set after packing; "
        "`sm-train lineage` names the steps and checkpoints that had seen one."
    )


def _synthetic(reported: ReportedSet) -> str:
    made = reported.facts.made_captions
    if not made and reported.facts.streamed:
        return (
            f"{reported.address}: captions of images that arrived are those next to them; whether "
            "a program made them is not known."
        )
    if not made:
        return (
            f"{reported.address}: no captions of `sm-train enrich`; where others come from is not "
            "known."
        )
    columns = ", ".join(f"`{column}` (`{function}`)" for column, function in made.items())
    return (
        f"{reported.address}: a program has made the captions of {columns}; an image has another "
        "one if a column before it does."
    )


def _processing(reported: ReportedSet) -> str:
    rejected = reported.facts.rejected
    if not rejected:
        return f"{reported.address}: no input was left out when the images were packed."
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in rejected.items())
    return f"{reported.address}: inputs that were not packed, by reason: {reasons}."
