"""What a backend is, what it can do, and the registry.

A backend is a frozen dataclass: its fields are its parameters, and it has no weights and no state. It says what
it attends to (``pattern``), computes it (``attend``), and declares what it can do (``capabilities``). What it
cannot do is refused with every reason; nothing falls back silently.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from . import reference
from .dropout import draw_seed
from .masks import Causal, Dense, Documents, Everything, Global, Mask, Or, Padding, Window

__all__ = [
    "Backend",
    "Capabilities",
    "Overview",
    "Request",
    "UnsupportedError",
    "describe",
    "get",
    "names",
    "register",
]

_MOST_NUMBERS = 2**24  # of a range in a spec
ENTRY_POINTS = "effattn.backends"

ALL_MASKS = (Causal, Window, Padding, Global, Documents, Dense, Or)
ALL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class UnsupportedError(ValueError):
    """A backend cannot do what was asked. ``reasons`` holds every reason, as "requested X; supported Y"."""

    def __init__(self, backend: object, reasons: list[str]) -> None:
        self.backend = str(backend)
        self.reasons = tuple(reasons)
        super().__init__(f"{backend} cannot do this:" + "".join(f"\n  - {reason}" for reason in reasons))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.backend, list(self.reasons))


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do, as data. The contract tests what is declared, and that the rest is refused."""

    masks: Collection[type[Mask]] = ALL_MASKS
    bias: bool = True
    bias_grad: bool = True
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES
    devices: tuple[str, ...] = ("cpu", "cuda")
    max_head_dim: int | None = None
    value_head_dim: bool = True  # a head_dim of the values that differs from the queries'
    grouped_heads: bool = True
    cross_length: bool = True  # query_len != key_len
    query_offset: bool = True  # an offset other than key_len - query_len
    dropout: bool = True
    backward: bool = True
    lse: bool = True
    lse_grad: bool = True  # without, the log-sum-exp is for calls that record no gradient
    deterministic: bool = True
    pattern: bool = True  # it is a softmax over the keys of its pattern; without, only its total error is known


@dataclass(frozen=True)
class Request:
    """One call, reduced to what decides whether and how it can be served: no data, only shapes and kinds."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    query_len: int
    key_len: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    mask: Mask = dataclasses.field(default_factory=Everything)
    query_offset: int = 0
    bias: bool = False
    bias_grad: bool = False
    dropout_p: float = 0.0
    backward: bool = False
    return_lse: bool = False

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        dropout_p: float = 0.0,
        query_offset: int | None = None,
        return_lse: bool = False,
    ) -> Request:
        """The request that these arguments of ``effattn.attention`` make."""
        grad = torch.is_grad_enabled()
        batch_size, num_heads, query_len, head_dim = query.shape
        return cls(
            batch_size=batch_size,
            num_heads=num_heads,
            num_kv_heads=key.shape[1],
            query_len=query_len,
            key_len=key.shape[2],
            head_dim=head_dim,
            value_dim=value.shape[3],
            dtype=query.dtype,
            device=query.device.type,
            mask=Everything() if mask is None else mask,
            query_offset=key.shape[2] - query_len if query_offset is None else query_offset,
            bias=bias is not None,
            bias_grad=bias is not None and bias.requires_grad and grad,
            dropout_p=dropout_p,
            backward=grad and any(t.requires_grad for t in (query, key, value, bias) if t is not None),
            return_lse=return_lse,
        )


class Backend:
    """Base of all backends; a subclass is a frozen dataclass in a file of its own.

    Override ``pattern`` where the backend attends to less than the caller's mask allows, and ``attend`` to
    compute it. A subclass that overrides ``pattern`` alone works at once, through the dense reference of that
    pattern: slow, exact, and enough to measure an idea's error before writing its kernel.
    """

    name: ClassVar[str]

    @property
    def capabilities(self) -> Capabilities:
        """What the backend can do with these fields."""
        return Capabilities()

    def unavailable(self) -> str | None:
        """Why the backend cannot run on this machine at all, or None."""
        return None

    def reasons(self, request: Request) -> list[str]:
        """Why this request cannot be served: one line each, "requested X; supported Y". Empty: it can.

        Subclasses add to ``super().reasons(request)`` what capabilities cannot say.
        """
        able, reasons = self.capabilities, []

        def need(fits: bool, requested: str, supported: str) -> None:
            # Filled in where it is said alone: to format a size makes torch.compile compile for that size alone.
            if not fits:
                corner = request.key_len - request.query_len
                reasons.append(f"requested {requested}; supported {supported}".format(r=request, corner=corner))

        absent = self.unavailable()
        if absent is not None:
            reasons.append(absent)
        for kind in request.mask.kinds():
            if kind not in able.masks:
                supported = ", ".join(sorted(kind.__name__ for kind in able.masks)) or "no masks"
                need(False, f"a mask of {kind.__name__}", supported)
        need(able.bias or not request.bias, "a bias", "none")
        need(able.bias_grad or not request.bias_grad, "a gradient for the bias", "a bias without one")
        need(request.dtype in able.dtypes, _dtype_name(request.dtype), ", ".join(map(_dtype_name, able.dtypes)))
        need(request.device in able.devices, f"device {request.device}", ", ".join(able.devices))
        if able.max_head_dim is not None:
            widest = max(request.head_dim, request.value_dim)
            need(widest <= able.max_head_dim, f"head_dim {widest}", f"up to {able.max_head_dim}")
        need(
            able.value_head_dim or request.value_dim == request.head_dim,
            "value head_dim {r.value_dim}",
            "that of the queries, {r.head_dim}",
        )
        need(
            able.grouped_heads or request.num_heads == request.num_kv_heads,
            "{r.num_heads} query heads on {r.num_kv_heads} key heads",
            "equal numbers",
        )
        need(
            able.cross_length or request.query_len == request.key_len,
            "query_len {r.query_len} with key_len {r.key_len}",
            "equal lengths",
        )
        need(
            able.query_offset or request.query_offset == request.key_len - request.query_len,
            "query_offset {r.query_offset}",
            "key_len - query_len = {corner}",
        )
        need(able.dropout or request.dropout_p == 0, f"dropout_p {request.dropout_p}", "0")
        need(able.backward or not request.backward, "a backward pass", "forward only")
        need(able.lse or not request.return_lse, "the log-sum-exp", "the output only")
        both = request.return_lse and request.backward
        need(able.lse_grad or not (able.lse and both), "the log-sum-exp with a backward pass", "either of the two")
        return reasons

    def check(self, request: Request) -> None:
        """Raise ``UnsupportedError`` with every reason why ``request`` cannot be served."""
        reasons = self.reasons(request)
        if reasons:
            raise UnsupportedError(self, reasons)

    def resolve(self, request: Request) -> str:
        """Which implementation serves ``request``; it depends on shapes, dtype and device alone."""
        return "dense reference" if type(self).attend is Backend.attend else "torch"

    def pattern(self, query: Tensor, key: Tensor, *, mask: Mask, query_offset: int) -> Mask:
        """What the backend effectively attends to under ``mask``. Exact backends return ``mask`` itself."""
        return mask

    def reference_bias(
        self, query: Tensor, key: Tensor, *, mask: Mask, query_offset: int
    ) -> reference.BiasFunction | None:
        """What the backend adds to the scores of its pattern, as a function of (batch, head, row, key), or None.

        For backends that weigh the pairs of their pattern, such as one that counts a key several times.
        """
        return None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask,
        bias: Tensor | None,
        scale: float,
        dropout_p: float,
        query_offset: int,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The output ``[B, H, L, Dv]`` and, where asked for, the log-sum-exp ``[B, H, L]`` in at least float32.

        Called by ``effattn.attention``, which has checked every argument, refused what ``reasons`` refuses,
        filled in the defaults and put zeros where padding hides keys and values. No length is 0 here.
        """
        output, lse = reference.attention(
            query,
            key,
            value,
            mask=self.pattern(query, key, mask=mask, query_offset=query_offset),
            bias=bias,
            scale=scale,
            query_offset=query_offset,
            dropout_p=dropout_p,
            dropout_seed=draw_seed() if dropout_p else 0,
            dtype=torch.promote_types(query.dtype, torch.float32),
        )
        return output.to(query.dtype), lse if return_lse else None

    def __str__(self) -> str:
        """The spec string that ``effattn.get`` turns back into this backend: only fields off their default."""
        changed = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)  # type: ignore[arg-type]
            if getattr(self, f.name) != f.default
        }
        return self.name + (f"({', '.join(f'{k}={literal(v)}' for k, v in changed.items())})" if changed else "")

    def _require(self, fits: bool, field: str, allowed: str) -> None:
        """For ``__post_init__``: refuse a field's value with the one message form."""
        if not fits:
            raise ValueError(f"{self.name}: {field} must be {allowed}, got {getattr(self, field)!r}")

    def _require_int(self, field: str, minimum: int, optional: bool = False) -> None:
        value = getattr(self, field)
        is_int = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        allowed = f"an integer >= {minimum}" + (" or None" if optional else "")
        self._require(is_int or (optional and value is None), field, allowed)


_registry: dict[str, type[Backend]] = {}
_parsed: dict[str, Backend] = {}  # what spec strings have given so far
_missing: dict[str, str] = {}  # entry points that could not be imported: name -> reason
_loaded: set[str] = set()  # where backends have been looked for

B = TypeVar("B", bound=type[Backend])


def register(cls: B) -> B:
    """Class decorator: make a frozen dataclass that extends ``Backend`` available under its ``name``."""
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise ValueError(f"register: needs a subclass of effattn.Backend, got {cls!r}")
    name = cls.__dict__.get("name")
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"register: {cls.__name__}.name must be an identifier such as 'my_attention', got {name!r}")
    params = cls.__dict__.get("__dataclass_params__")
    if params is None or not params.frozen:
        raise ValueError(
            f"register: {cls.__name__} must be a frozen dataclass; put @dataclass(frozen=True) below @register"
        )
    without = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]  # type: ignore[arg-type]
    if without:
        raise ValueError(f"register: every field of {cls.__name__} needs a default, {', '.join(without)} has none")
    known = _registry.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"register: the name {name!r} is taken by {known.__module__}.{known.__qualname__}")
    _registry[name] = cls
    _parsed.clear()
    return cls


def names() -> tuple[str, ...]:
    """The registered backends, in alphabetical order."""
    _discover()
    return tuple(sorted(_registry))


def get(spec: str | Backend, **fields: Any) -> Backend:
    """A backend from its name or a spec string such as ``"lsh(num_hashes=8)"``; ``fields`` override.

    Raises ``ValueError`` for a name that is not registered (and suggests the nearest), a field that the backend
    does not have, or a value out of range. Within ``torch.compile``, pass a ``Backend``, or a spec string that was
    used before: parsing one cannot be traced.
    """
    if isinstance(spec, Backend):
        if not fields:
            return spec
        _check_fields(type(spec), fields)
        return dataclasses.replace(spec, **fields)  # type: ignore[type-var]
    if not isinstance(spec, str):
        raise ValueError(f"backend: must be a spec string or a Backend, got {type(spec).__name__}")
    if not fields and spec in _parsed:  # no more than a lookup, so that torch.compile can follow it
        return _parsed[spec]
    name, parsed = _parse(spec)
    _discover()
    if name not in _registry:
        if name in _missing:
            raise ValueError(f"backend: {name!r} could not be imported: {_missing[name]}")
        near = difflib.get_close_matches(name, _registry, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"backend: unknown name {name!r}; {hint}registered are {', '.join(names())}")
    cls = _registry[name]
    given = {**parsed, **fields}
    _check_fields(cls, given)
    backend = cls(**given)
    if not fields:
        _parsed[spec] = backend
    return backend


@dataclass(frozen=True)
class Overview:
    """What is registered, what of it runs on a device, and why the rest does not. Prints as a table."""

    device: str
    rows: tuple[Mapping[str, str], ...]

    def __str__(self) -> str:
        columns = ("backend", "runs", "what it is")
        table = [columns, *(tuple(row[c] for c in columns) for row in self.rows)]
        widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
        lines.insert(1, "  ".join("-" * w for w in widths))
        return f"effattn backends on {self.device}\n" + "\n".join(lines)

    __repr__ = __str__


def describe(device: str | None = None) -> Overview:
    """A table of the registered backends: whether each runs on ``device`` (None: CUDA if there is one), or why not."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for name in names():
        backend = get(name)
        if device.partition(":")[0] == "cuda" and not torch.cuda.is_available():
            reasons = ["this machine has no CUDA device"]
        else:
            reasons = backend.reasons(Request(1, 1, 1, 1, 1, 8, 8, dtype=torch.float32, device=device))
        summary = (type(backend).__doc__ or "").strip().split("\n")[0].rstrip(".")
        fields = ", ".join(f"{f.name}={f.default!r}" for f in dataclasses.fields(backend))  # type: ignore[arg-type]
        rows.append(
            {
                "backend": name,
                "fields": fields,
                "runs": "yes" if not reasons else "no: " + "; ".join(reasons),
                "what it is": summary,
            }
        )
    rows += [
        {"backend": name, "fields": "", "runs": f"no: {reason}", "what it is": "a third-party package"}
        for name, reason in sorted(_missing.items())
    ]
    return Overview(device, tuple(rows))


def _discover() -> None:
    """Import every module of ``effattn.backends`` and every entry point of that group, once."""
    if not _loaded:
        package = importlib.import_module(ENTRY_POINTS)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{ENTRY_POINTS}.{module.name}")
        for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
            try:
                point.load()
            except ImportError as error:
                _missing[point.name] = str(error)
        _loaded.add(ENTRY_POINTS)


def _check_fields(cls: type[Backend], given: Collection[str]) -> None:
    allowed = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for field in given:
        if field not in allowed:
            near = difflib.get_close_matches(field, allowed, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{cls.name}: unknown field {field!r}; {hint}it has {', '.join(allowed) or 'none'}")


def _parse(spec: str) -> tuple[str, dict[str, Any]]:
    form = "backend: a spec looks like 'lsh' or 'lsh(num_hashes=8, bucket_size=64)'"
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(f"{form}, got {spec!r}") from None
    if isinstance(tree, ast.Name):
        return tree.id, {}
    if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)) or tree.args:
        raise ValueError(f"{form}, got {spec!r}")
    fields: dict[str, Any] = {}
    for keyword in tree.keywords:
        if keyword.arg is None:
            raise ValueError(f"{form}, got {spec!r}")
        if keyword.arg in fields:
            raise ValueError(f"{tree.func.id}: {keyword.arg} must be given once, got {spec!r}")
        try:
            fields[keyword.arg] = _value(keyword.value)
        except OverflowError:
            raise ValueError(
                f"{tree.func.id}: {keyword.arg} must be a range of at most {_MOST_NUMBERS} numbers, "
                f"got {ast.unparse(keyword.value)!r}"
            ) from None
        except (ValueError, TypeError):
            raise ValueError(
                f"{tree.func.id}: {keyword.arg} must be a literal such as 8, 'auto', None or range(64), "
                f"got {ast.unparse(keyword.value)!r}"
            ) from None
    return tree.func.id, fields


def literal(value: Any) -> str:
    """A field's value as a spec string has it: its repr, but ``range(64)`` for more than four consecutive numbers."""
    if not isinstance(value, tuple):
        return repr(value)
    if any(isinstance(each, tuple) for each in value):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    is_run = (
        len(value) > 4
        and all(type(each) is int for each in value)
        and all(after - before == 1 for before, after in pairwise(value))
    )
    return f"range({f'{value[0]}, ' if value[0] else ''}{value[-1] + 1})" if is_run else repr(value)


def _value(node: ast.expr) -> Any:
    """What ``literal`` wrote; ``ValueError``, ``TypeError`` or ``OverflowError`` for what is none."""
    if isinstance(node, ast.Tuple):
        return tuple(map(_value, node.elts))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range" and not node.keywords:
        numbers = range(*map(ast.literal_eval, node.args))
        if len(numbers) > _MOST_NUMBERS:
            raise OverflowError
        return tuple(numbers)
    return ast.literal_eval(node)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
