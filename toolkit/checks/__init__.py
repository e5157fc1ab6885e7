"""The checks of ``sm-train check``: one module per subject, with the pages of its findings."""
