"""Follows images through data sets and runs."""
