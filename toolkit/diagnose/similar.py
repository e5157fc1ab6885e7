"""Finds the known failure whose messages resemble an unknown one most.

Messages are compared by their words and pairs of words, weighted by how rare they are among the
known ones: the examples of all signatures and ``messages.toml`` (TF-IDF with cosine similarity;
Manning, Raghavan, Schütze: Introduction to Information Retrieval, 2008, chapter 6). The seven
nearest known messages vote.
"""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from sm_train.toolkit.diagnose.signatures import SignatureRole, signatures

MIN_SIMILARITY = 0.21
"""Similarity from which an answer is given. On the lines of the held-out logs in
tests/toolkit/diagnose/corpus that are no near copy of an example, five of six such answers are
right."""

_NEAREST = 7
_MIN_WORDS = 3
"""With fewer words, a message resembles any example that has one of them."""
# A word, or a number such as an HTTP status, an errno or an exit code
_TERM = re.compile(r"[A-Za-z]{2,}|(?<![\w.])\d{2,3}(?![\w.])")
_WORD = re.compile(r"[A-Za-z]{3,}")
# "DataLoader", "OutOfMemory"
_WORD_BOUNDARY = re.compile(r"(?<=[a-z])(?=[A-Z])")
_ENDING = re.compile(r"(?:ing|ed|es|s)$")
_MIN_STEM = 5
_NO_CAUSE: tuple[SignatureRole, ...] = ("echo", "warning")
_NEVER_GUESSED = ("stopped",)
"""Says that the program did not fail, for which a resemblance is no evidence."""

_Vector = Mapping[str, float]


def most_similar(text: str) -> tuple[str | None, float]:
    """Return the code of the cause whose examples resemble ``text`` most, and how much.

    The code is None if the nearest examples are no cause of a failure.
    """
    if len(_WORD.findall(text)) < _MIN_WORDS:
        return None, 0.0
    vector = _vector(_terms(text))
    similarities = [(_product(vector, example), code) for code, example in _examples()]
    nearest = sorted(similarities, reverse=True)[:_NEAREST]
    votes: defaultdict[str, float] = defaultdict(float)
    for similarity, code in nearest:
        votes[code] += similarity
    code = max(votes, key=lambda one: votes[one])
    closest = next(similarity for similarity, one in nearest if one == code)
    is_cause = closest > 0 and signatures()[code].role not in _NO_CAUSE
    return (code if is_cause else None), closest


@cache
def _examples() -> tuple[tuple[str, _Vector], ...]:
    """Return (code, vector) of all known messages and titles."""
    return tuple((code, _vector(terms)) for code, terms in _documents())


@cache
def _documents() -> tuple[tuple[str, list[str]], ...]:
    """Return (code, terms) of all known messages and titles."""
    return tuple((code, _terms(text)) for code, text in _known_texts())


def _known_texts() -> Iterator[tuple[str, str]]:
    for signature in signatures().values():
        if signature.code in _NEVER_GUESSED:
            continue
        for text in (*signature.examples, signature.title):
            yield signature.code, text
    for code, messages in messages_by_code().items():
        for text in messages:
            yield code, text


def messages_by_code() -> dict[str, list[str]]:
    """Return code → messages of real logs that failed for this reason."""
    with Path(__file__).with_name("messages.toml").open("rb") as file:
        return tomllib.load(file)


@cache
def _weights() -> tuple[_Vector, float]:
    """Return term → inverse document frequency, and the highest one."""
    documents = [set(terms) for _, terms in _documents()]
    counts = Counter(term for terms in documents for term in terms)
    rarest = math.log(len(documents) + 1)
    return {term: rarest - math.log(count) for term, count in counts.items()}, rarest


def _terms(text: str) -> list[str]:
    """Return the words of ``text`` without endings, its numbers, and all pairs of neighbors."""
    words = [word.lower() for word in _TERM.findall(_WORD_BOUNDARY.sub(" ", text))]
    stems = [_ENDING.sub("", word) if len(word) > _MIN_STEM else word for word in words]
    return [*stems, *map(" ".join, itertools.pairwise(stems))]


def _vector(terms: list[str]) -> _Vector:
    """Return term → weight with length 1; terms of no example count as the rarest."""
    weights, rarest = _weights()
    vector = {term: weights.get(term, rarest) for term in set(terms)}
    length = math.sqrt(sum(weight * weight for weight in vector.values()))
    return {term: weight / length for term, weight in vector.items()} if length else {}


def _product(one: _Vector, other: _Vector) -> float:
    return sum(weight * other.get(term, 0.0) for term, weight in one.items())
