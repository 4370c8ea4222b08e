"""Swapping the attention inside any model: ``effattn.swap(model, backend)``.

The module is callable: ``effattn.swap(...)`` is ``effattn.swap.swap(...)``, beside ``effattn.swap.compare(...)``,
``effattn.swap.extend_positions(...)`` and ``effattn.swap.from_file(...)``. transformers is imported only for a model
that is made of it.
"""

import sys
from types import ModuleType
from typing import Any

from . import windows
from .drift import Comparison, Drift, compare
from .from_file import from_file
from .positions import extend_positions
from .sites import Site
from .swapping import Swap, swap

__all__ = ["Comparison", "Drift", "Site", "Swap", "compare", "extend_positions", "from_file", "swap", "windows"]


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Swap:
        return swap(*args, **kwargs)


_Callable.__call__.__doc__ = swap.__doc__
sys.modules[__name__].__class__ = _Callable
