"""Find credentials that must not leave the laptop: in the run file and in user code.

Three detectors search each text: the formats of :mod:`credential_formats`, the detectors of
detect-secrets (github.com/Yelp/detect-secrets), and assignments of a random value to a name such
as ``api_token``. A match names the kind and the location and never contains the secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from sm_train.estimators.secrets.credential_formats import credential_formats
from sm_train.estimators.secrets.random_values import (
    CANDIDATE,
    SECRET_NAME,
    find_random_value,
    is_placeholder,
    is_random,
    without_requests,
)
from sm_train.estimators.secrets.secret_files import UnreadableArchiveError, expand

if TYPE_CHECKING:
    from detect_secrets.plugins.base import BasePlugin

_MAX_LINE = 4000
_LINE_OVERLAP = 400
"""Characters of a long line, such as a minified file, that are searched at once."""

# Prose has spaces, and the words of code have brackets; a name has letters and separators only.
_PROSE = re.compile(r"\s|[(){}\[\]<>]|^[A-Za-z]*(?:[_.-][A-Za-z]+)*$")

# Detectors of detect-secrets that report a public IP address or a documented URL, and the entropy
# detectors, whose limit is used with more filters.
_NOT_USED = {
    "IPPublicDetector",
    "BasicAuthDetector",
    "Base64HighEntropyString",
    "HexHighEntropyString",
}


@dataclass(frozen=True)
class FoundSecret:
    """Something that looks like a credential; ``line`` counts from 1."""

    kind: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: looks like {self.kind}; remove it from the file"


@dataclass(frozen=True)
class UnsearchedFile:
    """An archive that cannot be searched; ``kind`` says why."""

    kind: str
    file: str

    def __str__(self) -> str:
        return (
            f"{self.file}: {self.kind} cannot be searched for credentials; exclude it, or add its "
            "files unpacked"
        )


def find_secret(text: str) -> str | None:
    """Return the kind of the first credential in ``text``, such as a value of the run file."""
    return next((kind for kind, _ in _find_in_text(text, ".yaml")), None)


def find_known_format(text: str) -> str | None:
    """Return the kind of the first credential in ``text`` that has the format of a service."""
    return next((kind for kind, _ in _find_known_formats(text)), None)


def find_secret_in_setting(name: str, value: str) -> str | None:
    """Return the kind of the credential in the environment variable or tag ``name``.

    A variable such as DB_PASSWORD is a credential whatever its value is, unless the value refers to
    another location.
    """
    kind = find_secret(value)
    if kind or is_placeholder(value) or not SECRET_NAME.search(name):
        return kind
    if re.search(r"(?i)passw(?:or)?d|passphrase|pwd$", name) and len(value) >= 4:
        return "a password"
    return "a credential" if is_random(value) else None


def find_secrets(files: Mapping[str, bytes]) -> Iterator[FoundSecret | UnsearchedFile]:
    """Yield every credential in ``files`` and in the archives among them, in their order."""
    for name, content in files.items():
        try:
            for path, text in expand(name, content):
                yield from _find_in_file(text, path)
        except UnreadableArchiveError as error:
            yield UnsearchedFile(str(error), name)


def _find_in_file(text: str, path: str) -> Iterator[FoundSecret]:
    """Yield one credential for each line: several detectors may know the same one."""
    lines = set[int]()
    for kind, line in _find_in_text(text, path):
        if line not in lines:
            lines.add(line)
            yield FoundSecret(kind, path, line)


def _find_in_text(text: str, path: str) -> Iterator[tuple[str, int]]:
    """Yield the kind of each credential and its line, from 1; at most one for a line and detector.

    Backslashes before quotes are dropped: notebooks and other JSON escape the quotes of the code
    that they contain.
    """
    text = text.replace('\\"', '"')
    yield from _find_known_formats(text)
    for number, line in enumerate(text.split("\n"), 1):
        for part in _parts(line):
            if CANDIDATE.search(part) and (kind := _find_in_line(part.rstrip("\r"), path)):
                yield kind, number
                break


def _find_known_formats(text: str) -> Iterator[tuple[str, int]]:
    lowered = text.lower()
    for known in credential_formats():
        if any(keyword in lowered for keyword in known.keywords):
            for match in re.finditer(known.regex, text):
                yield known.kind, text.count("\n", 0, match.start()) + 1


def _parts(line: str) -> Iterator[str]:
    """Split a long line into overlapping parts: some expressions are quadratic in its length."""
    if len(line) <= _MAX_LINE:
        yield line
        return
    for start in range(0, len(line), _MAX_LINE - _LINE_OVERLAP):
        yield line[start : start + _MAX_LINE]


def _find_in_line(line: str, path: str) -> str | None:
    return find_random_value(line, path) or _find_by_library(line)


def _find_by_library(line: str) -> str | None:
    plugins = _plugins()
    from detect_secrets.filters import heuristic

    if heuristic.is_indirect_reference(line):
        return None
    for plugin in plugins:
        for value in plugin.analyze_string(line):
            if plugin.secret_type != "Secret Keyword" or _is_password(value):
                return f"a credential ({plugin.secret_type})"
    return None


def _is_password(value: str) -> bool:
    """Return whether the value of a keyword is neither prose nor a name such as client_secret."""
    return (
        len(value) >= 6
        and not _PROSE.search(value)
        and not SECRET_NAME.search(value)
        and not is_placeholder(value)
    )


@cache
def _plugins() -> list[BasePlugin]:
    """Return the detectors of detect-secrets."""
    with without_requests():
        from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

        classes: Mapping[str, type[BasePlugin]] = get_mapping_from_secret_type_to_class()
    return [plugin() for plugin in classes.values() if plugin.__name__ not in _NOT_USED]
