"""Code shared by several pages: controls, charts, tables, and formatting of values."""
