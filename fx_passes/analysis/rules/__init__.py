"""Holds the interpreter's rules, one file for each kind of operation."""
