"""Reads a run file: every mistake in it at once, each as one line that says how to mend it.

A line reads ``FILE:LINE: dotted.path: value: what is allowed``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from sm_train.cost.instances import UnknownInstanceTypeError, instance_type
from sm_train.estimators.config.cluster import ClusterSection
from sm_train.estimators.config.fields import SECRET, words_for_pattern
from sm_train.estimators.config.placement import fallback_problems
from sm_train.estimators.config.schema import (
    Problem,
    RecoverySection,
    RunConfig,
    StageSection,
    cross_field_problems,
)
from sm_train.estimators.config.secret_scan import secret_in

Path_ = tuple[str | int, ...]

# libyaml's parser where PyYAML was built with it: several times as fast, the same marks.
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class RunFileError(ValueError):
    """The run file cannot be used; the message has one line for each mistake.

    ``problems`` are the same mistakes; none where the file could not even be read.
    """

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


def load_run(path: Path, changes: Sequence[str] = ()) -> RunConfig:
    """Read and validate a run file, with ``changes`` (``a.b=c``) made to it first.

    Raises:
        RunFileError: the file is missing, is not YAML, or breaks the schema; a change has no place.
    """
    text = _read_text(path)
    node, raw = _parse(path, text)
    if not isinstance(raw, dict):
        raise RunFileError(f"{path}:1: a run file is a mapping of keys; `sm-train init` writes one")
    for change in changes:
        _make(change, raw)
    lines = dict(_lines(node, ()))
    problems = _duplicate_keys(node, ()) + _problems(raw)
    if problems:
        ordered = _ordered(problems, lines)
        raise RunFileError("\n".join(_line(path, lines, one) for one in ordered), ordered)
    return RunConfig.model_validate(raw)


def with_changes(document: dict[Any, Any], changes: Sequence[str], name: str) -> RunConfig:
    """An earlier run's document, which mistakes call ``name``, with ``changes`` made to it.

    Raises:
        RunFileError: it breaks the schema, or a change has no place in it.
    """
    document = copy.deepcopy(document)
    for change in changes:
        _make(change, document)
    problems = _problems(document)
    if problems:
        raise RunFileError("\n".join(_line(Path(name), {}, problem) for problem in problems))
    return RunConfig.model_validate(document)


def _make(change: str, raw: dict[Any, Any]) -> None:
    """Set one value: ``stages.256px.instances=8``; stages go by name or by number from 0."""
    path, separator, text = change.partition("=")
    steps = re.findall(r"[^.\[\]]+", path)
    if not separator or not steps:
        raise RunFileError(f"--set: {_shown(change)}: write it as a.b=value")
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError):
        raise RunFileError(f"--set: {path}: the value is not YAML; quote it") from None
    place: Any = raw
    for step in steps[:-1]:
        place = place.setdefault(step, {}) if isinstance(place, dict) else _among(place, step, path)
    if isinstance(place, dict):
        place[steps[-1]] = value
    elif isinstance(place, list) and steps[-1].isdigit() and int(steps[-1]) < len(place):
        place[int(steps[-1])] = value
    else:
        raise RunFileError(f"--set: {path}: {steps[-1]} has no place there")


def _among(items: Any, step: str, path: str) -> Any:
    """The item of a list that ``step`` names or counts."""
    if isinstance(items, list):
        if step.isdigit() and int(step) < len(items):
            return items[int(step)]
        for item in items:
            if isinstance(item, dict) and item.get("name") == step:
                return item
    raise RunFileError(f"--set: {path}: there is no {step} there")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RunFileError(f"{path}: no such file; `sm-train init {path}` writes one") from None
    except IsADirectoryError:
        raise RunFileError(f"{path}: is a folder; name the run file in it") from None
    except UnicodeDecodeError as error:
        raise RunFileError(f"{path}: not UTF-8 text (byte {error.start})") from None


def _parse(path: Path, text: str) -> tuple[yaml.Node | None, Any]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return node, None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        source = text.splitlines()[line - 1] if line <= len(text.splitlines()) else ""
        if "\t" in source:
            raise RunFileError(f"{path}:{line}: a tab; YAML indents with spaces") from None
        raise RunFileError(f"{path}:{line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise RunFileError(f"{path}:1: not YAML: {first}") from None
    finally:
        loader.dispose()


def _lines(node: yaml.Node | None, path: Path_) -> Iterator[tuple[Path_, int]]:
    """Every path of the document with the line of its key."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, key.value)
            yield inner, key.start_mark.line + 1
            yield from _lines(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            inner = (*path, index)
            yield inner, item.start_mark.line + 1
            yield from _lines(item, inner)


def _duplicate_keys(node: yaml.Node | None, path: Path_) -> list[Problem]:
    """YAML keeps the last of two equal keys in silence; a run file must not."""
    problems: list[Problem] = []
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                problems.append(Problem((*path, key.value), None, "is written twice; keep one"))
            seen.add(key.value)
            problems += _duplicate_keys(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            problems += _duplicate_keys(item, (*path, index))
    return problems


def _problems(raw: dict[Any, Any]) -> list[Problem]:
    """All mistakes: those of single keys, then those between keys that are good by themselves."""
    errors = _errors(RunConfig, raw)
    hidden = list(_secrets(raw, ()))
    if not errors:
        return [*_between_places(raw), *hidden]
    pruned = _without(raw, [error["loc"] for error in errors])
    later = [error for error in _errors(RunConfig, pruned) if error["type"] != "missing"]
    # The run's own cross-field check is repeated below, on whatever parts are good.
    found = [_problem(raw, error) for error in (*errors, *later) if error["loc"]]
    return list(dict.fromkeys((*found, *_between_parts(pruned), *hidden)))


def _secrets(value: Any, path: Path_) -> Iterator[Problem]:
    """Values that look like keys: they would show in the console, in logs and in the bundle."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _secrets(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _secrets(item, (*path, index))
    elif isinstance(value, str) and (kind := secret_in(value)):
        yield Problem(
            path,
            None,
            f"looks like {kind}, which anybody would see who may describe the job; keep it in "
            "Secrets Manager and fetch it in the job",
        )


def _errors(model: type[BaseModel], raw: Any) -> list[ErrorDetails]:
    try:
        model.model_validate(raw)
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _without(raw: dict[Any, Any], paths: Iterable[Path_]) -> dict[Any, Any]:
    """A copy without the values that broke a rule of their own, for a second look at the rest."""
    pruned = copy.deepcopy(raw)
    for path in paths:
        parent: Any = pruned
        for step in path[:-1]:
            parent = parent.get(step) if isinstance(parent, dict) else _item(parent, step)
        if path and isinstance(parent, dict):
            parent.pop(path[-1], None)
    return pruned


def _item(sequence: Any, index: str | int) -> Any:
    in_range = isinstance(sequence, list) and isinstance(index, int) and index < len(sequence)
    return sequence[index] if in_range else None


def _between_parts(raw: dict[Any, Any]) -> list[Problem]:
    stages = raw.get("stages")
    cluster = raw.get("cluster")
    parts = [
        (index, StageSection.model_validate(stage))
        for index, stage in enumerate(stages if isinstance(stages, list) else [])
        if not _errors(StageSection, stage)
    ]
    name = raw.get("name")
    machine = cluster.get("instance_type") if isinstance(cluster, dict) else None
    try:
        gpus = instance_type(str(machine)).accelerators
    except UnknownInstanceTypeError:
        gpus = None
    valid = ClusterSection.model_validate(cluster) if not _errors(ClusterSection, cluster) else None
    found = cross_field_problems(name if isinstance(name, str) else "", parts, gpus, valid)
    return found or _between_places(raw)


def _between_places(raw: dict[Any, Any]) -> list[Problem]:
    """What is wrong with the fallbacks of a run that is good without them."""
    recovery = raw.get("recovery")
    if not isinstance(recovery, dict) or _errors(RecoverySection, recovery):
        return []
    plain = raw | {"recovery": {key: recovery[key] for key in recovery if key != "fallbacks"}}
    if _errors(RunConfig, plain):
        return []
    own = RunConfig.model_validate(plain)
    return fallback_problems(
        own.model_copy(update={"recovery": RecoverySection.model_validate(recovery)})
    )


def _problem(raw: Any, error: ErrorDetails) -> Problem:
    path: Path_ = tuple(step for step in error["loc"] if step != "[key]")
    message = error["msg"]
    if error["type"] == "value_error":
        # A section's own check names its key first: "max_wait: 60 s is less than …".
        message = message.removeprefix("Value error, ")
        key, separator, rest = message.partition(": ")
        if separator and isinstance(error["input"], dict) and key.isidentifier():
            return Problem((*path, key), None, rest)
        return Problem(path, error["input"], message)
    if error["type"] == "missing":
        return Problem(path, None, "is missing" + _described(path))
    if error["type"] == "extra_forbidden":
        return Problem(path, None, "unknown key" + _nearest(path))
    if error["type"] == "string_pattern_mismatch":
        pattern = error["ctx"]["pattern"]
        # What stands where a secret's name should may be the secret, and logs keep what is said.
        value = "***" if pattern == SECRET else error["input"]
        return Problem(path, value, words_for_pattern(pattern))
    return Problem(path, error["input"], message.replace("Input should be", "must be"))


def _described(path: Path_) -> str:
    parent = _model_at(path[:-1])
    field = parent.model_fields.get(str(path[-1])) if parent else None
    return f": {field.description}" if field and field.description else ""


def _nearest(path: Path_) -> str:
    parent = _model_at(path[:-1])
    if parent is None:
        return ""
    known = list(parent.model_fields)
    near = get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{hint} (known: {', '.join(known)})"


def _model_at(path: Path_) -> type[BaseModel] | None:
    """The section of the schema that ``path`` points to."""
    model: type[BaseModel] = RunConfig
    for step in path:
        if isinstance(step, int):
            continue
        field = model.model_fields.get(step)
        inner = next(_models_in(field.annotation), None) if field else None
        if inner is None:
            return None
        model = inner
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _ordered(problems: list[Problem], lines: dict[Path_, int]) -> list[Problem]:
    return sorted(problems, key=lambda problem: _line_of(problem.path, lines))


def _line_of(path: Path_, lines: dict[Path_, int]) -> int:
    """The line of ``path`` or of the nearest thing above it that is in the file."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


def _line(file: Path, lines: dict[Path_, int], problem: Problem) -> str:
    value = "" if problem.value is None else f": {_shown(problem.value)}"
    return (
        f"{file}:{_line_of(problem.path, lines)}: {dotted(problem.path)}{value}: {problem.message}"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    if secret_in(text):
        return "(not shown)"
    return text if len(text) <= 80 else f"{text[:77]}..."


def dotted(path: Path_) -> str:
    """``("stages", 0, "name")`` as ``stages[0].name``."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text
