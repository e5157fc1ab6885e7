"""Trains a model of digits on this machine."""
