"""Speed of served models: request traces, load, metrics, and verdicts on two engines."""
