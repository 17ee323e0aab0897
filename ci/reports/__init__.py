"""Reports of gates, nightly runs and bisections, in all their formats."""
