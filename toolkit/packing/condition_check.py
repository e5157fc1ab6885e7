"""Refuses SQL conditions that may select other rows of the same table later.

A pack that is interrupted evaluates its condition again, perhaps on another day.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.errors import UserError

if TYPE_CHECKING:
    import duckdb

Overloads = dict[str, dict[tuple[str, ...], bool]]
"""Function → types of the arguments → whether the result depends on the arguments alone."""


def names_in(connection: duckdb.DuckDBPyConnection, where: str) -> tuple[set[str], set[str]]:
    """Return the names of columns, and of called functions, in lower case.

    ``age`` with one argument is ``age/1``: it counts from today.
    """
    query = f"SELECT 1 WHERE (\n{where}\n)"
    [(tree,)] = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchall()
    columns: set[str] = set()
    functions: set[str] = set()
    for node in _nodes(json.loads(tree)):
        columns.update(name.lower() for name in node.get("column_names", ()))
        name = str(node.get("function_name", "")).lower()
        is_since_today = name == "age" and len(node.get("arguments", ())) == 1
        functions.add("age/1" if is_since_today else name)
    return columns, functions


def require_reproducible(
    connection: duckdb.DuckDBPyConnection, where: str, rows: duckdb.DuckDBPyRelation
) -> None:
    """Check the functions in the condition ``where`` on the columns of ``rows``, which is not read.

    DuckDB lists for each overload whether it is stable: a subtraction of numbers is, one of times
    with a time zone is not. So the overloads that it binds for these columns decide. Its binder
    replaces some constant calls by their values; such a call is refused if no overload of its name
    is stable. The list calls ``age`` with one argument stable, although it counts from today.

    Raises:
        UserError: a function depends on the time, on chance or on the session.
    """
    columns, functions = names_in(connection, where)
    own = {name.lower() for name in rows.columns}
    # SQL reads CURRENT_TIME without parentheses as the function get_current_time.
    keywords = {f"get_{name}" for name in columns - own} | (columns - own)
    overloads = _overloads(connection)
    for name in sorted(functions | keywords):
        if name == "age/1" or (name in overloads and not any(overloads[name].values())):
            raise _refused(name.partition("/")[0])
    for name, types in _bound_functions(connection, where, rows):
        listed = overloads.get(name, {})
        # Generic functions, such as those of lists, have no exact match.
        alike = [listed[known] for known in listed if len(known) == len(types)]
        if not listed.get(types, all(alike)):
            raise _refused(name, types)


def _refused(name: str, types: Collection[str] = ()) -> UserError:
    if not types:
        return UserError(
            f"--where: {name}() returns another value each time, so an interrupted pack could not "
            "be resumed; use columns of the table"
        )
    return UserError(
        f"--where: {name}({', '.join(types)}) depends on the settings of the session, so an "
        "interrupted pack could not be resumed; cast times to TIMESTAMP"
    )


def _overloads(connection: duckdb.DuckDBPyConnection) -> Overloads:
    listed = connection.sql(
        "SELECT lower(function_name), parameter_types, stability = 'CONSISTENT' "
        "FROM duckdb_functions() WHERE stability IS NOT NULL"
    ).fetchall()
    found: Overloads = defaultdict(dict)
    for name, types, is_stable in listed:
        found[name][tuple(types)] = is_stable
    return found


def _bound_functions(
    connection: duckdb.DuckDBPyConnection, where: str, rows: duckdb.DuckDBPyRelation
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name and the types of the arguments of every function that DuckDB would call.

    Raises:
        UserError: DuckDB cannot bind the condition.
    """
    columns = ", ".join(
        f"CAST(NULL AS {kind}) AS {quoted(name)}"
        for name, kind in zip(rows.columns, rows.types, strict=True)
    )
    query = f"SELECT 1 FROM (SELECT {columns}) WHERE (\n{where}\n)"
    [(text,)] = connection.execute("SELECT json_serialize_plan(?)", [query]).fetchall()
    plan = json.loads(text)
    if plan["error"]:
        raise UserError(f"--where: {where}: {plan['error_message'].splitlines()[0]}")
    for node in _nodes(plan):
        if node.get("expression_class") == "BOUND_FUNCTION":
            types = tuple(argument["id"] for argument in node["arguments"])
            yield node["qname"]["path"][-1].lower(), types


def quoted(name: str) -> str:
    """Return a column's name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects of a JSON document."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _nodes(item)
