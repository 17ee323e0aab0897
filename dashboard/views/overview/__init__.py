"""Overview: open alerts, verdicts of the latest nightly run, and what did not run."""
