"""Results and traces of other tools as records, and records in the formats of other services."""
