"""Chooses launches from shapes and device: GPU limits, tiles, tables, captured launches."""
