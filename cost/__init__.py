"""Cost of a run from instances, prices and throughput: pure functions, standard library only."""
