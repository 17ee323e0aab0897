"""The page Engines: its chart and rows."""
