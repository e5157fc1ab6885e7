"""HTML pages, tables of notebooks and SVG."""

ENTRANCES = ("html_page", "notebook", "svg")
"""Modules through which other wings enter."""
