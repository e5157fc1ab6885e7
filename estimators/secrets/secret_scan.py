"""Find credentials that must not leave the laptop: in the run file and in user code.

Three detectors search each text: the formats of :mod:`secret_patterns`, the detectors of
detect-secrets (github.com/Yelp/detect-secrets), and assignments of a random value to a name such
as ``api_token``. A match names the kind and the location and never contains the secret.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from sm_train.estimators.secrets.secret_files import UnreadableArchiveError, expand
from sm_train.estimators.secrets.secret_patterns import PATTERNS

if TYPE_CHECKING:
    from detect_secrets.plugins.base import BasePlugin
    from detect_secrets.plugins.high_entropy_strings import HighEntropyStringsPlugin

_MAX_LINE = 4000
_LINE_OVERLAP = 400
"""Characters of a long line, such as a minified file, that are searched at once."""

_MIN_RANDOM = 20
_MAX_RANDOM = 200
"""Lengths of a random string. Longer ones are data, such as an image in a notebook."""

# The library's limit for the entropy of base64, in bits per character.
_BASE64_BITS = 4.5
# A string of 20 different characters has 4.3 bits, so the name of a secret lowers the limit.
_NAMED_BITS = 2.5

_SECRET_NAME = re.compile(
    r"(?i)(?:api|access|account|admin|auth|client|encryption|license|master|private|secret|service|"
    r"session|signing|shared|storage)[_-]?key|secret|token|passw(?:or)?d|passphrase|\bpwd\b|"
    r"_pwd\b|\bpwd_|credential|webhook"
)
# A line without one of these words or a long string needs no closer look.
_CANDIDATE = re.compile(
    rf"(?i)key|pass|pwd|secret|token|auth|cred|webhook|[A-Za-z0-9+/=_-]{{{_MIN_RANDOM}}}"
)
# NAME=value, as in a shell: code has spaces around "=" or a lower-case name.
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*=")
_KEY_VARIABLE = re.compile(r"_(?:KEY|PAT)=")
_ALPHABETS = f"{string.digits}{string.ascii_uppercase} {string.ascii_lowercase}{string.digits}"
_CHECKSUM_NAME = re.compile(r"(?i)sha\d|hash|commit|revision|digest|md5|checksum|etag|uuid|nonce")
_QUOTED = re.compile(rf"([\"'`])([A-Za-z0-9+/=_-]{{{_MIN_RANDOM},{_MAX_RANDOM}}})\1")
_ASSIGNMENT = re.compile(
    r"(?<![\w.:-])(?P<name>[\w.-]{2,80})[\"'\]]{0,2}\s{0,8}(?:=>|:=|=|:)\s{0,8}"
    r"(?P<quote>[\"'`]?)(?P<value>[^\s\"'`,;<>(){}\[\]$]{8,200})(?P=quote)(?=[\s,;)}\]\\\"'`<&]|$)"
)
_PLACEHOLDER = re.compile(
    r"(?i)^(?:your|my|some|the|a|an|insert|enter|replace|change|dummy|fake|test|example|sample|"
    r"todo|none|null|true|false|x{4,}|\*{3,}|\.{3,})(?:[_.-]|$)|x{6,}|\*{3,}"
)
# Prose has spaces, and the words of code have brackets; a name has letters and separators only.
_PROSE = re.compile(r"\s|[(){}\[\]<>]|^[A-Za-z]*(?:[_.-][A-Za-z]+)*$")
_REFERENCE = re.compile(r"^(?:arn:|s3://|https?://|file:|/|\./|~/|%|\{)")
_UNQUOTED_VALUES = tuple(
    ".env .sh .bash .ini .cfg .conf .cnf .properties .yaml .yml .toml .txt .tfvars".split()
)
"""Files in which a value needs no quotes, as do files without a suffix."""

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
    if kind or _is_placeholder(value) or not _SECRET_NAME.search(name):
        return kind
    if re.search(r"(?i)passw(?:or)?d|passphrase|pwd$", name) and len(value) >= 4:
        return "a password"
    return "a credential" if _is_random(value) else None


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
            if _CANDIDATE.search(part) and (kind := _find_in_line(part.rstrip("\r"), path)):
                yield kind, number
                break


def _find_known_formats(text: str) -> Iterator[tuple[str, int]]:
    lowered = text.lower()
    for pattern in PATTERNS:
        if any(keyword in lowered for keyword in pattern.keywords):
            for match in re.finditer(pattern.expression, text):
                yield pattern.kind, text.count("\n", 0, match.start()) + 1


def _parts(line: str) -> Iterator[str]:
    """Split a long line into overlapping parts: some expressions are quadratic in its length."""
    if len(line) <= _MAX_LINE:
        yield line
        return
    for start in range(0, len(line), _MAX_LINE - _LINE_OVERLAP):
        yield line[start : start + _MAX_LINE]


def _find_in_line(line: str, path: str) -> str | None:
    return _find_random_value(line, path) or _find_by_library(line)


def _find_random_value(line: str, path: str) -> str | None:
    """Find a random string in quotes, or the assignment of one to a name of secrets."""
    for match in _ASSIGNMENT.finditer(line):
        name, quote, value = match.group("name", "quote", "value")
        assigned = line[match.start() : match.start("value")]
        is_variable = _VARIABLE.fullmatch(assigned) is not None
        is_key = is_variable and len(value) >= _MIN_RANDOM and _KEY_VARIABLE.search(assigned)
        if not (_SECRET_NAME.search(name) or is_key) or _CHECKSUM_NAME.search(name):
            continue
        if (quote or is_variable or _allows_unquoted(path)) and _is_random(value):
            return "a credential"
    for _, value in _QUOTED.findall(line):
        is_random = _is_base64(value) and _entropy(value) > _BASE64_BITS
        if is_random and not _CHECKSUM_NAME.search(line) and not _is_placeholder(value):
            return "a random string"
    return None


def _allows_unquoted(path: str) -> bool:
    return path.lower().endswith(_UNQUOTED_VALUES) or "." not in path.rpartition("/")[2]


def _is_random(value: str) -> bool:
    """Return whether ``value`` is neither a word nor a reference: digits, letters, high entropy."""
    return (
        len(value) >= 8
        and any(character.isdigit() for character in value)
        and any(character.isalpha() for character in value)
        and not _is_placeholder(value)
        and _entropy(value) >= _NAMED_BITS
    )


def _is_placeholder(value: str) -> bool:
    from detect_secrets.filters.heuristic import is_sequential_string, is_templated_secret

    return bool(
        _PLACEHOLDER.search(value)
        or _REFERENCE.search(value)
        or is_templated_secret(value)
        or is_sequential_string(value)
    )


def _is_base64(value: str) -> bool:
    """Return whether the characters are those of one base64 alphabet; a model's id mixes two.

    An alphabet in its order, and settings such as block=16_stages=4, are no base64.
    """
    return (
        "=" not in value.rstrip("=")
        and not any(value[start : start + 8] in _ALPHABETS for start in range(len(value) - 7))
        and any(character.isdigit() for character in value)
        and any(character.isupper() for character in value)
        and any(character.islower() for character in value)
        and not (set(value) & set("+/") and set(value) & set("-_"))
    )


def _entropy(value: str) -> float:
    """Return the Shannon entropy of the characters, in bits."""
    return _entropy_detector().calculate_shannon_entropy(value)


@cache
def _entropy_detector() -> HighEntropyStringsPlugin:
    from detect_secrets.plugins.high_entropy_strings import Base64HighEntropyString

    return Base64HighEntropyString(_BASE64_BITS)


def _find_by_library(line: str) -> str | None:
    from detect_secrets.filters import heuristic

    if heuristic.is_indirect_reference(line):
        return None
    for plugin in _plugins():
        for value in plugin.analyze_string(line):
            if plugin.secret_type != "Secret Keyword" or _is_password(value):
                return f"a credential ({plugin.secret_type})"
    return None


def _is_password(value: str) -> bool:
    """Return whether the value of a keyword is neither prose nor a name such as client_secret."""
    return (
        len(value) >= 6
        and not _PROSE.search(value)
        and not _SECRET_NAME.search(value)
        and not _is_placeholder(value)
    )


@cache
def _plugins() -> list[BasePlugin]:
    """Return the detectors of detect-secrets; importing them takes 0.1 s."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

    classes: Mapping[str, type[BasePlugin]] = get_mapping_from_secret_type_to_class()
    return [plugin() for plugin in classes.values() if plugin.__name__ not in _NOT_USED]
