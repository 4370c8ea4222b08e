"""Efficient attention over long sequences: interchangeable backends behind one call, and honest measurements."""

from . import masks
from .attention import attention, pattern
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
    "density",
    "describe",
    "flops",
    "get",
    "masks",
    "names",
    "pattern",
    "register",
]
