"""Overview: open alerts, verdicts of the latest nightly run, and failed cases."""
