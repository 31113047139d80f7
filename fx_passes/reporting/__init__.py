"""Builds the report: what was fused, how it runs, and what to change."""
