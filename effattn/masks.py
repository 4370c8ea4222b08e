"""The mask algebra: who may attend to whom, and its dense oracle.

``True`` means *may attend*. Masks are joined with ``&`` and ``|``. Positions are absolute: row ``i`` of the
query stands at ``query_offset + i``, key ``j`` at ``j``.

A mask answers three questions, and every backend, reference and figure is built on those alone:

* ``allows(batch, head, row, key, query_offset)``: one predicate on broadcastable index tensors;
* ``coverage(rows, keys, query_offset)``: does a rectangle hold no, some or only allowed pairs? It may be
  cautious ("some"), never wrong;
* ``key_range(rows, key_len, query_offset)``: the keys outside of which no row of a range sees anything.

Engines that run eagerly may ask more sharply: ``for_batch`` looks at the tensors of one batch row, ``within`` leaves
out what a rectangle does not need.

``dense(...)`` evaluates the predicate everywhere: slow, obvious, and what everything else is tested against.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "And",
    "Causal",
    "Coverage",
    "Dense",
    "Documents",
    "Everything",
    "Global",
    "Mask",
    "Or",
    "Padding",
    "Taken",
    "Window",
    "band_of",
    "calm_padded_rows",
    "evaluate",
    "hide_padding",
    "pack",
    "padding_of",
    "unpack",
]

Range = tuple[int, int]  # half-open


class Coverage(IntEnum):
    """How much of a rectangle a mask allows. ``&`` is the minimum, ``|`` the maximum."""

    NONE = 0
    SOME = 1
    ALL = 2


class Mask:
    """What a query may attend to. Subclasses are frozen dataclasses."""

    def allows(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, query_offset: int) -> Tensor:
        """Whether row ``row`` may attend to key ``key``: a bool tensor that broadcasts with the indices."""
        raise NotImplementedError

    def coverage(self, rows: Range, keys: Range, query_offset: int) -> Coverage:
        """What is known, without evaluating it, of the rectangle ``rows`` x ``keys``."""
        return Coverage.SOME

    def key_range(self, rows: Range, key_len: int, query_offset: int) -> Range:
        """A range of keys outside of which no row in ``rows`` sees anything."""
        return 0, key_len

    def within(self, rows: Range, keys: Range, query_offset: int) -> Mask:
        """A mask, perhaps a simpler one, that agrees with this one on the rectangle ``rows`` x ``keys``."""
        return Everything() if self.coverage(rows, keys, query_offset) is Coverage.ALL else self

    def for_batch(self, index: int) -> Mask:
        """The mask of one batch row. Its ``coverage`` and ``key_range`` may look at tensors, which no tracer can."""
        return self

    def validate(self, batch_size: int, num_heads: int, query_len: int, key_len: int, query_offset: int) -> None:
        """Raise ``ValueError`` when the mask does not fit these sizes."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks that this one is joined from; empty for a leaf."""
        return ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the mask holds, its parts' included."""
        return tuple(t for part in self.parts for t in part.tensors)

    @property
    def is_relative(self) -> bool:
        """Whether the mask depends on the distance between row and key alone."""
        return False

    def place(self, batch: Tensor, row: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Row and key as the whole problem numbers them; differs from ``row, key`` in a ``Taken`` mask only."""
        return row, key

    def leaves(self) -> Iterator[Mask]:
        """Every mask in the tree that is not a join."""
        if self.parts:
            for part in self.parts:
                yield from part.leaves()
        else:
            yield self

    def kinds(self) -> tuple[type[Mask], ...]:
        """The classes in the tree, each once, without ``And`` and ``Everything``, which every backend understands."""
        found: list[type[Mask]] = [] if isinstance(self, And | Everything) else [type(self)]
        for part in self.parts:
            found += [kind for kind in part.kinds() if kind not in found]
        return tuple(found)

    def dense(
        self,
        batch_size: int,
        num_heads: int,
        query_len: int,
        key_len: int,
        query_offset: int | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The mask as a bool tensor ``[batch, heads, query_len, key_len]``. Quadratic on purpose: the oracle.

        ``query_offset=None`` means ``key_len - query_len``. ``device=None`` is that of the mask's tensors.
        """
        offset = key_len - query_len if query_offset is None else query_offset
        self.validate(batch_size, num_heads, query_len, key_len, offset)
        if device is None:
            device = self.tensors[0].device if self.tensors else "cpu"
        allowed = evaluate(
            self,
            torch.arange(batch_size, device=device),
            torch.arange(num_heads, device=device),
            torch.arange(query_len, device=device),
            torch.arange(key_len, device=device),
            offset,
        )
        return allowed.expand(batch_size, num_heads, query_len, key_len)

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return _join(And, self, other, neutral=Everything)

    def __or__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        if isinstance(self, Everything) or isinstance(other, Everything):
            return Everything()
        return _join(Or, self, other)


@dataclass(frozen=True)
class Everything(Mask):
    """Every query sees every key: no mask."""

    def allows(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, query_offset: int) -> Tensor:
        return torch.ones_like(row + key, dtype=torch.bool)

    def coverage(self, rows: Range, keys: Range, query_offset: int) -> Coverage:
        return Coverage.ALL

    @property
    def is_relative(self) -> bool:
        return True


@dataclass(frozen=True)
class Window(Mask):
    """A band: a query sees itself, ``left`` keys before it and ``right`` keys after it.

    The counts are exact; ``None`` means unbounded. With ``dilation`` d, only the keys at distances that are
    multiples of d count, so the band reaches ``left * d`` back (Longformer, Beltagy et al. 2020, section 3.1).
    """

    left: int | None
    right: int | None
    dilation: int = 1

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            value = getattr(self, name)
            if value is not None and not (_is_int(value) and value >= 0):
                raise ValueError(f"window: {name} must be None or an integer >= 0, got {value!r}")
        if not (_is_int(self.dilation) and self.dilation >= 1):
            raise ValueError(f"window: dilation must be an integer >= 1, got {self.dilation!r}")

    def allows(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, query_offset: int) -> Tensor:
        back = row + query_offset - key  # how far the key lies behind the query
        checks = []
        if self.left is not None:
            checks.append(back <= self.left * self.dilation)
        if self.right is not None:
            checks.append(back >= -self.right * self.dilation)
        if self.dilation > 1:
            checks.append(back % self.dilation == 0)
        return reduce(torch.logical_and, checks) if checks else torch.ones_like(back, dtype=torch.bool)

    def coverage(self, rows: Range, keys: Range, query_offset: int) -> Coverage:
        queries = _shift(rows, query_offset)
        least, most = queries[0] - (keys[1] - 1), queries[1] - 1 - keys[0]
        left = float("inf") if self.left is None else self.left * self.dilation
        right = float("inf") if self.right is None else self.right * self.dilation
        if least > left or most < -right:
            return Coverage.NONE
        if most <= left and least >= -right and self.dilation == 1:
            return Coverage.ALL
        return Coverage.SOME

    def key_range(self, rows: Range, key_len: int, query_offset: int) -> Range:
        queries = _shift(rows, query_offset)
        low = 0 if self.left is None else queries[0] - self.left * self.dilation
        high = key_len if self.right is None else queries[1] + self.right * self.dilation
        return _clip((low, high), key_len)

    @property
    def is_relative(self) -> bool:
        return True


@dataclass(frozen=True)
class Causal(Window):
    """A query sees itself and everything before it: ``Window(left=None, right=0)``."""

    left: None = None
    right: int = 0
    dilation: int = 1

    def __post_init__(self) -> None:
        if (self.left, self.right, self.dilation) != (None, 0, 1):
            raise ValueError("causal: takes no arguments; for a band use Window(left, right)")

    def __repr__(self) -> str:
        return "Causal()"


class _HoldsTensor(Mask):
    """Shared by masks that hold one tensor whose first dimension is the batch."""

    _field = ""

    def __repr__(self) -> str:
        tensor = getattr(self, self._field)
        return f"{type(self).__name__}({str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)})"

    def _check_batch_and_keys(self, batch_size: int, key_len: int) -> None:
        tensor = getattr(self, self._field)
        name = f"{type(self).__name__.lower()}: {self._field}"
        if tensor.shape[0] not in (1, batch_size) or tensor.shape[1] != key_len:
            raise ValueError(
                f"{name} must have shape [batch, key_len] = [{batch_size}, {key_len}], got {list(tensor.shape)}"
            )


@dataclass(frozen=True, eq=False, repr=False)
class Padding(_HoldsTensor):
    """Only the keys marked ``keep`` exist: ``[batch, key_len]``, bool or 0/1 integers (1 = a real token).

    What padding hides has no influence, whatever stands there. It hides keys; the rows of padded queries are
    computed like any other (and are 0 where they see nothing).
    """

    keep: Tensor
    _field = "keep"

    def __post_init__(self) -> None:
        keep = self.keep
        if not isinstance(keep, Tensor):
            raise ValueError(f"padding: keep must be a tensor, got {type(keep).__name__}")
        if keep.dim() != 2:
            raise ValueError(f"padding: keep must have shape [batch, key_len], got {list(keep.shape)}")
        if keep.is_floating_point() or keep.is_complex():
            raise ValueError(f"padding: keep must be bool or 0/1 integers, got {keep.dtype}")
        if keep.dtype != torch.bool:
            if not bool(((keep == 0) | (keep == 1)).all()):
                raise ValueError(f"padding: keep must hold only 0 and 1, got values up to {keep.max().item()}")
            object.__setattr__(self, "keep", keep.bool())

    @classmethod
    def from_lengths(cls, lengths: Tensor, key_len: int) -> Padding:
        """Right padding: the first ``lengths[b]`` of ``key_len`` keys are real. ``lengths`` is ``[batch]``."""
        lengths = torch.as_tensor(lengths)
        if lengths.dim() != 1 or lengths.is_floating_point():
            raise ValueError(f"padding: lengths must be integers [batch], got {lengths.dtype}{list(lengths.shape)}")
        if lengths.numel() and not (int(lengths.min()) >= 0 and int(lengths.max()) <= key_len):
            raise ValueError(f"padding: lengths must lie in 0..{key_len}, got {lengths.tolist()}")
        return cls(torch.arange(key_len, device=lengths.device) < lengths[:, None])

    def allows(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, query_offset: int) -> Tensor:
        return self.keep[_broadcast_index(batch, self.keep.shape[0]), key]

    def validate(self, batch_size: int, num_heads: int, query_len: int, key_len: int, query_offset: int) -> None:
        self._check_batch_and_keys(batch_size, key_len)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.keep,)

    def for_batch(self, index: int) -> Mask:
        return _PaddingOfOne(self.keep[index : index + 1] if self.keep.shape[0] > 1 else self.keep)


class _PaddingOfOne(Padding):
    """Padding of one batch row, read from its tensor."""

    @cached_property
    def _kept_before(self) -> list[int]:
        return [0, *accumulate(self.keep[0].tolist())]

    def coverage(self, rows: Range, keys: Range, query_offset: int) -> Coverage:
        kept = self._kept_before[keys[1]] - self._kept_before[keys[0]]
        return Coverage.ALL if kept == keys[1] - keys[0] else Coverage.SOME if kept else Coverage.NONE

    def key_range(self, rows: Range, key_len: int, query_offset: int) -> Range:
        before = self._kept_before
        return (bisect_right(before, 0) - 1, bisect_left(before, before[-1])) if before[-1] else (0, 0)


@dataclass(frozen=True, eq=False, repr=False)
class Documents(_HoldsTensor):
    """Attention stays within a document: ``ids`` is ``[batch, key_len]``, integers, one id a position."""

    ids: Tensor
    _field = "ids"

    def __post_init__(self) -> None:
        if not isinstance(self.ids, Tensor) or self.ids.dim() != 2:
            raise ValueError("documents: ids must be a tensor of shape [batch, key_len]")
        if self.ids.is_floating_point() or self.ids.is_complex() or self.ids.dtype == torch.bool:
            raise ValueError(f"documents: ids must be integers, got {self.ids.dtype}")

    def allows(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, query_offset: int) -> Tensor:
        batch = _broadcast_index(batch, self.ids.shape[0])
        return self.ids[batch, row + query_offset] == self.ids[batch, key]

    def validate(self, batch_size: int, num_heads: int, query_len: int, key_len: int, query_offset: int) -> None:
        self._check_batch_and_keys(batch_size, key_len)
        if query_len and not 0 <= query_offset <= key_len - query_len:
            raise ValueError(
                f"documents: queries stand at positions {query_offset}..{query_offset + query_len - 1}, "
                f"but ids are known for 0..{key_len - 1} only"
            )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.ids,)

    def for_batch(self, index: int) -> Mask:
        ids = self.ids[index : index + 1] if self.ids.shape[0] > 1 else self.ids
        in_order = bool((ids[0, 1:] >= ids[0, :-1]).all())
        return _DocumentsOfOne(ids) if in_order else self


class _DocumentsOfOne(Documents):
    """Documents of one batch row, one after the other in the order of their ids."""

    @cached_property
    def _list(self) -> list[int]:
        return self.ids[0].tolist()

    def coverage(self, rows: Range, keys: Range, query_offset: int) -> Coverage:
        queries = _shift(rows, query_offset)
        (first, last), (first_key, last_key) = ((self._list[r[0]], self._list[r[1] - 1]) for r in (queries, keys))
        if last < first_key or last_key < first:
            return Coverage.NONE
        return Coverage.ALL if first == last == first_key == last_key else Coverage.SOME

    def key_range(self, rows: Range, key_len: int, query_offset: int) -> Range:
        queries = _shift(rows, query_offset)
        return bisect_left(self._list, self._list[queries[0]]), bisect_right(self._list, self._list[queries[1] - 1])


@dataclass(frozen=True, eq=False, repr=False)
class Global(_HoldsTensor):
    """Some positions see everything and are seen by everything (Longformer, section 3.1).

    ``tokens`` is a tuple of positions that holds for every batch row, or a bool tensor ``[batch, key_len]``.
    """

    tokens: tuple[int, ...] | Tensor
    _field = "tokens"

    def __post_init__(self) -> None:
        if isinstance(self.tokens, Tensor):
            if self.tokens.dim() != 2 or self.tokens.dtype != torch.bool:
                raise ValueError(
                    "global: tokens as a tensor must be bool [batch, key_len], "
                    f"got {self.tokens.dtype}{list(self.tokens.shape)}"
                )
            return
        if not isinstance(self.tokens, tuple | list):
            raise ValueError(f"global: tokens must be a tuple of positions or a bool tensor, got {self.tokens!r}")
        tokens = tuple(self.tokens)
        for token in tokens:
            if not (_is_int(token) and token >= 0):
                raise ValueError(f"global: tokens must be positions >= 0, got {token!r}")
        object.__setattr__(self, "tokens", tuple(sorted(set(tokens))))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Global):
            return NotImplemented
        if isinstance(self.tokens, Tensor) or isinstance(other.tokens, Tensor):
            return self.tokens is other.tokens
        return self.tokens == other.tokens

    def __hash__(self) -> int:
        return hash((Global, id(self.tokens) if isinstance(self.tokens, Tensor) else self.tokens))

    def __repr__(self) -> str:
        return super().__repr__() if isinstance(self.tokens, Tensor) else f"Global({self.tokens})"

    def allows(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, query_offset: int) -> Tensor:
        position = row + query_offset
        if isinstance(self.tokens, Tensor):
            key_len = self.tokens.shape[1]
            if key_len == 0:
                return torch.zeros_like(position + key, dtype=torch.bool)
            batch = _broadcast_index(batch, self.tokens.shape[0])
            inside = (position >= 0) & (position < key_len)
            return self.tokens[batch, key] | (self.tokens[batch, position.clamp(0, key_len - 1)] & inside)
        return _is_one_of(key, self.tokens) | _is_one_of(position, self.tokens)

    def coverage(self, rows: Range, keys: Range, query_offset: int) -> Coverage:
        if isinstance(self.tokens, Tensor):
            return Coverage.SOME
        queries = _shift(rows, query_offset)
        touched = any(r[0] <= token < r[1] for token in self.tokens for r in (queries, keys))
        return Coverage.SOME if touched else Coverage.NONE

    def key_range(self, rows: Range, key_len: int, query_offset: int) -> Range:
        queries = _shift(rows, query_offset)
        if isinstance(self.tokens, Tensor) or any(queries[0] <= t < queries[1] for t in self.tokens):
            return 0, key_len
        if not self.tokens:
            return 0, 0
        return _clip((self.tokens[0], self.tokens[-1] + 1), key_len)

    def validate(self, batch_size: int, num_heads: int, query_len: int, key_len: int, query_offset: int) -> None:
        if isinstance(self.tokens, Tensor):
            self._check_batch_and_keys(batch_size, key_len)
        elif self.tokens and self.tokens[-1] >= max(key_len, query_offset + query_len):
            raise ValueError(
                f"global: tokens must be positions below {max(key_len, query_offset + query_len)}, "
                f"got {self.tokens[-1]}"
            )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tokens,) if isinstance(self.tokens, Tensor) else ()


@dataclass(frozen=True, eq=False, repr=False)
class Dense(_HoldsTensor):
    """Any mask at all, as a bool tensor broadcastable to ``[batch, heads, query_len, key_len]``."""

    allowed: Tensor
    _field = "allowed"

    def __post_init__(self) -> None:
        allowed = self.allowed
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            got = allowed.dtype if isinstance(allowed, Tensor) else type(allowed).__name__
            raise ValueError(
                f"dense: allowed must be a bool tensor (True = may attend), got {got}; an additive float mask is a bias"
            )
        if allowed.dim() > 4:
            raise ValueError(f"dense: allowed must have at most 4 dimensions, got {list(allowed.shape)}")
        while allowed.dim() < 4:
            allowed = allowed[None]
        object.__setattr__(self, "allowed", allowed)

    def allows(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, query_offset: int) -> Tensor:
        indices = (batch, head, row, key)
        return self.allowed[tuple(_broadcast_index(i, n) for i, n in zip(indices, self.allowed.shape, strict=True))]

    def validate(self, batch_size: int, num_heads: int, query_len: int, key_len: int, query_offset: int) -> None:
        sizes = (batch_size, num_heads, query_len, key_len)
        if any(got not in (1, want) for got, want in zip(self.allowed.shape, sizes, strict=True)):
            raise ValueError(
                "dense: allowed must be broadcastable to [batch, heads, query_len, key_len] = "
                f"{list(sizes)}, got {list(self.allowed.shape)}"
            )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.allowed,)


@dataclass(frozen=True, eq=False)
class Taken(Mask):
    """``mask`` seen from a selection of its rows and keys: row ``i`` here is row ``rows[i]`` there.

    ``rows`` and ``keys`` are a ``slice`` with start and step, an index tensor ``[batch or 1, n]`` in which -1 stands
    for nothing, or None for all. This is how a backend works on a part of a problem (every d-th position, the
    global tokens) without writing its mask anew. ``query_offset`` stays that of the whole problem.
    """

    mask: Mask
    rows: slice | Tensor | None = None
    keys: slice | Tensor | None = None

    def allows(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, query_offset: int) -> Tensor:
        row, key = self.place(batch, row, key)
        return self.mask.allows(batch, head, row.clamp(min=0), key.clamp(min=0), query_offset) & (
            (row >= 0) & (key >= 0)
        )

    def place(self, batch: Tensor, row: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return _take(self.rows, batch, row), _take(self.keys, batch, key)

    @property
    def is_relative(self) -> bool:
        if isinstance(self.rows, Tensor) or isinstance(self.keys, Tensor):
            return False
        return _affine(self.rows)[1] == _affine(self.keys)[1] and self.mask.is_relative

    def coverage(self, rows: Range, keys: Range, query_offset: int) -> Coverage:
        if isinstance(self.rows, Tensor) or isinstance(self.keys, Tensor):
            return Coverage.SOME
        return self.mask.coverage(_outer(self.rows, rows), _outer(self.keys, keys), query_offset)

    def key_range(self, rows: Range, key_len: int, query_offset: int) -> Range:
        if isinstance(self.rows, Tensor) or isinstance(self.keys, Tensor):
            return 0, key_len
        start, step = _affine(self.keys)
        outer_len = _outer(self.keys, (0, key_len))[1]
        low, high = self.mask.key_range(_outer(self.rows, rows), outer_len, query_offset)
        return _clip((-((start - low) // step), (high - 1 - start) // step + 1), key_len)

    def for_batch(self, index: int) -> Mask:
        return dataclasses.replace(self, mask=self.mask.for_batch(index))

    @property
    def parts(self) -> tuple[Mask, ...]:
        return (self.mask,)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.mask.tensors, *(i for i in (self.rows, self.keys) if isinstance(i, Tensor)))


@dataclass(frozen=True)
class _Join(Mask):
    masks: tuple[Mask, ...]
    _symbol = ""

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    @property
    def is_relative(self) -> bool:
        return all(mask.is_relative for mask in self.masks)

    def for_batch(self, index: int) -> Mask:
        return type(self)(tuple(mask.for_batch(index) for mask in self.masks))

    def validate(self, batch_size: int, num_heads: int, query_len: int, key_len: int, query_offset: int) -> None:
        for mask in self.masks:
            mask.validate(batch_size, num_heads, query_len, key_len, query_offset)

    def __repr__(self) -> str:
        return f" {self._symbol} ".join(f"({m!r})" if isinstance(m, _Join) else repr(m) for m in self.masks)


@dataclass(frozen=True, repr=False)
class And(_Join):
    """What all of ``masks`` allow; written ``a & b``."""

    _symbol = "&"

    def allows(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, query_offset: int) -> Tensor:
        return reduce(torch.logical_and, (m.allows(batch, head, row, key, query_offset) for m in self.masks))

    def coverage(self, rows: Range, keys: Range, query_offset: int) -> Coverage:
        # Of a list, not a generator, which torch.compile cannot trace.
        return min([mask.coverage(rows, keys, query_offset) for mask in self.masks])

    def key_range(self, rows: Range, key_len: int, query_offset: int) -> Range:
        ranges = [mask.key_range(rows, key_len, query_offset) for mask in self.masks]
        low, high = max(r[0] for r in ranges), min(r[1] for r in ranges)
        return low, max(low, high)

    def within(self, rows: Range, keys: Range, query_offset: int) -> Mask:
        everything: Mask = Everything()
        return reduce(Mask.__and__, (mask.within(rows, keys, query_offset) for mask in self.masks), everything)


@dataclass(frozen=True, repr=False)
class Or(_Join):
    """What any of ``masks`` allows; written ``a | b``."""

    _symbol = "|"

    def allows(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, query_offset: int) -> Tensor:
        return reduce(torch.logical_or, (m.allows(batch, head, row, key, query_offset) for m in self.masks))

    def coverage(self, rows: Range, keys: Range, query_offset: int) -> Coverage:
        return max([mask.coverage(rows, keys, query_offset) for mask in self.masks])

    def key_range(self, rows: Range, key_len: int, query_offset: int) -> Range:
        ranges = [r for r in (mask.key_range(rows, key_len, query_offset) for mask in self.masks) if r[0] < r[1]]
        return (min(r[0] for r in ranges), max(r[1] for r in ranges)) if ranges else (0, 0)

    def within(self, rows: Range, keys: Range, query_offset: int) -> Mask:
        seen = [m for m in self.masks if m.coverage(rows, keys, query_offset) is not Coverage.NONE]
        return reduce(Mask.__or__, (m.within(rows, keys, query_offset) for m in seen)) if seen else self


def evaluate(mask: Mask, batches: Tensor, heads: Tensor, rows: Tensor, keys: Tensor, query_offset: int) -> Tensor:
    """The predicate on the grid of four index vectors: bool, broadcastable to their four lengths."""
    allowed = mask.allows(batches[:, None, None, None], heads[:, None, None], rows[:, None], keys, query_offset)
    while allowed.dim() < 4:
        allowed = allowed[None]
    return allowed


def pack(mask: Mask) -> tuple[str, list[Tensor]]:
    """A mask as text and the tensors it holds: what fits into the schema of a custom operator."""
    tensors: list[Tensor] = []
    return _pack(mask, tensors), tensors


def unpack(packed: str, tensors: list[Tensor]) -> Mask:
    """The inverse of ``pack``; the text must come from there, since it is evaluated."""
    names = {
        cls.__name__: cls for cls in (And, Causal, Dense, Documents, Everything, Global, Or, Padding, Taken, Window)
    }
    mask = eval(packed, {"__builtins__": {}, "slice": slice, "tensors": tensors, **names})
    assert isinstance(mask, Mask)
    return mask


def _pack(part: Any, tensors: list[Tensor]) -> str:
    if isinstance(part, Tensor):
        tensors.append(part)
        return f"tensors[{len(tensors) - 1}]"
    if isinstance(part, Causal):
        return "Causal()"
    if isinstance(part, Mask):
        fields = [_pack(getattr(part, f.name), tensors) for f in dataclasses.fields(part)]  # type: ignore[arg-type]
        return f"{type(part).__name__}({', '.join(fields)})"
    if isinstance(part, tuple):
        return "(" + "".join(f"{_pack(item, tensors)}, " for item in part) + ")"
    return repr(part)


def conjuncts(mask: Mask) -> tuple[Mask, ...]:
    """The masks that must all hold."""
    return mask.masks if isinstance(mask, And) else (mask,)


def band_of(mask: Mask) -> tuple[Window, Mask]:
    """``mask`` as ``band & rest``: all plain windows (causal is one) joined into one, and what is left."""
    bands = [m for m in conjuncts(mask) if isinstance(m, Window) and m.dilation == 1]
    everything: Mask = Everything()
    rest = reduce(Mask.__and__, (m for m in conjuncts(mask) if m not in bands), everything)
    lefts = [m.left for m in bands if m.left is not None]
    rights = [m.right for m in bands if m.right is not None]
    return Window(min(lefts, default=None), min(rights, default=None)), rest


def padding_of(mask: Mask) -> Tensor | None:
    """The keys ``[batch or 1, key_len or 1]`` that padding keeps, or None where nothing is padded.

    A dense mask that is the same for every head and row hides keys as padding does, and counts as such.
    """
    if isinstance(mask, Padding):
        return mask.keep
    if isinstance(mask, Dense):
        return mask.allowed[:, 0, 0] if mask.allowed.shape[1:3] == (1, 1) else None
    kept = [padding_of(part) for part in mask.parts] if isinstance(mask, And | Or) else []
    known = [keep for keep in kept if keep is not None]
    if isinstance(mask, Or):  # hidden is what every side hides
        return reduce(torch.logical_or, known) if len(known) == len(kept) else None
    return reduce(torch.logical_and, known) if known else None


def hide_padding(mask: Mask, *tensors: Tensor) -> tuple[Tensor, ...]:
    """``tensors`` ``[batch, heads, key_len, dim]`` with 0 where padding hides the key, and no gradient there.

    A weight of 0 is not enough: 0 x NaN is NaN.
    """
    keep = padding_of(mask)
    if keep is None:
        return tensors
    hidden = ~keep[:, None, :, None]
    return tuple(tensor.masked_fill(hidden, 0.0) for tensor in tensors)


def calm_padded_rows(mask: Mask, query: Tensor, query_offset: int) -> Tensor:
    """``query`` of self-attention with 0 for what is not finite in rows whose own position is padding.

    Such rows are computed like any other, and nobody looks at them; but the gradient of a key that they see is
    their weight's, 0, times the query, and 0 x NaN is NaN.
    """
    keep = padding_of(mask)
    if keep is None or query_offset != 0 or keep.shape[1] != query.shape[2]:
        return query
    return query.masked_fill(~keep[:, None, :, None] & ~query.isfinite(), 0.0)


def _join(kind: Any, left: Mask, right: Mask, neutral: type[Mask] | None = None) -> Mask:
    masks: list[Mask] = []
    for side in (left, right):
        for mask in side.masks if isinstance(side, kind) else (side,):
            if not (neutral and isinstance(mask, neutral)) and mask not in masks:
                masks.append(mask)
    if not masks:
        return Everything()
    return masks[0] if len(masks) == 1 else kind(tuple(masks))


def _take(selection: slice | Tensor | None, batch: Tensor, index: Tensor) -> Tensor:
    if isinstance(selection, Tensor):
        return selection[_broadcast_index(batch, selection.shape[0]), index]
    start, step = _affine(selection)
    return index * step + start


def _affine(selection: slice | None) -> tuple[int, int]:
    return (0, 1) if selection is None else (selection.start or 0, selection.step or 1)


def _outer(selection: slice | None, inner: Range) -> Range:
    start, step = _affine(selection)
    return start + inner[0] * step, start + (inner[1] - 1) * step + 1


def _shift(rows: Range, query_offset: int) -> Range:
    return rows[0] + query_offset, rows[1] + query_offset


def _broadcast_index(index: Tensor, size: int) -> Tensor:
    """``index``, or zeros that broadcast against it where the dimension has one entry for all."""
    return index if size > 1 else index.new_zeros((1,) * index.dim())


def _is_one_of(position: Tensor, tokens: tuple[int, ...]) -> Tensor:
    hits = (position == token for token in tokens)
    return reduce(torch.logical_or, hits, torch.zeros_like(position, dtype=torch.bool))


def _clip(keys: Range, key_len: int) -> Range:
    low = min(max(keys[0], 0), key_len)
    return low, min(max(keys[1], low), key_len)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
