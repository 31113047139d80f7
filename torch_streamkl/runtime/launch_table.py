"""Loads launch configurations that were measured on a user's GPU, from a checked JSON file.

`python -m torch_streamkl.tune` writes the file, and `attention/heuristics.py` reads it before it
uses its own defaults. The file is the one that TORCH_STREAMKL_LAUNCHES names, or `default_path` of
the device.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

_log = logging.getLogger("torch_streamkl")

SCHEMA = 1
VARIABLE = "TORCH_STREAMKL_LAUNCHES"
KERNELS = ("forward", "dq", "dk")
MAX_SEQLEN_RATIO = 4  # between a problem and the measurement that serves it


@dataclass(frozen=True)
class LaunchKey:
    """Identifies what a launch was measured for.

    Both head_dims count, not only the wider one: a tile that fits next to a narrow student need
    not fit next to a wide one.
    """

    kernel: str  # "forward", "dq" or "dk"
    student_head_dim: int  # padded to a power of two, as the tiles are
    teacher_head_dim: int
    element_bytes: int
    is_causal: bool
    seqlen: int  # the longer of queries and keys

    def is_near(self, other: LaunchKey) -> bool:
        """Returns whether a measurement for one problem also applies to the other."""
        ratio = max(self.seqlen, other.seqlen) / max(1, min(self.seqlen, other.seqlen))
        return self._group == other._group and ratio <= MAX_SEQLEN_RATIO

    @property
    def _group(self) -> tuple[Any, ...]:
        dims = (self.student_head_dim, self.teacher_head_dim)
        return (self.kernel, *dims, self.element_bytes, self.is_causal)


@dataclass(frozen=True)
class MeasuredLaunch:
    """Holds the fastest launch of a kernel, and the default that it was compared with."""

    key: LaunchKey
    implementation: str  # of "auto", in the forward's: "hopper" where its kernels are faster
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    runtime_ms: float
    default_ms: float

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values.pop("key"), **values}


@dataclass(frozen=True)
class LaunchTable:
    """Holds the launches that were measured on one device with one pair of versions."""

    device: str
    torch: str
    triton: str
    entries: tuple[MeasuredLaunch, ...] = ()

    def find(self, key: LaunchKey) -> MeasuredLaunch | None:
        """Returns the measurement nearest in length, at most `MAX_SEQLEN_RATIO` away."""
        near = [entry for entry in self.entries if key.is_near(entry.key)]
        return min(
            near,
            key=lambda entry: abs(math.log(entry.key.seqlen / max(1, key.seqlen))),
            default=None,
        )

    def updated(self, new: tuple[MeasuredLaunch, ...]) -> LaunchTable:
        """Returns the table with measurements added; those of the same key are replaced."""
        keys = {entry.key for entry in new}
        kept = tuple(entry for entry in self.entries if entry.key not in keys)
        return LaunchTable(self.device, self.torch, self.triton, kept + new)

    def save(self, path: Path) -> None:
        """Writes a new file and moves it over the old one: a reader sees one or the other."""
        entries = [entry.as_json() for entry in self.entries]
        header = {"device": self.device, "torch": self.torch, "triton": self.triton}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        text = json.dumps({"schema": SCHEMA, **header, "entries": entries}, indent=1)
        partial.write_text(text + "\n")
        partial.replace(path)


def new_table(device: str) -> LaunchTable:
    """Returns an empty table of a device with the versions that are running."""
    import triton

    return LaunchTable(device, torch.__version__, triton.__version__)


# ------------------------------------------------------------------------------------ which file
def default_path(device: str) -> Path:
    """Returns the user's file for a device."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower()
    return cache / "torch_streamkl" / f"launches-{name}.json"


def table_path(device: str) -> Path:
    """Returns the file that serves a device: the named one, otherwise the user's."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else default_path(device)


def current(device: str) -> LaunchTable | None:
    """Returns the table that serves a device; None if the defaults do."""
    return _replacement[-1] if _replacement else _loaded(device)


_replacement: list[LaunchTable] = []
ON_CHANGE: list[Callable[[], None]] = []  # what forgets the choices that rest on a table


def _changed() -> None:
    for forget_choices in ON_CHANGE:
        forget_choices()


@contextlib.contextmanager
def replaced(table: LaunchTable) -> Iterator[None]:
    """Replaces the table for every look-up inside the block; the tuner tries tiles this way."""
    _changed()
    _replacement.append(table)
    try:
        yield
    finally:
        _replacement.pop()
        _changed()


def forget() -> None:
    """Forgets loaded tables, so that a new file is read."""
    _loaded.cache_clear()
    _changed()


@functools.cache
def _loaded(device: str) -> LaunchTable | None:
    """Loads the table of a device.

    A file that was named and is wrong raises; the user's own is left aside with a warning.
    """
    path = table_path(device)
    if os.environ.get(VARIABLE):
        return load(path, device)
    if not path.exists():
        return None
    try:
        return load(path, device)
    except ValueError as error:
        _log.warning("%s; the default launches are used", error)
        return None


# -------------------------------------------------------------------------------------- checking
def load(path: Path, device: str) -> LaunchTable:
    """Loads a file's table; a ValueError names the file, the rule and the value."""
    try:
        return _table(json.loads(path.read_text()), device)
    except OSError as error:
        raise ValueError(f"launch table {path} must be readable, got {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"launch table {path} must be JSON, got {error}") from error
    except _BrokenRule as error:
        raise ValueError(f"launch table {path}: {error}") from None


class _BrokenRule(Exception):
    pass


def _table(content: Any, device: str) -> LaunchTable:
    _require(isinstance(content, dict), "the file must hold an object", type(content).__name__)
    _require(content.get("schema") == SCHEMA, f"schema must be {SCHEMA}", content.get("schema"))
    names = {"schema", "device", "torch", "triton", "entries"}
    _require(set(content) == names, f"fields must be {sorted(names)}", sorted(content))
    expected = new_table(device)
    for name in ("device", "torch", "triton"):
        rule = f"{name} must be {getattr(expected, name)!r} as in this process (tune again)"
        _require(content[name] == getattr(expected, name), rule, content[name])
    _require(isinstance(content["entries"], list), "entries must be a list", content["entries"])
    entries = tuple(_entry(values, i) for i, values in enumerate(content["entries"]))
    keys = [entry.key for entry in entries]
    _require(len(set(keys)) == len(keys), "entries must differ in what they are for", keys)
    return LaunchTable(device, expected.torch, expected.triton, entries)


_POWERS = tuple(2**n for n in range(4, 9))  # 16 to 256: the tiles that the kernels can have
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "kernel": KERNELS,
    "student_head_dim": _POWERS,
    "teacher_head_dim": _POWERS,
    "element_bytes": (2, 4),
    "is_causal": (False, True),
    "implementation": ("triton", "hopper"),
    "block_m": _POWERS,
    "block_n": _POWERS,
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": (1, 2, 3, 4, 5, 6),
}
_POSITIVE: dict[str, type] = {"seqlen": int, "runtime_ms": float, "default_ms": float}


def _entry(values: Any, index: int) -> MeasuredLaunch:
    where = f"entries[{index}]"
    _require(isinstance(values, dict), f"{where} must be an object", type(values).__name__)
    names = set(_ALLOWED) | set(_POSITIVE)
    _require(set(values) == names, f"{where} must have the fields {sorted(names)}", sorted(values))
    for name, allowed in _ALLOWED.items():
        value = values[name]
        # True is 1 in Python, and a tile of True rows is a mistake
        fits = any(value == x and type(value) is type(x) for x in allowed)
        _require(fits, f"{where}: {name} must be one of {allowed}", value)
    for name, kind in _POSITIVE.items():
        value = values[name]
        fits = type(value) in (int, kind) and 0 < value < 2**31
        _require(fits, f"{where}: {name} must be a positive {kind.__name__}", value)
    hopper = values["implementation"] == "hopper"
    _require(
        values["kernel"] == "forward" or not hopper,
        f"{where}: implementation 'hopper' must be of the kernel 'forward'",
        values["kernel"],
    )
    key = {field.name: values[field.name] for field in fields(LaunchKey)}
    rest = {name: value for name, value in values.items() if name not in key}
    return MeasuredLaunch(LaunchKey(**key), **rest)


def _require(holds: bool, rule: str, got: Any) -> None:
    if not holds:
        raise _BrokenRule(f"{rule}, got {got!r}")
