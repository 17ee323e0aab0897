"""What several pages share: controls, charts, tables, and how values are shown."""
