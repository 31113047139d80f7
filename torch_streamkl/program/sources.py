"""Names the captured tensors of a user's program."""

from __future__ import annotations

from typing import Any


class Source:
    """Names a captured tensor: a tensor of the user's program, and whether gradient flows.

    ``version`` counts the writes before. Sources are equal if all three are.
    """

    __slots__ = ("grad_flows", "name", "version")

    def __init__(self, name: Any, version: int = 0, grad_flows: bool = False) -> None:
        self.name, self.version, self.grad_flows = name, version, grad_flows

    def _key(self) -> tuple[Any, int, bool]:
        return self.name, self.version, self.grad_flows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        flow = "*" if self.grad_flows else ""
        return f"{self.name}{flow}" + (f"'{self.version}" if self.version else "")
