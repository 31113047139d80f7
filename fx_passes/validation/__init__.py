"""Runs replaced code and its replacement on the same inputs before a rewrite is taken."""
