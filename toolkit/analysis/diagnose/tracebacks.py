"""Finds the last lines of Python tracebacks among the interleaved lines of many processes.

The line that opens a traceback also shows the prefix which a launcher, a logger or a log viewer
puts before every line: whatever stands before it. The pattern of that prefix is learned, unless the
next lines of the traceback come without it, as after a progress bar.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from sm_train.toolkit.analysis.diagnose.log_lines import (
    LogLine,
    Prefixes,
    Source,
    parse_line,
    prefix_pattern,
)

BEGIN = "Traceback (most recent call last)"
CHAINED = (
    "During handling of the above exception",
    "The above exception was the direct cause",
    # A DataLoader re-raises the error of its worker with the worker's traceback in the message.
    "Original Traceback (most recent call last)",
    # torch.multiprocessing.spawn re-raises the error of its process in the same way.
    "terminated with the following error",
)
"""Lines between a chained exception and the one that replaces it."""
IGNORED = ("Exception ignored in", "- Logging error ---", "Error in atexit._run_exitfuncs")
"""Lines before a traceback that does not end its process."""
_THREAD = "Exception in thread "
_BACKGROUND_LIBRARIES = (
    *("wandb/", "mlflow/", "comet_ml/", "neptune/", "clearml/", "swanlab/", "aim/"),
    *("tqdm/", "tensorboard/", "tensorboardX/", "sentry_sdk/", "prometheus_client/"),
)
"""Modules whose threads report on a training: it continues without them."""

# "  File "train.py", line 3", source lines, rich's box "│ /opt/ml/code/train.py:88", "    ^^^^^^"
_FRAME = re.compile(r"^(?:\s|$|[│|+❱╭╰])|^[\^~ ]+$")
# 'File "/opt/ml/code/train.py", line 88, in main' without indentation: SageMaker's launchers strip
# every line.
_STRIPPED_FRAME = re.compile(r'^File "[^"]+", line \d+')
# "torch.OutOfMemoryError: CUDA out of memory", "KeyError: 'x'", "_queue.Empty", "socket.error:"
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|\w*error|timeout)(?:: |:?$)")
# 'File "/opt/ml/code/train.py", line 88, in main', rich's "│ /opt/ml/code/train.py:88 in main"
_FRAME_FILE = re.compile(r'^\s*(?:File "([^"]+)", line \d|│ (\S+):\d+ in\b)')
_LIBRARY = re.compile(
    r"^.*[/\\](?:site|dist)-packages[/\\](.+?)(?:\.py)?$"
    r"|^.*[/\\]lib[/\\]python\d[\d.]*[/\\](.+?)(?:\.py)?$|^<(frozen \S+)>"
    # Cython: "pyarrow/error.pxi"
    r"|^([a-z_]\w*/\S+?)\.(?:pyx|pxi)$"
)
# "    return TCPStore(", "dist.init_process_group(backend='nccl')", '…", line 190, in …_handler'
_JOIN = re.compile(
    r"\b(?:init_process_group|TCPStore)\(|\bin (?:init_process_group|_\w*rendezvous)"
)
_JOINED = "torch/distributed/rendezvous"
# A started process reads its work: when its parent fails meanwhile, the pipe ends early.
_FROM_PARENT = re.compile(r"\bpickle\.load\(from_parent\)")
_CUT_SHORT = re.compile(r"^EOFError\b|pickle data was truncated")
# The first frame of a traceback, with or without indentation, or of a rich one.
_FRAME_START = re.compile(r'^\s*(?:File "|│)')
# "Original Traceback", "  + Exception Group Traceback", "Scheduler hit an exception: Traceback",
# "  0% 0/3000 [00:00<?, ?it/s]Traceback"
# "RuntimeError: Traceback": an exception whose message is the traceback of another process
_NO_PREFIX = re.compile(r"(?:Original|Group) $|it/s[^\]]*\]\s*$|(?:Error|Exception): ?$")
# stern: "train-worker-1 pytorch Traceback (most recent call last):"
_POD = r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*-[a-z0-9]*\d[a-z0-9]*(?:-[a-z0-9]+)*"
_POD_AND_CONTAINER = re.compile(rf"{_POD} ([a-z][a-z0-9-]*) ")
_HEAD_BYTES = 1 << 14
_HEAD_LINES = 50
_MIN_HEAD_LINES = 3
_SAMPLE_BYTES = 1 << 18
# "2026-11-21 10:00:00 | INFO     | __main__:train:88 - ", "[2026-11-21 10:00:00] [INFO] "; numbers
# are replaced by 0.
_EARLY_LEVEL = re.compile(r".{0,120}?\b(?:DEBUG|INFO|WARNING)\b")
_COMMON_LEVEL = re.compile(r".{0,120}?\b(?:DEBUG|INFO|WARNING)\b(?:.*[-:|\]] |\W* )")
# The indentation of a code block, "| " of a table, "> " of a quotation
_COMMON_MARK = re.compile(r"[\s|>#*-]*\s")
_MAX_PREFIX = 200
_MAX_PREFIXES = 64
_MAX_LINES = 2000
"""A traceback that has not ended after this many lines is taken as truncated."""
_MAX_SOURCE_LINES = 8
"""Lines of source that may follow a frame without indentation."""
_MAX_LINES_BETWEEN = 64
"""Other lines between a traceback's last frame and its exception."""
_NAMED_ERROR = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*"
    r"(?:[A-Z]\w*(?:Error|Exception|Interrupt|Timeout|Empty|Failed)|Exception)(?:: |$)"
)
_NUMBER = re.compile(r"\d+")

_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_ESCAPED_LINE_END = re.compile(r"\\+n")

TracebackPart = Literal["exception", "harmless", "frame", "other"]
"""The last line of a traceback (``harmless``: it does not end its process), another line of it, or
any other line."""


@dataclass
class _Open:
    """A traceback that has not ended: ``depth`` counts nested ones.

    ``lines_since_frame`` counts the source's lines after the last frame; ``stripped`` means that
    its frames have no indentation.
    """

    first_line: int
    depth: int
    harmless: bool = False
    lines_since_frame: int = _MAX_SOURCE_LINES
    stripped: bool = False
    file: str = ""
    """The source file of the last frame."""
    joins: bool = False
    """Whether a frame joins a process group or its store."""
    from_parent: bool = False
    """Whether a frame reads what the parent process passes on."""
    in_thread: bool = False
    """Whether it ends a thread, not a process."""
    truncated: bool = False
    """Whether its first lines are missing: then a line may look like an exception by chance."""


@dataclass
class Tracebacks:
    """The open tracebacks by source, a node and rank; processes may share a source."""

    open: dict[Source, _Open] = field(default_factory=dict)
    _ignored_at: dict[Source, int] = field(default_factory=dict)
    """The line number at which a source announced that its next traceback is ignored."""
    _thread_at: dict[Source, int] = field(default_factory=dict)
    """The line number at which a source announced the traceback of a thread."""
    prefixes: Prefixes = field(default_factory=Prefixes)
    """The learned prefixes, for parsing further lines."""
    library: str | None = None
    """The module that raised the exception of the last traceback that ended, such as
    ``torch/nn/functional``; None if it is not in an installed library."""
    _assumed: dict[Source, tuple[Source, re.Pattern[str]]] = field(default_factory=dict)
    """A source without a learned prefix → the source and the pattern assumed for its traceback."""

    def learn_prefix(self, line: LogLine, start: str = BEGIN) -> bool:
        """Learn the prefix before ``start`` of a traceback; return False if there is none."""
        before = line.text[: max(0, line.text.find(start))]
        # A rich traceback's box, the word of a nested or grouped one, and text that ends a sentence
        # are no prefix.
        before = before.partition("╭")[0]
        if not before.strip() or _NO_PREFIX.search(before) or len(before) > _MAX_PREFIX:
            return False
        pattern = prefix_pattern(before)
        if pattern in self.prefixes.further or len(self.prefixes.further) == _MAX_PREFIXES:
            return False
        self.prefixes.further.append(pattern)
        return True

    def learn_common_prefix(self, block: bytes) -> None:
        """Learn a prefix that all lines have: indentation, a level, or stern's "POD CONTAINER "."""
        sample = block[:_SAMPLE_BYTES].decode("utf-8", "replace").split("\n")
        if prefix := _common_level_prefix(sample) or _common_mark(sample):
            self.prefixes.common = prefix_pattern(prefix)
        lines = block[:_HEAD_BYTES].decode("utf-8", "replace").splitlines()[:_HEAD_LINES]
        matches = [_POD_AND_CONTAINER.match(line) for line in lines if line.strip()]
        containers = {match[1] if match else None for match in matches}
        if len(matches) >= _MIN_HEAD_LINES and len(containers) == 1 and None not in containers:
            [container] = containers
            self.prefixes.further.append(re.compile(rf"{_POD} {re.escape(str(container))} "))

    def open_truncated(self, frame: LogLine) -> None:
        """Open a traceback that starts with ``frame``: a log's first lines are missing."""
        self.open[frame.source] = _Open(1, 1, truncated=True)

    def assume(self, bare: LogLine, prefixed: LogLine) -> None:
        """Note that the traceback of ``bare``'s source may continue without the learned prefix."""
        self._assumed[bare.source] = prefixed.source, self.prefixes.further[-1]

    def feed(self, line: LogLine, number: int) -> TracebackPart:
        """Classify the next line of the log, ``number``."""
        if BEGIN in line.text:
            depth = self.open[line.source].depth if line.source in self.open else 0
            harmless = number - self._ignored_at.pop(line.source, -1000) <= 2
            in_thread = number - self._thread_at.pop(line.source, -1000) <= 2
            self.open[line.source] = _Open(number, depth + 1, harmless, in_thread=in_thread)
            return "frame"
        if any(text in line.text for text in IGNORED):
            self._ignored_at[line.source] = number
        elif line.text.startswith(_THREAD):
            self._thread_at[line.source] = number
        for source in [
            key
            for key, traceback in self.open.items()
            if number - traceback.first_line > _MAX_LINES
        ]:
            del self.open[source]
        if line.source in self.open:
            return self._inside(line.source, line)
        similar = self._without_prefix(line) or self._similar(line)
        return "other" if similar is None else self._inside(similar, line)

    def _similar(self, line: LogLine) -> Source | None:
        """Return the one open traceback whose prefix differs only in numbers."""
        is_part = _FRAME.match(line.text) or _NAMED_ERROR.match(line.text)
        if not is_part or not (line.label or line.task is not None):
            return None
        loose = _loose(line.source)
        similar = [source for source in self.open if _loose(source) == loose]
        return similar[0] if len(similar) == 1 else None

    def _without_prefix(self, line: LogLine) -> Source | None:
        """Return the source whose traceback ``line`` continues without the assumed prefix."""
        if line.source not in self._assumed or not _FRAME_START.match(line.text):
            return None
        source, pattern = self._assumed.pop(line.source)
        if source not in self.open:
            return None
        if pattern in self.prefixes.further:
            self.prefixes.further.remove(pattern)
        self.open[line.source] = self.open.pop(source)
        return line.source

    def _inside(self, source: Source, line: LogLine) -> TracebackPart:
        state = self.open[source]
        if named := _FRAME_FILE.match(line.text):
            state.file = named[1] or named[2]
        state.joins = state.joins or _JOIN.search(line.text) is not None
        state.from_parent = state.from_parent or _FROM_PARENT.search(line.text) is not None
        if state.truncated and _NAMED_ERROR.match(line.text.lstrip()):
            self._close(source)
            return "exception"
        if _STRIPPED_FRAME.match(line.text):
            state.stripped = True
        elif _FRAME.match(line.text) is None:
            # With indentation, the exception follows the last frame directly; without, source lines
            # look like any other line, so a few of them are accepted.
            # Lines of other processes may be between.
            may_belong = state.lines_since_frame < (_MAX_SOURCE_LINES if state.stripped else 1)
            state.lines_since_frame += 1
            if not may_belong and not (
                _NAMED_ERROR.match(line.text) and state.lines_since_frame < _MAX_LINES_BETWEEN
            ):
                return "other"
            if state.truncated or _EXCEPTION.match(line.text) is None:
                return "frame" if state.stripped else "other"
            self._close(source)
            # A started process has no other frame than its command until it has read its work.
            is_starting = state.from_parent or state.file == "<string>"
            abandoned = is_starting and _CUT_SHORT.search(line.text) is not None
            reports = state.in_thread and (self.library or "").startswith(_BACKGROUND_LIBRARIES)
            return "harmless" if state.harmless or abandoned or reports else "exception"
        state.lines_since_frame = 0
        return "frame"

    def _close(self, source: Source) -> None:
        state = self.open[source]
        module = _LIBRARY.search(state.file)
        named = module and next(group for group in module.groups() if group)
        self.library = named.replace("\\", "/") if named else None
        if state.joins and "torch/distributed/" in state.file:
            self.library = _JOINED
        state.depth -= 1
        state.lines_since_frame = _MAX_SOURCE_LINES
        if not state.depth:
            del self.open[source]


def _common_mark(sample: list[str]) -> str:
    """Return the indentation or quotation mark with which all lines start, "" if there is none."""
    lines = [line for line in sample[:-1] if line.strip()]
    if len(lines) < _MIN_HEAD_LINES:
        return ""
    mark = _COMMON_MARK.match(_common_start(min(lines), max(lines)))
    return mark[0] if mark else ""


def _common_level_prefix(sample: list[str]) -> str:
    """Return the prefix that all lines have if it contains a level, "" otherwise.

    A program that logs all output of another one gives it one level, which says nothing about a
    single line.
    """
    lines = [line for line in sample if line]
    if len(lines) < _MIN_HEAD_LINES or not all(map(_EARLY_LEVEL.match, lines[:-1])):
        return ""
    texts = [parse_line(line, 0.0).text[:_MAX_PREFIX] for line in lines[:-1]]
    shapes = [_NUMBER.sub("0", text) for text in texts]
    level = _COMMON_LEVEL.match(_common_start(min(shapes), max(shapes)))
    if level is None:
        return ""
    starts = (texts[0][:end] for end in range(len(texts[0]) + 1))
    return next(start for start in starts if _NUMBER.sub("0", start) == level[0])


def _common_start(line: str, other: str) -> str:
    """Return the characters with which both texts start."""
    both = zip(line, other, strict=False)
    return "".join(left for left, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))


def quoted_traceback(line: str) -> list[str]:
    r"""Return the lines of a traceback that one line quotes: ``{"message": "Traceback …\\n …"}``.

    [] if there is none. The JSON may itself be quoted in JSON.
    """
    if "\\n" not in line[line.index(BEGIN) :]:
        return []
    for literal in _JSON_STRING.finditer(line):
        if BEGIN not in literal[0]:
            continue
        try:
            text: str = msgspec.json.decode(literal[0])
        except ValueError:
            break
        after = text[text.index(BEGIN) :]
        return after.split("\n") if "\n" in after else quoted_traceback(text)
    # Not JSON, as a Python string in a message.
    return [text.rstrip("'\" ") for text in _ESCAPED_LINE_END.split(line[line.index(BEGIN) :])]


def _loose(source: Source) -> Source:
    """Return ``source`` without its task and the numbers of its label."""
    node, rank, host, local_rank, _, label = source
    return node, rank, host, local_rank, None, _NUMBER.sub("", label)
