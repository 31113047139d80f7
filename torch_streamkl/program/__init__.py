"""Represents what is computed: one expression graph, and what is known of it."""
