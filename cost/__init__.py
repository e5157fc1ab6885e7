"""Instances, prices and throughput into dollars: pure, standard library only."""
