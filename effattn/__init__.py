"""Efficient attention over long sequences: interchangeable backends behind one call, and honest measurements."""

import importlib
from typing import Any

from . import masks
from .attention import attention, attention_weights, pattern
from .backend import (
    Backend,
    Capabilities,
    Overview,
    Request,
    UnsupportedError,
    describe,
    get,
    names,
    register,
)
from .cost import attended_pairs, density, flops
from .masks import Causal, Dense, Documents, Everything, Global, Mask, Padding, Window

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Models and swapping, on first use: ``import effattn`` alone stays light."""
    if name in ("nn", "swap"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Backend",
    "Capabilities",
    "Causal",
    "Dense",
    "Documents",
    "Everything",
    "Global",
    "Mask",
    "Overview",
    "Padding",
    "Request",
    "UnsupportedError",
    "Window",
    "attended_pairs",
    "attention",
    "attention_weights",
    "density",
    "describe",
    "flops",
    "get",
    "masks",
    "names",
    "nn",
    "pattern",
    "register",
    "swap",
]
