"""Defines the exceptions for what is not fused, and for what has to end the compilation."""


class Unsupported(Exception):
    """Raised if an operation cannot be represented; the message says why in the user's terms."""


class Fatal(Exception):
    """Raised if the compilation has to end: after a failed analysis other ranks would go on."""
