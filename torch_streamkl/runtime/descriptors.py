"""Copies tensor descriptors to other addresses: creating one takes longer than a small kernel."""

from __future__ import annotations

from typing import Any, NamedTuple


class Address(NamedTuple):
    """Stands for the tensor of a descriptor; Triton's launcher reads only its address."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def is_descriptor(x: Any) -> bool:
    """Returns whether an argument of a kernel is a tensor descriptor."""
    return type(x).__name__ == "TensorDescriptor"


def with_base(descriptor: Any, base: Any) -> Any:
    """Returns a descriptor for another tensor, unchecked."""
    found = object.__new__(type(descriptor))
    vars(found).update(vars(descriptor), base=base)  # copy.copy takes three times as long
    return found
