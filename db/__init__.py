"""Tables, sessions, migrations, named queries, import and export. No statistics."""
