"""Where a model attends: the modules that do, found in their code before anything runs.

A module is a site if it is an ``nn.MultiheadAttention``, or if its ``forward``, or a function that this reaches by
name, goes through the ``AttentionInterface`` of transformers, calls ``F.scaled_dot_product_attention``, or
``effattn.attention`` with the module's ``backend``. An attention that does its own softmax is found too, to be named
in an error.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import attention, attention_weights
from ..backend import Backend

TRANSFORMERS = "transformers"
MULTIHEAD = "nn.MultiheadAttention"
SDPA = "F.scaled_dot_product_attention"
EFFATTN = "effattn.attention"
OWN = "own"

ATTRIBUTE = "_effattn_site"  # where a served module keeps its site

_CALL = "scaled_dot_product_attention"
_DROPOUTS = ("attention_dropout", "attn_dropout", "attn_drop", "attention_probs_dropout_prob", "dropout_p", "dropout")
_OWN_SOFTMAX = frozenset({"softmax", "log_softmax", "logsumexp", "Softmax"})
_OTHER_KERNELS = frozenset(
    {"multi_head_attention_forward", "memory_efficient_attention", "flex_attention", "flash_attn_func"}
)


def _no_calls() -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros((), dtype=torch.int64)


@dataclass(eq=False)
class Site:
    """One place where a model attends.

    ``backend`` serves it; None means that it runs as it did, for the reason in ``note``. ``calls`` says how often
    the backend was asked since the swap; a checkpointed layer counts again when it is recomputed.
    """

    path: str
    kind: str
    backend: Backend | None = None
    note: str = ""
    # A tensor, because torch.compile would compile anew for every value of a plain number.
    _calls: Tensor = field(default_factory=_no_calls, repr=False)
    # A site that is not served within a model that is: what transformers knows its attention by.
    _implementation: str | None = field(default=None, repr=False)

    @property
    def calls(self) -> int:
        return int(self._calls)

    @property
    def layer(self) -> int | None:
        """The first number in the path: 3 in ``encoder.layer.3.attention.self``."""
        return next((int(name) for name in self.path.split(".") if name.isdigit()), None)

    def matches(self, selector: int | str) -> bool:
        """Whether ``selector`` means this site: its layer's number, or a pattern of its path or a parent's."""
        if isinstance(selector, int):
            return self.layer == selector
        names = self.path.split(".")
        return any(fnmatchcase(".".join(names[:end]), selector) for end in range(1, len(names) + 1))

    def count(self) -> None:
        self._calls.add_(1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """``effattn.attention`` by this site's backend."""
        assert self.backend is not None, f"{self.path} is not served"
        self.count()
        output = attention(query, key, value, backend=self.backend, **options)
        assert isinstance(output, Tensor)
        return output

    def weights(self, query: Tensor, key: Tensor, **options: Any) -> Tensor:
        """``effattn.attention_weights`` by this site's backend, in the queries' dtype: what models return."""
        assert self.backend is not None, f"{self.path} is not served"
        return attention_weights(query, key, backend=self.backend, **options).to(query.dtype)


def find_sites(model: nn.Module) -> dict[str, tuple[Site, nn.Module]]:
    """Every site of ``model`` and its module, by path, in the order of ``named_modules``."""
    kinds = ((path, module, kind_of(module)) for path, module in model.named_modules())
    return {path: (Site(path, kind), module) for path, module, kind in kinds if kind}


def kind_of(module: nn.Module) -> str | None:
    """The kind of site that a module is by itself, or None."""
    cls = type(module)
    if isinstance(module, nn.MultiheadAttention):
        return MULTIHEAD if cls.forward is nn.MultiheadAttention.forward else OWN
    if _is_torchs(cls):
        return None
    names = reachable_names(cls)  # type: ignore[arg-type]
    if EFFATTN in names:
        return EFFATTN if isinstance(getattr(module, "backend", None), Backend) else OWN
    if "ALL_ATTENTION_FUNCTIONS" in names:
        return TRANSFORMERS
    held = (value for value in vars(module).values() if callable(value) and not isinstance(value, type))
    if SDPA in names.union(*(_names_of_callable(value) for value in held)):
        return SDPA
    if names & _OTHER_KERNELS:
        return OWN
    if "attention" not in cls.__name__.lower() and "attn" not in cls.__name__.lower():
        return None
    softmax = names & _OWN_SOFTMAX or any(isinstance(child, nn.Softmax) for child in module.children())
    return OWN if softmax else None


def attention_dropout(module: nn.Module) -> float:
    """The rate at which a module drops attention weights now, by the names that it usually has; 0 in evaluation."""
    if not module.training:
        return 0.0
    values = (getattr(module, name, None) for name in _DROPOUTS)
    rates = (getattr(value, "p", value) for value in values)
    return next((rate for rate in rates if isinstance(rate, float)), 0.0)


@functools.cache
def reachable_names(cls: type) -> frozenset[str]:
    """Every name in what ``cls.forward`` reaches, methods and global functions, and ``"keyword="`` of every call."""
    return frozenset(_names_in(getattr(cls, "forward", None), cls, set()))


def _names_of_callable(value: Any) -> frozenset[str]:
    """The same for something that a module holds and may call: a function, a partial, an object with __call__."""
    while isinstance(value, functools.partial):
        value = value.func
    if value is F.scaled_dot_product_attention:
        return frozenset({SDPA})
    if isinstance(value, types.FunctionType):
        return frozenset(_names_in(value, None, set()))
    return frozenset(_names_in(getattr(value, "__call__", None), type(value), set()))  # noqa: B004


def _names_in(function: Any, cls: type | None, seen: set[Any]) -> Iterator[str]:
    function = _unwrapped(function)
    if not isinstance(function, types.FunctionType) or function in seen or _is_torchs(function):
        return
    seen.add(function)
    names = frozenset(_names_in_code(function.__code__))
    held = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    modules = [m for m in map(function.__globals__.get, names) if isinstance(m, types.ModuleType)]
    for scope in (function.__globals__, *map(vars, modules)):
        held += [scope[name] for name in names if name in scope]
    for base in cls.__mro__ if cls and "super" in names else ():
        held += [vars(base)[name] for name in names if name in vars(base)]
    held += [getattr(cls, name, None) for name in names]
    yield from names
    if _CALL in names and not _is_another(function.__globals__.get(_CALL, getattr(cls, _CALL, None))):
        yield SDPA
    for value in held:
        if value is F.scaled_dot_product_attention or _dispatches(value):
            yield SDPA
        elif value is attention:
            yield EFFATTN
        yield from _names_in(value, cls, seen)


def _dispatches(function: Any) -> bool:
    """Whether it is an attention function beside others that make the call: it may choose among them at run time."""
    function = _unwrapped(function)
    if not isinstance(function, types.FunctionType) or _is_torchs(function) or "." in function.__qualname__:
        return False
    if "attention" not in function.__name__ and "attn" not in function.__name__:
        return False
    functions = (f for f in map(_unwrapped, function.__globals__.values()) if isinstance(f, types.FunctionType))
    beside = (f for f in functions if f.__module__ == function.__module__)
    return not _is_another(function.__globals__.get(_CALL)) and any(_CALL in f.__code__.co_names for f in beside)


def _is_another(value: Any) -> bool:
    """Whether what goes by the name of PyTorch's call is a function of somebody's own."""
    return isinstance(_unwrapped(value), types.FunctionType)


def _unwrapped(value: Any) -> Any:
    """The function beneath a method and its decorators; anything else as it is."""
    return inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else value


def _names_in_code(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in_code(constant)
        elif isinstance(constant, tuple):  # the keywords of a call
            yield from (f"{name}=" for name in constant if isinstance(name, str))


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_torchs(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "").split(".")[0] == "torch"
