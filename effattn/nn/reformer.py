"""Reformer's attention: one projection for queries and keys, and hashing that brings like tokens together."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ..attention import attention
from ..backend import Backend, get
from ..masks import Mask
from .checks import check_positive, check_probability, check_states

__all__ = ["ReformerAttention"]


class ReformerAttention(nn.Module):
    """Shared-QK attention through locality-sensitive hashing (Kitaev et al. 2020, section 2).

    The key is the query divided by its length, and a token attends to itself only where it sees nothing else. Weights
    bear the names of Hugging Face's ``LSHSelfAttention``; like it, the default counts a key once for each round that
    finds it. Where the backend departs from it: the first chunk does not look round to the last one.

    Args:
        d_model: width of input and output.
        num_heads, head_dim: heads and their width; ``head_dim=None`` is ``d_model / num_heads``.
        backend: an ``lsh`` with ``shared_qk=True``.
        dropout: probability of dropping an attention weight, in training alone.
        out_proj: whether a linear map follows, as in every attention layer; Hugging Face keeps it elsewhere.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        backend: str | Backend = "lsh(shared_qk=True, count='per_round')",
        dropout: float = 0.0,
        out_proj: bool = True,
    ) -> None:
        super().__init__()
        check_positive("reformer", d_model=d_model, num_heads=num_heads)
        check_probability("reformer", dropout=dropout)
        if head_dim is None and d_model % num_heads:
            raise ValueError(f"reformer: d_model must be a multiple of num_heads = {num_heads}, got {d_model}")
        head_dim = d_model // num_heads if head_dim is None else head_dim
        check_positive("reformer", head_dim=head_dim)
        self.d_model, self.num_heads, self.head_dim, self.dropout = d_model, num_heads, head_dim, dropout
        self.query_key = nn.Linear(d_model, num_heads * head_dim, bias=False)
        self.value = nn.Linear(d_model, num_heads * head_dim, bias=False)
        self.out_proj = nn.Linear(num_heads * head_dim, d_model, bias=False) if out_proj else nn.Identity()
        self.backend = backend

    @property
    def backend(self) -> Backend:
        """What computes the attention; a spec string may be assigned too."""
        return self._backend

    @backend.setter
    def backend(self, backend: str | Backend) -> None:
        chosen = get(backend)
        if not getattr(chosen, "shared_qk", False):
            raise ValueError(
                f"reformer: backend must share queries and keys, as lsh(shared_qk=True) does, got {chosen}"
            )
        self._backend = chosen

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], *, mask: Mask | None = None
    ) -> Float[Tensor, "batch seq d_model"]:
        """Attention of ``x``, of any length, over itself under ``mask``."""
        check_states("reformer", "x", x, self.d_model)
        q, v = (rearrange(p(x), "b n (h d) -> b h n d", d=self.head_dim) for p in (self.query_key, self.value))
        output = attention(
            q,
            _unit(q),
            v,
            backend=self._backend,
            mask=mask,
            scale=1.0,
            dropout_p=self.dropout if self.training else 0.0,
        )
        assert isinstance(output, Tensor)
        return self.out_proj(rearrange(output, "b h n d -> b n (h d)"))

    def extra_repr(self) -> str:
        return f"{self.d_model}, {self.num_heads}, head_dim={self.head_dim}, backend={str(self._backend)!r}"


def _unit(vectors: Tensor) -> Tensor:
    """``vectors`` over their length; a vector of zeros stays one, as Hugging Face's 1e-6 under the root has it."""
    head_dim = vectors.shape[-1]
    mean_square = vectors.float().square().mean(dim=-1, keepdim=True)
    return (vectors * torch.rsqrt(mean_square + 1e-6)).to(vectors.dtype) / head_dim**0.5
