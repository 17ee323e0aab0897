"""Published tables and statements beside the stored results, each with a verdict."""
