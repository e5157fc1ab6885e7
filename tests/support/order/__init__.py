"""The order of the calls that decide what a crash leaves: flushes, names, removals, requests."""
