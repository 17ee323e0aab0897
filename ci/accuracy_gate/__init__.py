"""The accuracy gate: its policy, the sample that it plans, its limits and its decisions."""
