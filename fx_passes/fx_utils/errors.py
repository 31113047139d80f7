"""Defines the exceptions for what is not fused, and for what has to end the compilation."""


class Unsupported(Exception):
    """An operation cannot be represented; the message says why in the user's terms."""


class Fatal(Exception):
    """Must not be taken for a failed analysis: other processes would go on without us."""
