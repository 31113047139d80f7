"""Short scripts, each a way to train with a distillation loss: uncompiled, then compiled."""

import os
import sys
from types import TracebackType

# Read by torch's C++ code when torch is imported: lines of the profiler that every measurement of
# memory would print, and warnings of the CPU's allocator about tensors older than a profile.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # trl_gkd takes its loss from there


def _explain_missing(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """One line in the place of a traceback if a library is not installed."""
    name = (getattr(error, "name", None) or "").split(".")[0]
    if not isinstance(error, ModuleNotFoundError) or name in ("", "examples", "torch_streamkl"):
        sys.__excepthook__(kind, error, traceback)
        return
    print(
        f'this example needs {name}, which is not installed: pip install -e ".[examples]" in the '
        "clone installs what all examples need",
        file=sys.stderr,
    )


if any(argument.startswith("examples.") for argument in sys.orig_argv):  # python -m examples.x
    sys.excepthook = _explain_missing
