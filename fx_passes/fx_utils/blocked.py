"""Why something is left as the user wrote it."""


class Blocked(Exception):
    """An operation cannot be represented; the message says why in the user's terms."""
