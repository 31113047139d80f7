"""Plans operator calls for recognised losses, without touching the graph."""
