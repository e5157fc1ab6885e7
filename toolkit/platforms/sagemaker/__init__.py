"""Runs on Amazon SageMaker."""
