"""What a crash leaves: the order of flushes, names, removals and requests, and a kill at each."""
