"""Draws faults with a fixed seed: python -m tests.mutations.draw > tests/mutations/mutations.json.

Each fault changes one place of the product in a way that is wrong and still runs: two calls in the
other order, a flush or a condition that is missing, a number twice as large, an exception that is
swallowed or no longer expected, or a retry that does not happen. ``tests.mutations.run`` puts them
in, one after the other, and says which ones no test notices.
"""

import ast
import itertools
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEED, COUNT = 53, 60

# The folders and files of each subject.
SUBJECTS = {
    "object store": ("entrypoints/storage",),
    "leases": ("entrypoints/storage/lease.py", "entrypoints/storage/lease_files.py"),
    "checkpoints": (
        "entrypoints/checkpoints",
        "entrypoints/job_interface/checkpoint_layout.py",
        "entrypoints/records",
    ),
    "removal": (
        "entrypoints/shards/removal_list.py",
        "entrypoints/shards/removed_samples.py",
        "toolkit/data_prep/removal",
    ),
    "costing": ("cost", "toolkit/planning"),
    "remediation": ("toolkit/runs", "toolkit/runs/watch/controller.py"),
    "watching": ("toolkit/runs/watch", "entrypoints/clusters"),
    "heartbeats": ("entrypoints/monitoring", "entrypoints/monitoring/watchdog"),
}


DECIDING = {
    "costing": ("cost",),
    "watching": ("entrypoints/clusters",),
    "heartbeats": ("entrypoints/monitoring", "entrypoints/monitoring/watchdog"),
    "jobs": (
        "toolkit/records/stage_state.py",
        "toolkit/records/launch_record.py",
        "toolkit/runs/remediation.py",
        "toolkit/runs/run_state.py",
    ),
}
"""Where the constants are that decide dollars, a stop or an alarm."""

UNDECIDING = re.compile(
    r"_?(MILLION|PARTS|MANY|DRAWS|VERSION|FORMAT_VERSION|RECORD_VERSION|GIB|GB|READS|NAMED|MOST"
    r"|VARIATIONS|SUM|LARGEST_BATCH|READ_BYTES|DRAIN_SECONDS|INNERMOST_FRAMES|MAX_WORKERS"
    r"|FINEST_BITS|WORD_BYTES|BEAT|BEAT_FIELDS|PR_SET_PTRACER|MAX_DATAGRAM_BYTES|MAX_LISTED"
    r"|MAX_TEXT_LENGTH|SETTLE_POLL_SECONDS|LONGEST_SECONDS|RECENT_EVENTS|BUNDLE|HOPELESS"
    r"|NETWORK_SPEEDS|SEGMENT_BYTES|MAX_WAITING|HOURS_PER_DAY|PUBLISHED_POINTS|FREE|DIGITS)"
)
"""Constants in the same modules that shape texts, formats, buffers or the precision of draws."""


@dataclass(frozen=True)
class Mutation:
    """``before`` stands exactly once in the file."""

    subject: str
    kind: str
    path: str
    before: str
    after: str


def drawn() -> list[Mutation]:
    """As many faults of each subject, of kinds in turn, never two of one function."""
    chance = random.Random(SEED)
    found: list[Mutation] = []
    for number, subject in enumerate(SUBJECTS):
        wanted = COUNT // len(SUBJECTS) + (number < COUNT % len(SUBJECTS))
        places = [place for path in _files(SUBJECTS[subject]) for place in _places(path)]
        drawn_before = {mutation.before for mutation in found}
        new = [place for place in places if place.mutation(subject).before not in drawn_before]
        found += _some(new, subject, wanted, chance)
    return found


def constants() -> list[Mutation]:
    """Every number of every constant that decides, twice as large."""
    found: list[Mutation] = []
    for subject, names in DECIDING.items():
        for path in _files(names):
            source = _Source(path)
            for node in source.tree.body:
                if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                    continue
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                name = re.split(r"\W", source.of(target).strip("("))[0]
                if UNDECIDING.fullmatch(name):
                    continue
                numbers = _doubled(source, "", "constant", ast.walk(node.value))
                found += [place.mutation(subject) for place in numbers]
    return found


def _files(names: Iterable[str]) -> list[Path]:
    files = set[Path]()
    for name in names:
        path = ROOT / name
        files |= {path} if path.is_file() else set(path.rglob("*.py"))
    return sorted(files)


def _some(
    places: list["_Place"], subject: str, wanted: int, chance: random.Random
) -> list[Mutation]:
    """One kind after the other, so that the rare kinds are drawn as often as the frequent ones."""
    chance.shuffle(places)
    kinds = sorted({place.kind for place in places})
    chance.shuffle(kinds)
    chosen: list[_Place] = []
    while len(chosen) < wanted:
        for kind in kinds:
            functions = {place.function for place in chosen}
            left = (place for place in places if place.kind == kind)
            chosen += [place for place in left if place.function not in functions][:1]
            if len(chosen) == wanted:
                break
    return [place.mutation(subject) for place in chosen]


@dataclass(frozen=True)
class _Place:
    """The text between two offsets of a file, and what replaces it."""

    path: Path
    function: str
    kind: str
    start: int
    end: int
    text: str

    def mutation(self, subject: str) -> Mutation:
        source = self.path.read_text()
        first, last = source.rfind("\n", 0, self.start) + 1, source.find("\n", self.end)
        while source.count(source[first:last]) > 1:  # whole lines, as many as make it unique
            first = source.rfind("\n", 0, first - 1) + 1
            last = source.find("\n", last + 1)
        after = source[first : self.start] + self.text + source[self.end : last]
        path = self.path.relative_to(ROOT).as_posix()
        return Mutation(subject, self.kind, path, source[first:last], after)


class _Source:
    """A file, with the offsets of its syntax tree's nodes."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text()
        self.tree = ast.parse(self.text)
        self._lines = [0]
        for line in self.text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt | ast.keyword)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._offset(node.lineno, node.col_offset),
            self._offset(node.end_lineno, node.end_col_offset),
        )

    def _offset(self, line: int, column: int) -> int:
        start = self._lines[line - 1]
        text = self.text[start : self._lines[line]]
        return start + len(text.encode()[:column].decode())

    def place(self, function: str, kind: str, node: ast.AST, text: str) -> _Place:
        return _Place(self.path, function, kind, *self.span(node), text)

    def of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]


def _places(path: Path) -> Iterator[_Place]:
    source = _Source(path)
    for name, scope in _scopes(source.tree):
        function = f"{path}:{name}"
        for node in _own_nodes(scope):
            yield from _orders(source, function, node)
            yield from _drops(source, function, node)
            yield from _numbers(source, function, node)
            yield from _caught(source, function, node)
            yield from _retries(source, function, node)


def _scopes(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    yield "", tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield f"{node.name}:{node.lineno}", node


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module, class or function without those of functions inside of it."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
            yield from _own_nodes(node)


def _called(node: ast.AST) -> str:
    """The name of what a statement calls, or an empty text."""
    call = node.value if isinstance(node, ast.Expr | ast.Assign | ast.Return) else node
    if not isinstance(call, ast.Call):
        return ""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else ""
    return function.id if isinstance(function, ast.Name) else name


_SILENT = ("debug", "info", "warning", "exception", "echo", "print", "log_line")


def _orders(source: _Source, function: str, node: ast.AST) -> Iterator[_Place]:
    """Two calls that follow each other, in the other order."""
    for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
        if not isinstance(body, list):
            continue
        for first, second in itertools.pairwise(body):
            names = (_called(first), _called(second))
            if not all(names) or set(names) & set(_SILENT) or names == ("append", "append"):
                continue
            if any(name.strip("_")[:1].isupper() for name in names):  # creates an object
                continue
            if isinstance(first, ast.Return) or _depends(first, second):
                continue
            (start, middle), (resume, end) = source.span(first), source.span(second)
            text = source.of(second) + source.text[middle:resume] + source.of(first)
            yield _Place(source.path, function, "order", start, end, text)


def _depends(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether one of two statements reads or writes a name that the other one writes."""
    if isinstance(first, ast.Assign) and isinstance(second, ast.Assign | ast.Return):
        return True  # neither is there for its effect alone
    named: list[dict[str, bool]] = []
    for statement in (first, second):
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        named.append({})
        for name in names:
            written = isinstance(name.ctx, ast.Store)
            named[-1][name.id] = named[-1].get(name.id, False) or written
    return any(named[0][name] or named[1][name] for name in named[0].keys() & named[1].keys())


_FLUSHES = ("fsync", "fsync_folder", "flush", "durable_replace", "sync_folder", "fdatasync")
_CONDITIONS = ("IfMatch", "IfNoneMatch", "ChecksumAlgorithm", "ExpectedBucketOwner", "Range")


def _drops(source: _Source, function: str, node: ast.AST) -> Iterator[_Place]:
    """A flush, a guard, one part of a condition, or a condition of a request that is missing."""
    if isinstance(node, ast.Expr) and _called(node) in _FLUSHES:
        yield source.place(function, "dropped", node, "pass")
    if isinstance(node, ast.keyword) and node.arg in _CONDITIONS:
        yield source.place(function, "dropped", node, "**{}")
    if isinstance(node, ast.BoolOp) and len(node.values) == 2:
        yield source.place(function, "dropped", node, f"({source.of(node.values[0])})")
        yield source.place(function, "dropped", node, f"({source.of(node.values[1])})")
    leaves = ast.Raise | ast.Return | ast.Continue | ast.Break
    if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], leaves):
        yield source.place(function, "dropped", node.test, "False")


def _numbers(source: _Source, function: str, node: ast.AST) -> Iterator[_Place]:
    """A limit or a unit, twice as large: constants of a module, defaults, factors."""
    values: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    if isinstance(node, ast.keyword) and node.arg != "indent":
        values = [node.value]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        values = [node.left, node.right]
    if isinstance(node, ast.Compare):
        values = node.comparators
    yield from _doubled(source, function, "twice", values)


def _doubled(
    source: _Source, function: str, kind: str, values: Iterable[ast.AST]
) -> Iterator[_Place]:
    for value in values:
        number = value.value if isinstance(value, ast.Constant) else None
        if isinstance(number, int | float) and number not in (0, 1):  # nor True and False
            yield source.place(function, kind, value, f"(2 * {source.of(value)})")


def _caught(source: _Source, function: str, node: ast.AST) -> Iterator[_Place]:
    """An exception that a handler swallows instead of raising it again, or does not expect."""
    if not isinstance(node, ast.ExceptHandler):
        return
    for child in node.body:
        if isinstance(child, ast.Raise):
            yield source.place(function, "caught", child, "pass")
    if node.type is not None:
        yield source.place(function, "caught", node.type, "()")


def _retries(source: _Source, function: str, node: ast.AST) -> Iterator[_Place]:
    """A retry that does not happen: one attempt of a loop, or of a client."""
    words = ("attempt", "retr")
    if isinstance(node, ast.For) and _called(node.iter) == "range":
        text = source.of(node.iter) + source.of(node.target)
        if any(word in text.lower() for word in words):
            yield source.place(function, "retry", node.iter, "range(1)")
    if isinstance(node, ast.keyword) and any(word in str(node.arg) for word in words):
        values = [node.value] if source.of(node.value) == "True" else []
        yield from (source.place(function, "retry", value, "False") for value in values)


if __name__ == "__main__":
    json.dump([asdict(mutation) for mutation in drawn()], sys.stdout, indent=1)
    print()
