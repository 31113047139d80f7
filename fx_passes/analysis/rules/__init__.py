"""Holds the recogniser's rules, one file for each kind of operation."""
