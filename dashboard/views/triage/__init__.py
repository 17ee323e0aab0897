"""Triage: all alerts with their current level and assignee."""
