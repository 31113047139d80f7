"""Remembers which checks passed, so that the same region is not run again, here or later.

Two regions are the same if their operations, constants and input metadata are the same, as those
of equal layers of a network are. Only passed checks are recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.call_keys import Input, NotEqual, call_key
from torch_streamkl.fx_passes.fx_utils.nodes import example, held_by, is_parameter, storage_of
from torch_streamkl.fx_passes.fx_utils.torch_names import optional, tree_leaves
from torch_streamkl.fx_passes.validation.options import CheckOptions
from torch_streamkl.fx_passes.validation.regions import Region
from torch_streamkl.fx_passes.validation.sizes import Sizes, SymNumber
from torch_streamkl.runtime.devices import device_name

MAX_CONSTANT = 4096  # entries of a constant that are compared
_STABLE_MODULES = ("torch", "_operator", "operator", "math", "builtins")
_STABLE_NAMESPACES = ("aten", "prims", "torch_streamkl")
_passed: set[str] = set()


class Fingerprint:
    """Holds a digest of a region; ``is_stable`` if it means the same in another process."""

    def __init__(self, region: Region, sizes: Sizes, owner: Any) -> None:
        self.sizes, self.owner = sizes, owner
        self.is_stable = True
        self.is_known = True  # everything that matters is part of the digest
        self._numbers: dict[str, int] = {}
        self._storages: dict[int | None, int] = {}
        leaves = {leaf.name: leaf for leaf in region.leaves}
        parts = [_ambient()]
        for nodes, change in (
            (region.before, region.change.before),
            (region.after, region.change.after),
        ):
            for node in nodes:
                for source in node.all_input_nodes:
                    if source.name in leaves and source.name not in self._numbers:
                        self._numbers[source.name] = len(self._numbers)
                        parts.append(self._leaf(leaves[source.name]))
                self._numbers[node.name] = len(self._numbers)
                parts.append(f"{self._call(node)} {self._value(node)}")
            parts.append(f"returns {self._numbers.get(change.name)}")
        self.digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _target(self, node: fx.Node) -> str:
        target: Any = node.target
        if isinstance(target, str):
            return f"{node.op} {target}"
        if isinstance(target, torch._ops.OpOverload):
            self.is_stable &= target.namespace in _STABLE_NAMESPACES
            return f"{target.name()} {id(target)}" if not self.is_stable else target.name()
        name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
        if not name.startswith(_STABLE_MODULES):
            self.is_stable = False
            name += f" {id(target)}"
        return name

    def _call(self, node: fx.Node) -> object:
        """What equal calls have in common, with the numbers of their inputs."""
        target, given = self._target(node), (node.args, node.kwargs)
        try:
            if any(isinstance(x, SymNumber) for x in tree_leaves(given)):
                raise NotEqual  # whose numbers are not known
            return call_key(target, *given, lambda n: Input((self._numbers.get(n.name, -1), 0)))
        except NotEqual:
            self.is_known = False
            return target

    def _leaf(self, leaf: fx.Node) -> str:
        value = example(leaf)
        if self.sizes.is_known(value):
            return f"number {self.sizes.known(value)}"
        if leaf.op != "get_attr" or is_parameter(leaf):
            return f"input {self._value(leaf)}"
        constant = held_by(self.owner, leaf)
        if not isinstance(constant, Tensor) or constant.numel() > MAX_CONSTANT:
            self.is_known = False
            return ""
        return f"constant {self._value(leaf)} {constant.tolist()}"

    def _value(self, node: fx.Node) -> str:
        value = example(node)
        if not isinstance(value, Tensor):
            return type(value).__name__
        shape, strides = self.sizes.numbers(value.shape), self.sizes.numbers(value.stride())
        memory = self._storages.setdefault(storage_of(node), len(self._storages))
        kind = f"{value.dtype} {_device(value.device)} {value.requires_grad}"
        return f"{kind} {shape} {strides} in {memory}"


def _device(device: torch.device) -> str:
    """Describes the device as kernels depend on it: two GPUs of one name are alike."""
    return device_name(device) if device.type == "cuda" else device.type


def _ambient() -> str:
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    getter: Any = optional("torch._C", "_get_fp32_precision_getter")
    if getter is not None:
        precisions = [getter(x, "matmul") for x in ("cuda", "mkldnn")]
    else:  # it raises where precisions of backends were set, so it is asked only if need be
        precisions = [torch.get_float32_matmul_precision()]
    return f"{torch.is_grad_enabled()} {autocast} {precisions} {torch.get_default_dtype()}"


def passed_before(fingerprint: Fingerprint, options: CheckOptions) -> bool:
    """Returns whether a region's check passed before."""
    if not fingerprint.is_known:
        return False
    if fingerprint.digest in _passed:
        return True
    path = _path(fingerprint, options)
    return path is not None and path.exists()


def record_pass(fingerprint: Fingerprint, options: CheckOptions) -> None:
    """Records that a region's check passed, on disk too if asked."""
    if not fingerprint.is_known:
        return
    _passed.add(fingerprint.digest)
    path = _path(fingerprint, options)
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()


def forget() -> None:
    """Forgets all passed checks of this process."""
    _passed.clear()


def _path(fingerprint: Fingerprint, options: CheckOptions) -> Path | None:
    """Returns the file in Inductor's cache for this version of the sources, torch and device."""
    config = optional("torch._inductor", "config")
    cache_dir: Any = optional("torch._inductor.runtime.cache_dir_utils", "cache_dir")
    caches = cache_dir is not None and not getattr(config, "force_disable_caches", True)
    if not fingerprint.is_stable or not options.version or not caches:
        return None
    version = f"{options.version} {torch.__version__} {fingerprint.digest}"
    return Path(cache_dir()) / "streamkl_checks" / hashlib.sha256(version.encode()).hexdigest()
