"""What ``sm-train check`` looks at: a module for each subject, each with its findings' pages."""
