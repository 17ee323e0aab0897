"""Reports of gates, nightly runs and bisections: Markdown, JUnit XML, JSON, terminal."""
