"""Checks that functions of the user's code, which the run file names, exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sm_train.estimators.bundle.bundle import requirements
from sm_train.estimators.bundle.user_code import (
    UserCode,
    UserCodeError,
    defined_names,
    module_paths,
    read_user_code,
)
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding

USER_FUNCTION = Check("user-function", ("error", "warning"))


def user_function_findings(config: RunConfig, base: Path) -> Iterator[Finding]:
    """Look the functions up in the folder of user code; nothing is imported or run."""
    training = config.training
    named = {
        "training.optimizer.name": training.optimizer.name,
        "training.lr_schedule.name": training.lr_schedule.name,
        "training.objective": training.objective or "",
        "data.transform": config.data.transform or "",
    }
    named |= {
        f"stages[{index}].objective": stage.objective or ""
        for index, stage in enumerate(config.stages)
    }
    functions = {key: name for key, name in named.items() if ":" in name}
    if not functions:
        return
    code = UserCode()
    if config.code is not None:
        try:
            code = read_user_code(base / config.code)
        except UserCodeError:
            # The bundle reports it.
            return
    for key, name in functions.items():
        yield from _function_findings(config, key, name, code)


def _function_findings(config: RunConfig, key: str, name: str, code: UserCode) -> Iterator[Finding]:
    module, _, function = name.partition(":")
    path = next((path for path in module_paths(module) if path in code.files), None)
    if path is not None:
        try:
            defined = defined_names(code.files[path])
        except SyntaxError as error:
            message = f"{name}: {path}:{error.lineno}: {error.msg}"
            yield USER_FUNCTION.found("error", key, message, "correct the file")
            return
        if defined is not None and function.partition(".")[0] not in defined:
            message = f"{name}: {path} defines no {function}"
            yield USER_FUNCTION.found("error", key, message, f"define {function} there")
        return
    package = canonicalize_name(module.partition(".")[0])
    if package in _installed(code):
        return
    # Import names often differ from those of packages, so some may have it.
    unknown = bool(code.packages) or config.cluster.image is not None
    yield USER_FUNCTION.found(
        "warning" if unknown else "error",
        key,
        f"{name}: no module {module} in the folder of code",
        "add it to the folder, or its package to the folder's requirements.txt",
    )


def _installed(code: UserCode) -> set[str]:
    """Return the packages that every job has, and those of the user."""
    # The hashes of a package are on indented lines.
    pinned = {line.partition("==")[0] for line in requirements(None).splitlines() if "==" in line}
    own = [Requirement(line).name for line in code.packages if not line.startswith("-")]
    return {"torch", "bitsandbytes", *pinned, *map(canonicalize_name, own)}
