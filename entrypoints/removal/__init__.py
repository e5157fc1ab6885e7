"""Samples that a user has removed from a set of shards."""
