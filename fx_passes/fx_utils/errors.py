"""Defines the exceptions that say why something is not fused, or why compiling has to end."""


class Unsupported(Exception):
    """An operation cannot be represented; the message says why in the user's terms."""


class Fatal(Exception):
    """Must not be taken for a failed analysis: other processes would go on without us."""
