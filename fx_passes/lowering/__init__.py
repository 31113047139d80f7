"""Inserts the planned operator calls into the user's graph."""
