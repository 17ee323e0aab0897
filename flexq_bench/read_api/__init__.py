"""Read-only API: stored results as JSON, its OpenAPI document, and a badge."""
