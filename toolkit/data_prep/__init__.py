"""Builds data sets: packs, columns, indices, streams, removals and their lineage."""
