"""Turns exports of logs, in CSV and JSON, into plain lines with time, stream and message.

Read: CloudWatch's console (CSV) and `get-log-events`, `filter-log-events` (JSON); Logs Insights
(CSV and JSON of the console, `get-query-results`), also newest first; messages that `aws logs
--output text` separates by tabs; JSON lines of Docker, journald, Fluent Bit and structured loggers.
Anything else is returned unchanged.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import cache
from itertools import chain
from typing import Any

import msgspec
from sm_train.toolkit.base.errors import UserError

Row = dict[str, Any]

_HEAD_BYTES = 1 << 16
_MESSAGES = ("@message", "message", "MESSAGE", "log", "msg", "textPayload")
_TIMES = ("@timestamp", "timestamp", "time", "__REALTIME_TIMESTAMP", "ts", "asctime", "date")
_STREAMS = ("@logStream", "logStreamName", "log_stream", "logStream")
_HOSTS = ("_HOSTNAME", "pod_name", "pod", "hostname", "host")
_EVENT = "event"
"""The message of structlog, whose rows have a level; elsewhere, the kind of an event."""
_ADDED = ("exc_info", "exception", "stack_trace", "traceback")
"""Fields of structured logs with a traceback, which follows the message."""
_LISTS = ("events", "results")
"""The lists of rows in a JSON document."""
_CSV_HEADER = re.compile(rb'(?:\xef\xbb\xbf)?"?@?\w+"?(?:,"?[@\w.]+"?)+\r?\n')
_CARRIAGE_RETURN = re.compile(r"\r(?!\n)")
_DOCUMENT = re.compile(
    rb'[\[{][\[{\s]*"(?:events|results|@timestamp|@message|@ptr|field|timestamp)"'
)
# `aws logs get-log-events --query events[].message --output text`: one line for all messages.
_TABBED_TRACEBACK = re.compile(rb"[^\n]*\tTraceback \(most recent call last\):\t")
# An object without others inside.
_FLAT_OBJECT = rb'\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}'
_MAX_FIELD = 1 << 24


def plain_lines(blocks: Iterable[bytes]) -> Iterable[bytes]:
    """Return ``blocks`` of an export as blocks of plain lines, any other log unchanged."""
    remaining = iter(blocks)
    first = b""
    while len(first) < _HEAD_BYTES and (block := next(remaining, b"")):
        first += block
    head = first.lstrip(b"\xef\xbb\xbf \t\r\n")[:_HEAD_BYTES]
    read = _reader(head)
    everything = chain([first], remaining) if first else []
    return everything if read is None else _formatted(_oldest_first(read(everything)))


def _reader(head: bytes) -> Callable[[Iterable[bytes]], Iterator[Row]] | None:
    """Return the function that reads the rows of the export which starts with ``head``."""
    if header := _CSV_HEADER.match(head):
        names = next(csv.reader([header[0].decode("utf-8", "replace").strip()]))
        return _csv_rows if set(names) & set(_MESSAGES) else None
    if _TABBED_TRACEBACK.match(head):
        return _tabbed_messages
    if head[:1] not in (b"{", b"["):
        return None
    row = _decoded(head.partition(b"\n")[0])
    if isinstance(row, dict) and isinstance(_message(row), str):
        return _json_lines
    if isinstance(row, dict) and not any(isinstance(row.get(key), list) for key in _LISTS):
        return None
    return _document_rows if _DOCUMENT.match(head) else None


def _message(row: Row) -> Any:
    message = _first(row, _MESSAGES)
    return row.get(_EVENT) if message is None and "level" in row else message


def _decoded(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None


# ------------------------------------------------------------------ rows


def _csv_rows(blocks: Iterable[bytes]) -> Iterator[Row]:
    csv.field_size_limit(_MAX_FIELD)
    # A progress bar's carriage returns are no line ends; CloudWatch writes them as "#015", too.
    lines = (
        _CARRIAGE_RETURN.sub("#015", line.decode("utf-8", "replace").replace("\0", ""))
        for line in _lines(blocks)
    )
    try:
        for row in csv.DictReader((line.lstrip("\ufeff") for line in lines), restval=""):
            yield {key or "": value for key, value in row.items()}
    except csv.Error as error:
        raise UserError(f"the CSV export cannot be read: {error}; export the log again") from None


def _tabbed_messages(blocks: Iterable[bytes]) -> Iterator[Row]:
    for line in _lines(blocks):
        for message in line.decode("utf-8", "replace").rstrip("\r\n").split("\t"):
            yield {"message": message}


def _json_lines(blocks: Iterable[bytes]) -> Iterator[Row]:
    """Yield each line's object; a line that is none is a message."""
    for line in _lines(blocks):
        row = _decoded(line)
        if isinstance(row, dict):
            nested = row.get("kubernetes")
            yield row | nested if isinstance(nested, dict) else row
        else:
            yield {"message": line.decode("utf-8", "replace").rstrip("\r\n")}


def _document_rows(blocks: Iterable[bytes]) -> Iterator[Row]:
    """Yield the objects of a JSON document that hold a message, without loading all of it."""
    fields: Row = {}
    for found in _flat_objects(blocks):
        if "field" not in found:
            yield found
            continue
        # `get-query-results`: one object per field; a row ends where a field occurs again.
        if found["field"] in fields:
            yield fields
            fields = {}
        fields[found["field"]] = found.get("value")
    if fields:
        yield fields


def _flat_objects(blocks: Iterable[bytes]) -> Iterator[Row]:
    rest = b""
    for block in blocks:
        rest += block
        end = 0
        for match in _flat_object_pattern().finditer(rest):
            end = match.end()
            row = _decoded(match.group())
            if isinstance(row, dict):
                yield row
        rest = rest[end:]


@cache
def _flat_object_pattern() -> Any:
    import re2

    return re2.compile(b"(?s)" + _FLAT_OBJECT)


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines with their ends."""
    rest = b""
    for block in blocks:
        *whole, rest = (rest + block).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest


def _oldest_first(rows: Iterator[Row]) -> Iterator[Row]:
    """Reverse ``rows`` if they are newest first, as Logs Insights sorts them."""
    waiting: list[Row] = []
    for row in rows:
        waiting.append(row)
        first, last = _time(waiting[0]), _time(row)
        if first and last and first != last:
            if first > last:
                yield from reversed([*waiting, *rows])
                return
            break
    yield from chain(waiting, rows)


# ------------------------------------------------------------------ lines


def _formatted(rows: Iterator[Row]) -> Iterator[bytes]:
    for row in rows:
        message = _message(row)
        if not isinstance(message, str):
            continue
        stream, host = _first(row, _STREAMS), _first(row, _HOSTS)
        prefix = f"{time} " if (time := _time(row)) else ""
        if isinstance(stream, str):
            prefix += f"{stream} "
        elif isinstance(host, str):
            prefix += f"{host} [stderr] "
        texts = [message, *(row[key] for key in _ADDED if isinstance(row.get(key), str))]
        lines = [line for text in texts for line in text.rstrip("\r\n").split("\n")]
        yield "".join(f"{prefix}{line}\n" for line in lines).encode("utf-8", "replace")


def _first(row: Row, keys: Iterable[str]) -> Any:
    return next((row[key] for key in keys if row.get(key) is not None), None)


def _time(row: Row) -> str:
    """Return a row's time in ISO 8601, "" if it has none; numbers are in s, ms, µs or ns."""
    value = _first(row, _TIMES)
    if isinstance(value, str) and not value.replace(".", "", 1).isdigit():
        return value.strip()
    try:
        seconds = float(value or 0)
    except (TypeError, ValueError):
        return ""
    while seconds > 1e11:
        seconds /= 1000
    if seconds <= 0:
        return ""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
