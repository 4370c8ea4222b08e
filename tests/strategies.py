"""What property-based tests draw: sizes, masks joined from random leaves, and parts of a problem.

Tensors come from a drawn seed, not entry by entry: that is faster, and a failing example prints as one number.
"""

from dataclasses import dataclass, replace

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from effattn.masks import Causal, Dense, Documents, Everything, Global, Mask, Padding, Window


def examples(count: int) -> settings:
    """``count`` examples, the same in every run, however slow the machine."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


@dataclass(frozen=True)
class Sizes:
    batch_size: int
    num_heads: int
    query_len: int
    key_len: int
    query_offset: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch_size, self.num_heads, self.query_len, self.key_len

    def indices(self) -> tuple[Tensor, ...]:
        return tuple(torch.arange(n) for n in self.shape)


@st.composite
def sizes(draw: st.DrawFn, longest: int = 20) -> Sizes:
    """Any lengths, often equal ones; queries at the end of the keys, within them, or off either end."""
    key_len = draw(st.integers(1, longest))
    query_len = draw(st.one_of(st.just(key_len), st.integers(1, longest)))
    offset = draw(st.one_of(st.just(key_len - query_len), st.integers(-2 * longest, 2 * longest)))
    return Sizes(draw(st.integers(1, 3)), draw(st.integers(1, 2)), query_len, key_len, offset)


def square_sizes(longest: int = 20) -> st.SearchStrategy[Sizes]:
    """As many queries as keys, at the keys' positions."""
    return st.builds(lambda of: replace(of, query_len=of.key_len, query_offset=0), sizes(longest))


@st.composite
def leaves(draw: st.DrawFn, of: Sizes) -> Mask:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    reach = st.one_of(st.none(), st.integers(0, 6), st.just(100))

    def either(size: int) -> int:
        return draw(st.sampled_from([1, size]))

    def bits(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < draw(st.sampled_from([0.05, 0.5, 0.95]))

    def positions() -> tuple[int, ...]:
        past_last = max(of.key_len, of.query_offset + of.query_len)
        return tuple(draw(st.lists(st.integers(0, past_last - 1), max_size=3)))

    def ids() -> Tensor:
        ids = torch.randint(3, (either(of.batch_size), of.key_len), generator=generator)
        return ids.sort(-1).values if draw(st.booleans()) else ids  # packed one after the other, or anyhow

    kinds = {
        "everything": Everything,
        "causal": Causal,
        "window": lambda: Window(draw(reach), draw(reach)),
        "dilated": lambda: Window(draw(reach), draw(reach), dilation=draw(st.integers(2, 30))),
        "padding": lambda: Padding(bits(either(of.batch_size), of.key_len)),
        "global": lambda: Global(positions()),
        "ragged global": lambda: Global(bits(either(of.batch_size), of.key_len)),
        "dense": lambda: Dense(bits(*(either(n) for n in of.shape))),
    }
    if 0 <= of.query_offset <= of.key_len - of.query_len:  # elsewhere a query has no document
        kinds["documents"] = lambda: Documents(ids())
    return kinds[draw(st.sampled_from(sorted(kinds)))]()


def masks(of: Sizes) -> st.SearchStrategy[Mask]:
    """Trees of ``&`` and ``|`` over every kind of mask."""

    def join(inner: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
        return st.builds(Mask.__and__, inner, inner) | st.builds(Mask.__or__, inner, inner)

    return st.recursive(leaves(of), join, max_leaves=5)


@st.composite
def problems(draw: st.DrawFn, longest: int = 20) -> tuple[Sizes, Mask]:
    """Sizes, and a mask that fits them."""
    of = draw(sizes(longest))
    return of, draw(masks(of))
