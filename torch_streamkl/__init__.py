"""Streaming distillation losses: fused operators and the torch.compile backend "streamkl"."""

from typing import TYPE_CHECKING, Any

from torch_streamkl.attention.interface import attention_kl, attention_kl_varlen
from torch_streamkl.linear.interface import LinearKL, linear_kl
from torch_streamkl.rows.interface import row_program
from torch_streamkl.version import __version__

if TYPE_CHECKING:
    from torch_streamkl.fx_passes.backend import inductor_options
    from torch_streamkl.fx_passes.enable import disable, enable
    from torch_streamkl.fx_passes.explain import explain
    from torch_streamkl.fx_passes.reporting.report import Report
    from torch_streamkl.fx_passes.verify import Verification, verify

__all__ = [
    "LinearKL",
    "Report",
    "Verification",
    "__version__",
    "attention_kl",
    "attention_kl_varlen",
    "disable",
    "enable",
    "explain",
    "inductor_options",
    "linear_kl",
    "row_program",
    "verify",
]

_LAZY = {  # public names by the module of fx_passes that has them
    "Report": "reporting.report",
    "Verification": "verify",
    "disable": "enable",
    "enable": "enable",
    "explain": "explain",
    "inductor_options": "backend",
    "verify": "verify",
}


def __getattr__(name: str) -> Any:
    # the operators do not need the compiler: it is imported when it is asked for
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(f"torch_streamkl.fx_passes.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'torch_streamkl' has no attribute {name!r}")
