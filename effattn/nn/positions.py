"""How a model knows where a token stands: tables added to the embeddings, or what attention itself is told.

``SinusoidalPositions`` and ``LearnedPositions`` give a vector for each position; ``Rotary`` turns queries and keys;
``ALiBi`` adds a bias to the scores. The last two depend on distances alone, so padding on the left and any offset
of a cache leave them right.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..masks import Mask, band_of
from .checks import check_positive

__all__ = ["ALiBi", "LearnedPositions", "Rotary", "SinusoidalPositions", "positions_of"]


class SinusoidalPositions(nn.Module):
    """Sines and cosines of geometrically spaced frequencies, for any position (Vaswani et al. 2017, section 3.5).

    Entry ``2 i`` is the sine and ``2 i + 1`` the cosine of ``position / base ** (2 i / d_model)``.
    """

    def __init__(self, d_model: int, *, base: float = 10000.0) -> None:
        super().__init__()
        check_positive("sinusoidal", d_model=d_model)
        if d_model % 2:
            raise ValueError(f"sinusoidal: d_model must be even, a sine and a cosine each, got {d_model}")
        self.d_model, self.base = d_model, base

    def forward(self, position_ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq d_model"]:
        angles = _angles(position_ids, self.d_model, self.base)
        return rearrange([angles.sin(), angles.cos()], "two b s half -> b s (half two)")


class LearnedPositions(nn.Module):
    """A table of ``max_len`` learned vectors (BERT, GPT-2)."""

    def __init__(self, max_len: int, d_model: int) -> None:
        super().__init__()
        check_positive("learned positions", max_len=max_len, d_model=d_model)
        self.weight = nn.Parameter(torch.empty(max_len, d_model))
        nn.init.normal_(self.weight, std=0.02)

    @property
    def max_len(self) -> int:
        return self.weight.shape[0]

    def forward(self, position_ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq d_model"]:
        """The rows of the table; a position that it does not have is a ``ValueError``, not an untrained row.

        While compiling the values are not looked at: PyTorch's own lookup asserts there.
        """
        if position_ids.numel() and not torch.compiler.is_compiling():
            least, most = int(position_ids.min()), int(position_ids.max())
            if least < 0 or most >= self.max_len:
                raise ValueError(
                    f"learned positions: the table has rows for 0..{self.max_len - 1}, got position "
                    f"{least if least < 0 else most}; shorten the input, build the model with a larger max_len, "
                    "or lengthen the table of a trained one (effattn.swap.extend_positions)"
                )
        return nn.functional.embedding(position_ids, self.weight)

    def extra_repr(self) -> str:
        return f"max_len={self.max_len}, d_model={self.weight.shape[1]}"


class Rotary(nn.Module):
    """Turns pairs of entries of queries and keys by angles that grow with the position (Su et al. 2021, RoFormer).

    Scores then depend on the distance of query and key alone. Pair ``i`` turns by ``position * base ** (-2 i / D)``.

    Args:
        head_dim: D, even.
        base: larger turns more slowly, which longer contexts need.
        interleaved: which entries are a pair. False: ``i`` and ``i + D / 2`` (GPT-NeoX, Llama); True: ``2 i`` and
            ``2 i + 1`` (the paper, GPT-J). A model trained with one is wrong with the other.
    """

    def __init__(self, head_dim: int, *, base: float = 10000.0, interleaved: bool = False) -> None:
        super().__init__()
        check_positive("rotary", head_dim=head_dim)
        if head_dim % 2:
            raise ValueError(f"rotary: head_dim must be even, since entries turn in pairs, got {head_dim}")
        self.head_dim, self.base, self.interleaved = head_dim, base, interleaved

    def forward(
        self, x: Float[Tensor, "batch heads seq head_dim"], offset: int = 0
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        """``x`` turned, its first row standing at position ``offset``: the number of cached tokens."""
        if x.shape[-1] != self.head_dim:
            raise ValueError(f"rotary: head_dim must be {self.head_dim}, got {x.shape[-1]}")
        position = torch.arange(x.shape[2], device=x.device) + offset
        angles = _angles(position, self.head_dim, self.base)
        cos, sin = angles.cos(), angles.sin()
        pairs = "b h s (half two) -> two b h s half" if self.interleaved else "b h s (two half) -> two b h s half"
        first, second = rearrange(x, pairs, two=2).to(cos.dtype)
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin])
        left, _, right = pairs.partition(" -> ")
        return rearrange(turned, f"{right} -> {left}").to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, base={self.base}, interleaved={self.interleaved}"


class ALiBi(nn.Module):
    """A penalty on each score in proportion to the distance of its key (Press, Smith & Lewis 2022).

    Head h has a fixed slope. For a power of two of heads they are ``2 ** (-8 (h + 1) / num_heads)``; for other numbers
    those of the power of two below, and then every second one of the power above, as in the authors' code.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        check_positive("alibi", num_heads=num_heads)
        self.num_heads = num_heads

    @property
    def slopes(self) -> tuple[float, ...]:
        """The slope of each head."""

        def geometric(count: int) -> list[float]:
            return [2 ** (-8 * (head + 1) / count) for head in range(count)]

        below = 2 ** int(math.log2(self.num_heads))
        return tuple(geometric(below) + geometric(2 * below)[::2][: self.num_heads - below])

    def forward(
        self, mask: Mask, query_len: int, key_len: int, query_offset: int, device: torch.device | str | None = None
    ) -> Float[Tensor, "1 heads query_len_or_1 key_len"]:
        """The bias, in float32: no n x n where ``mask`` is causal.

        A row's softmax does not change when a number is added to all its scores, so where every key lies behind its
        query, slope x (position of the key) says the same as -slope x (distance): ``[1, heads, 1, key_len]``, at a
        rounding of ``slope * key_len * 2 ** -24`` in the scores. Elsewhere it is ``[1, heads, query_len, key_len]``.
        """
        slopes = torch.tensor(self.slopes, device=device)[:, None, None]
        key = torch.arange(key_len, device=device)
        right = band_of(mask)[0].right
        if right is not None and right <= 0:
            distance = (key_len - 1 - key)[None]
        else:
            distance = (torch.arange(query_len, device=device)[:, None] + query_offset - key).abs()
        return (-slopes * distance)[None]

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


def positions_of(
    keep: Tensor | None, query_len: int, key_len: int, device: torch.device
) -> Int[Tensor, "batch_or_1 query_len"]:
    """The positions of the last ``query_len`` of ``key_len`` tokens, counted from each row's first real one.

    ``keep`` is bool ``[batch, key_len]``, or None where nothing is padding. Padding on the left has position 0.
    """
    index = torch.arange(key_len - query_len, key_len, device=device)[None]
    if keep is None or key_len == 0:
        return index
    first = (keep.cumsum(dim=1) == 0).sum(dim=1, keepdim=True)
    return (index - first).clamp(min=0)


def _angles(position: Tensor, dim: int, base: float) -> Tensor:
    """``position / base ** (2 i / dim)`` for i below ``dim / 2``, as a new last dimension, in float32."""
    exponent = torch.arange(0, dim, 2, device=position.device, dtype=torch.float32) / dim
    return position[..., None].float() * base**-exponent
