"""Computes distillation losses without score- or logit-sized tensors.

- Operators: `attention_kl`, `attention_kl_varlen`, `attention_topk_kl`, `linear_kl`, `LinearKL`,
  `linear_topk_kl` and `row_program`.
- Compiling: ``torch.compile(step, backend="streamkl")`` replaces naive losses by operators.
  `inductor_options` and `enable` do the same for compiler options and for trainers.
- Reports: `explain`, `reports` and `verify` say what is fused, and whether it is right.

Several devices: `torch_streamkl.distributed`. Importing this package loads no compiler.
"""

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_streamkl.attention.interface import attention_kl, attention_kl_varlen
from torch_streamkl.linear.interface import LinearKL, linear_kl
from torch_streamkl.rows.interface import row_program
from torch_streamkl.topk.interface import linear_topk_kl
from torch_streamkl.version import __version__

if TYPE_CHECKING:
    from torch_streamkl.attention_topk.interface import attention_topk_kl
    from torch_streamkl.fx_passes.backend import UnfusedError, inductor_options, reports
    from torch_streamkl.fx_passes.enable import disable, enable
    from torch_streamkl.fx_passes.explain import explain
    from torch_streamkl.fx_passes.options import RewriteOptions
    from torch_streamkl.fx_passes.reporting.report import Report
    from torch_streamkl.fx_passes.verify import Verification, verify

__all__ = [
    "LinearKL",
    "Report",
    "RewriteOptions",
    "UnfusedError",
    "Verification",
    "__version__",
    "attention_kl",
    "attention_kl_varlen",
    "attention_topk_kl",
    "disable",
    "enable",
    "explain",
    "inductor_options",
    "linear_kl",
    "linear_topk_kl",
    "reports",
    "row_program",
    "verify",
]

_LAZY = {  # public names by the module that has them, which an import does not need
    "Report": "fx_passes.reporting.report",
    "RewriteOptions": "fx_passes.options",
    "UnfusedError": "fx_passes.backend",
    "Verification": "fx_passes.verify",
    "attention_topk_kl": "attention_topk.interface",
    "disable": "fx_passes.enable",
    "enable": "fx_passes.enable",
    "explain": "fx_passes.explain",
    "inductor_options": "fx_passes.backend",
    "reports": "fx_passes.backend",
    "verify": "fx_passes.verify",
}


def __getattr__(name: str) -> Any:
    # the operators do not need the compiler: it is imported when it is asked for
    if name in _LAZY:
        return getattr(importlib.import_module(f"torch_streamkl.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'torch_streamkl' has no attribute {name!r}")


def _import_passes_of_a_clone() -> None:
    # An installed package has fx_passes/ inside of this folder, a clone has it next to it.
    # In a clone this folder shadows the installed package: it has to be importable by itself.
    # (The folder above as an entry of __path__ would make tests and bench part of the package.)
    folder = Path(__file__).resolve().parent
    source = folder.parent / "fx_passes" / "__init__.py"
    if (folder / "fx_passes").is_dir() or not source.is_file():
        return
    name = "torch_streamkl.fx_passes"
    spec = importlib.util.spec_from_file_location(
        name, source, submodule_search_locations=[str(source.parent)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # an empty module: its parts are imported later
    sys.modules[name] = globals()["fx_passes"] = module


_import_passes_of_a_clone()
