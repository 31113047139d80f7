"""Defines RewriteOptions: every option of the rewrite, with its rule, for all front ends.

In a dict of options, such as ``torch.compile(..., options=)``, ours have the prefix ``streamkl.``
and all others are Inductor's. Keyword arguments of Python functions have no prefix.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict

from torch_streamkl.fx_passes.fx_utils.torch_names import later

PREFIX = "streamkl."
INNER_BACKENDS = ("inductor", "aot_eager", "eager")
MODES = ("auto", "always", "never")


class _OneOf:
    """Allows these values, of their type: 1 is not True."""

    def __init__(self, *values: object) -> None:
        self.values = values
        self.text = " or ".join(repr(x) for x in values)

    def accepts(self, value: object) -> bool:
        return any(type(value) is type(x) and value == x for x in self.values)


class _Number:
    """Allows an int or a float, but no bool; and None if the option gives it a meaning."""

    def __init__(self, text: str, least: float, *, is_open: bool = False, none: bool = True):
        self.text = f"a number {text}" + (" or None" if none else "")
        self.least, self.is_open, self.none = least, is_open, none

    def accepts(self, value: object) -> bool:
        if value is None:
            return self.none
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return False
        return value > self.least if self.is_open else value >= self.least


_FLAG = _OneOf(False, True)


def _option(default: Any, rule: _OneOf | _Number, doc: str) -> Any:
    return field(default=default, metadata={"rule": rule, "doc": doc})


@dataclass(frozen=True)
class RewriteOptions:
    """Holds the options of the rewrite. Values are checked when the object is created.

    .. code-block:: python

        options = torch_streamkl.RewriteOptions(min_mib=0, strict=True)
        torch.compile(step, backend="streamkl", options=options)
        torch_streamkl.enable(options)

    A flag takes True or False, not 1. A number is an int or a float, not True.

    Attributes:
        strict: raise `UnfusedError` if a loss of the graph is not fused. A skipped loss raises
            nothing.
        explain: log the report of every graph as a warning.
        inner: the compiler of the rewritten graph: ``"inductor"``, or for debugging
            ``"aot_eager"`` or ``"eager"``. For ``backend="streamkl"`` only.
        deterministic: False allows faster gradients that differ in the last bits from run to run
            (Hopper, head_dim 64).
        verify: ``"auto"`` runs each fused loss and the code that it replaces on the same random
            inputs. A loss that differs is not fused. A check beyond the two limits below is
            skipped, and the loss is fused. ``"always"`` has no limits, and does not fuse a loss
            that cannot be checked. ``"never"`` checks nothing.
        verify_max_mib: the memory of one such check in MiB; None is a quarter of what is free.
        verify_max_seconds: the time of all checks of a graph, in seconds.
        min_mib: the minimum size for fusing, in MiB of scores or logits. Smaller losses are
            skipped. 0 skips nothing, and None uses the thresholds of docs/reference/options.md.
        row_programs: also fuse losses that are not built-in divergences, as row programs.

    Raises:
        ValueError: a value breaks the rule of its option.
        TypeError: an option does not exist.
    """

    strict: bool = _option(
        False,
        _FLAG,
        "raise `UnfusedError` if a loss of the graph is not fused; a skipped loss raises nothing",
    )
    explain: bool = _option(False, _FLAG, "log the report of every graph as a warning")
    inner: Literal["inductor", "aot_eager", "eager"] = _option(
        "inductor",
        _OneOf(*INNER_BACKENDS),
        'compiler of the rewritten graph, with `backend="streamkl"` only; '
        "[what it costs](#what-inner-costs)",
    )
    deterministic: bool = _option(
        True,
        _FLAG,
        "`False` allows faster gradients that differ in the last bits from run to run "
        "(Hopper, head_dim 64)",
    )
    verify: Literal["auto", "always", "never"] = _option(
        "auto",
        _OneOf(*MODES),
        "run each fused loss and the code that it replaces on the same random inputs; a loss that "
        'differs is not fused. "auto" skips a check beyond the two limits below, and fuses the '
        'loss. "always" has no limits, and does not fuse a loss that cannot be checked. "never" '
        "checks nothing",
    )
    verify_max_mib: float | None = _option(
        None,
        _Number("above 0", 0, is_open=True),
        "memory of one such check in MiB; `None` is a quarter of what is free",
    )
    verify_max_seconds: float = _option(
        1.0,
        _Number("above 0", 0, is_open=True, none=False),
        "time of all checks of a graph, in seconds",
    )
    min_mib: float | None = _option(
        None,
        _Number("of at least 0", 0),
        "minimum size for fusing, in MiB of scores or logits; smaller losses are skipped. "
        "`0` skips nothing, `None` is the threshold below",
    )
    row_programs: bool = _option(
        True,
        _FLAG,
        "also fuse losses that are not built-in divergences, as row programs",
    )

    def __new__(cls, *_: Any, **given: Any) -> RewriteOptions:
        """Refuses names that are no options, before `__init__` does it without a suggestion."""
        for name in given:
            if name not in NAMES:
                meant = _suggestion(name, NAMES)
                raise TypeError(
                    f"RewriteOptions has no option {name!r}{meant}; its options are "
                    f"{', '.join(sorted(NAMES))}"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for option in fields(self):
            rule, value = option.metadata["rule"], getattr(self, option.name)
            if not rule.accepts(value):
                raise ValueError(f"{PREFIX}{option.name} must be {rule.text}, got {value!r}")


NAMES = tuple(option.name for option in fields(RewriteOptions))


class OptionValues(TypedDict, total=False):
    """Types the options as keyword arguments, for type checkers."""

    strict: bool
    explain: bool
    inner: Literal["inductor", "aot_eager", "eager"]
    deterministic: bool
    verify: Literal["auto", "always", "never"]
    verify_max_mib: float | None
    verify_max_seconds: float
    min_mib: float | None
    row_programs: bool


Given = RewriteOptions | Mapping[str, Any] | None  # what users may pass as ``options``


def split_options(given: Given) -> tuple[RewriteOptions, dict[str, Any]]:
    """Splits options into ours, checked and completed, and Inductor's."""
    if given is None:
        return RewriteOptions(), {}
    if isinstance(given, RewriteOptions):
        return given, {}
    if not isinstance(given, Mapping):
        raise TypeError(f"options must be a dict or RewriteOptions, got {type(given).__name__}")
    ours, theirs = {}, {}
    for name, value in given.items():
        short = name.removeprefix(PREFIX) if isinstance(name, str) else ""
        if short in NAMES and short != name:
            ours[short] = value
        elif short and short == name and _is_of_inductor(name):
            theirs[name] = value
        else:
            raise ValueError(_unknown(name))
    return RewriteOptions(**ours), theirs


def with_keywords(given: Given, named: Mapping[str, Any], caller: str) -> tuple[Any, Any]:
    """Splits options as `split_options` does, and applies keyword arguments to ours."""
    ours, theirs = split_options(given)
    for name in named:
        if name not in NAMES:
            raise TypeError(
                f"{caller}() has no option {name!r}{_suggestion(name, NAMES)}; its options are "
                f"{', '.join(sorted(NAMES))}"
            )
    return replace(ours, **named), theirs


def without_inner(ours: RewriteOptions, caller: str) -> RewriteOptions:
    """Returns the options, or raises if ``inner`` is set in a front end whose graphs Inductor
    compiles.
    """
    if ours.inner != "inductor":
        raise ValueError(
            f"{PREFIX}inner must be 'inductor' in {caller}(), whose graphs Inductor compiles, got "
            f'{ours.inner!r}: torch.compile(backend="streamkl") has it'
        )
    return ours


def _is_of_inductor(name: str) -> bool:
    import torch._inductor.config

    return hasattr(torch._inductor.config, name.replace("-", "_"))


def _unknown(name: object) -> str:
    if not isinstance(name, str):
        return f"names of options must be strings, got {name!r}"
    known = [PREFIX + x for x in NAMES]
    text = ", ".join(sorted(known))
    if name.startswith(PREFIX):
        return (
            f"options of the streamkl backend are {text}, got {name!r}{_suggestion(name, known)}"
        )
    list_options = later("torch._inductor", "list_options")
    ours = _suggestion(PREFIX + name.lower().removeprefix("streamkl_"), known, 0.9)
    hint = ours or _suggestion(name, [*known, *list_options()])
    return (
        f"{name!r} is neither an option of the streamkl backend nor one of Inductor{hint}; "
        f"those of the backend are {text}"
    )


def _suggestion(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}" if close else ""
