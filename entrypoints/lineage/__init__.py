"""Which data a job trained on, and in which steps."""
