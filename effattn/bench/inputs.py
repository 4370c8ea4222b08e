"""Query, key and value to measure on: drawn at random, or captured from a real model.

The input decides what an error means. In `gaussian` no key matters more than another, so that dropping any
hurts and none stands out; `clustered` has the structure that hashing looks for; `heavy_tailed` has
outliers, hard on low precision; `captured` is what a real model attends to, and the one to judge
approximations by. A new kind of random input is one function under `@_drawn`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Generator, Tensor

from effattn.bench.capture import CaptureSource, captured_info, load_captured

_NUM_CLUSTERS = 64


@dataclass(frozen=True)
class Inputs:
    """What a cell is measured on."""

    query: Float[Tensor, "batch heads seq head_dim"]
    key: Float[Tensor, "batch kv_heads seq head_dim"]
    value: Float[Tensor, "batch kv_heads seq value_dim"]
    scale: float
    description: str


@dataclass(frozen=True)
class HeadShape:
    """The part of the shape that a model fixes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def kinds() -> tuple[str, ...]:
    """The kinds that `make_inputs` knows."""
    return (*sorted(_DRAWN), "captured")


def make_inputs(
    kind: str,
    *,
    batch_size: int,
    num_heads: int | None,
    num_kv_heads: int | None,
    seq_len: int,
    head_dim: int | None,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    source: CaptureSource | None = None,
) -> Inputs:
    """Query `[B, H, N, D]`, key and value `[B, H_kv, N, D]` of one kind; equal arguments give equal bits.

    Made in float32 on the CPU, random kinds by a generator of their own, then cast and moved: every device
    and dtype sees the same numbers up to rounding, and torch's global generator is untouched.

    Args:
        kind: one of `kinds()`.
        batch_size: for `captured` the number of layers: row b holds layer b of the source's list.
        num_heads, num_kv_heads, head_dim: num_heads a multiple of num_kv_heads. For `captured` None means the
            model's own, and a number must equal that.
        seq_len: tokens; for `captured` the first ones of the text.
        seed: of the draw; `captured` draws nothing.
        source: for `captured`, by default SmolLM2 reading Python's standard library; no other kind takes one.

    Raises:
        ValueError: for an unknown kind, a shape that does not fit, or a source that cannot give it.
    """
    _check_kind(kind)
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    for name, size in {"batch_size": batch_size, "seq_len": seq_len, **shape}.items():
        if size is not None and size < 1:
            raise ValueError(f"inputs: {name} must be positive, got {size}")

    if kind == "captured":
        query, key, value, scale, description = _captured(source or CaptureSource(), batch_size, seq_len, shape)
    else:
        if source is not None:
            raise ValueError(f"inputs: source goes with kind 'captured' alone, got {source} with {kind!r}")
        if num_heads is None or num_kv_heads is None or head_dim is None:
            raise ValueError(f"inputs: {kind} needs num_heads, num_kv_heads and head_dim, got {shape}")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"inputs: num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
            )
        draw, description = _DRAWN[kind]
        drawn_shape = _DrawnShape(batch_size, num_heads, num_kv_heads, seq_len, head_dim)
        query, key, value = draw(drawn_shape, Generator().manual_seed(seed))
        scale = head_dim**-0.5

    query, key, value = (x.to(device=device, dtype=dtype) for x in (query, key, value))
    return Inputs(query, key, value, scale, f"{kind}: {description}")


def input_shape(kind: str, source: CaptureSource | None = None) -> HeadShape | None:
    """The heads that `kind` fixes: of `captured` the model's, read from the cache; None for random kinds.

    Raises:
        ValueError: for an unknown kind, or if the source is not captured yet (`ensure_captured` does that).
    """
    _check_kind(kind)
    if kind != "captured":
        return None
    info = captured_info(source or CaptureSource())
    return HeadShape(info.num_heads, info.num_kv_heads, info.head_dim)


def _check_kind(kind: str) -> None:
    if kind not in kinds():
        raise ValueError(f"inputs: kind must be one of {', '.join(kinds())}, got {kind!r}")


def _captured(
    source: CaptureSource, batch_size: int, seq_len: int, shape: dict[str, int | None]
) -> tuple[Tensor, Tensor, Tensor, float, str]:
    """Query, key and value of the source's first `batch_size` layers, their scale and description."""
    capture = load_captured(source, seq_len)
    for name, size in shape.items():
        own = getattr(capture.info, name)
        if size not in (None, own):
            raise ValueError(f"inputs: {name} must be {own}, that of {source.model!r}, or None, got {size}")
    layers = capture.info.layers
    if batch_size > len(layers):
        raise ValueError(
            f"inputs: batch_size must be at most {len(layers)}, a row for each of layers {layers} of "
            f"{source.model!r}, got {batch_size}"
        )
    query, key, value = (x[:batch_size] for x in (capture.query, capture.key, capture.value))
    return query, key, value, capture.info.scale, f"layers {layers[:batch_size]} of {source}"


# Random kinds -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _DrawnShape:
    batch_size: int
    num_heads: int
    num_kv_heads: int
    seq_len: int
    head_dim: int

    @property
    def query(self) -> tuple[int, int, int, int]:
        return self.batch_size, self.num_heads, self.seq_len, self.head_dim

    @property
    def key(self) -> tuple[int, int, int, int]:
        return self.batch_size, self.num_kv_heads, self.seq_len, self.head_dim


_Draw = Callable[[_DrawnShape, Generator], tuple[Tensor, Tensor, Tensor]]
_DRAWN: dict[str, tuple[_Draw, str]] = {}


def _drawn(description: str) -> Callable[[_Draw], _Draw]:
    """Register a function from shape and generator to query, key and value as a kind under its own name."""

    def register(draw: _Draw) -> _Draw:
        _DRAWN[draw.__name__] = draw, description
        return draw

    return register


@_drawn("query, key and value N(0, 1)")
def gaussian(shape: _DrawnShape, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value N(0, 1): attention spreads widely, with no key better than another."""
    query, key, value = (torch.randn(size, generator=generator) for size in (shape.query, shape.key, shape.key))
    return query, key, value


@_drawn("query, key and value from Student's t with 3 degrees of freedom, unit variance")
def heavy_tailed(shape: _DrawnShape, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value from Student's t with 3 degrees of freedom, scaled to unit variance.

    One number in a thousand lies beyond 7.5 standard deviations (of N(0, 1): 3.3), outliers like those of
    activations.
    """

    def student_t(size: tuple[int, ...]) -> Tensor:
        normal = torch.randn(size, generator=generator)
        chi_squared = torch.zeros(size)
        for _ in range(3):
            chi_squared += torch.randn(size, generator=generator).square_()
        # t = normal / sqrt(chi_squared / 3), and its standard deviation is sqrt(3).
        return normal / chi_squared.sqrt_()

    return student_t(shape.query), student_t(shape.key), student_t(shape.key)


@_drawn(f"{_NUM_CLUSTERS} clusters, shared query and key, queries x 4, keys normalised")
def clustered(shape: _DrawnShape, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Shared query and key in 64 clusters, what hashing looks for (Reformer, Kitaev et al. 2020).

    Every key head of every batch row has 64 centres of its own, 2 N(0, 1), and puts every position into a
    cluster at random. With x = centre + N(0, 1): key = x / |x| as in Reformer, query = 4 x, value N(0, 1).
    Query heads that share a key head share its centres and clusters; the first of them has the very x of
    the key, each other one noise of its own, so that they do not all compute the same. Keeping a query from
    its own key is up to the attention.
    """
    group = shape.num_heads // shape.num_kv_heads
    centres = 2 * torch.randn(*shape.key[:2], _NUM_CLUSTERS, shape.head_dim, generator=generator)
    cluster = torch.randint(_NUM_CLUSTERS, shape.key[:3], generator=generator)
    centre = centres.gather(2, cluster[..., None].expand(shape.key))
    noise = torch.randn(shape.query, generator=generator)
    x = centre[:, :, None] + rearrange(noise, "b (kv_heads group) n d -> b kv_heads group n d", group=group)
    query = 4 * rearrange(x, "b kv_heads group n d -> b (kv_heads group) n d")
    key = F.normalize(x[:, :, 0], dim=-1)
    value = torch.randn(shape.key, generator=generator)
    return query, key, value
