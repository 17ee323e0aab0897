"""The read API: JSON of what is stored, its OpenAPI document, and a badge."""
