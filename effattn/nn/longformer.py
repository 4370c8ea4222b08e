"""Longformer's attention with projections of their own for global tokens."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ..attention import attention
from ..backend import get
from ..kernels.merge import merge
from ..masks import Padding
from .checks import check_positive, check_probability, check_states

__all__ = ["LongformerAttention"]


class LongformerAttention(nn.Module):
    """A window around each token, and global tokens with projections of their own (Beltagy et al. 2020, section 3.1).

    An ordinary token attends to ``window`` tokens on each side, itself, and the global tokens, in one softmax. A
    global token attends to everything, by ``query_global``, ``key_global`` and ``value_global``. Time and memory
    O(seq (window + globals)): the band is the ``sliding_window`` backend's, the rest ``chunked``'s, and what they
    give is joined by log-sum-exp. Weights bear the names of Hugging Face's ``LongformerSelfAttention``, whose
    ``attention_window`` is 2 x ``window``; as there, rows of padding get 0, before the output projection.

    Args:
        d_model: width of input and output; a multiple of ``num_heads``.
        num_heads: attention heads.
        window: tokens seen on each side.
        dropout: probability of dropping an attention weight, in training alone.
        out_proj: whether a linear map follows, as in every attention layer; Hugging Face keeps it elsewhere.
    """

    def __init__(
        self, d_model: int, num_heads: int, *, window: int = 256, dropout: float = 0.0, out_proj: bool = True
    ) -> None:
        super().__init__()
        check_positive("longformer", d_model=d_model, num_heads=num_heads, window=window)
        check_probability("longformer", dropout=dropout)
        if d_model % num_heads:
            raise ValueError(f"longformer: d_model must be a multiple of num_heads = {num_heads}, got {d_model}")
        self.d_model, self.num_heads, self.window, self.dropout = d_model, num_heads, window, dropout
        self.query, self.key, self.value = (nn.Linear(d_model, d_model) for _ in range(3))
        self.query_global, self.key_global, self.value_global = (nn.Linear(d_model, d_model) for _ in range(3))
        self.out_proj = nn.Linear(d_model, d_model) if out_proj else nn.Identity()
        self.band = get("sliding_window", left=window, right=window)
        self.dense = get("chunked")

    def forward(
        self,
        x: Float[Tensor, "batch seq d_model"],
        *,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """Attention of ``x`` over itself.

        Args:
            x: any length, no multiple of anything.
            attention_mask: ``[batch, seq]``, 1 or True for real tokens, 0 or False for padding; None: no padding.
            global_attention_mask: ``[batch, seq]``, 1 or True for global tokens, each row its own number; padding
                is never global. None: there are none.
        """
        check_states("longformer", "x", x, self.d_model)
        keep = _flags("attention_mask", attention_mask, x, default=True)
        is_global = _flags("global_attention_mask", global_attention_mask, x, default=False) & keep
        index = _positions(is_global)

        q, k, v = self._heads(x, self.query, self.key, self.value)
        dropout_p = self.dropout if self.training else 0.0
        local = attention(
            q, k, v, backend=self.band, mask=Padding(keep & ~is_global), dropout_p=dropout_p, return_lse=True
        )
        to_globals = attention(
            q,
            _take(k, index),
            _take(v, index),
            backend=self.dense,
            mask=Padding(index >= 0),
            dropout_p=dropout_p,
            return_lse=True,
        )
        output = rearrange(merge([local, to_globals])[0], "b h n d -> b n (h d)")  # type: ignore[list-item]

        all_k, all_v = self._heads(x, self.key_global, self.value_global)
        (global_q,) = self._heads(_take(x[:, None], index)[:, 0], self.query_global)
        of_globals = attention(global_q, all_k, all_v, backend=self.dense, mask=Padding(keep), dropout_p=dropout_p)
        assert isinstance(of_globals, Tensor)
        output = _put(output, index, rearrange(of_globals, "b h n d -> b n (h d)"))
        return self.out_proj(output.masked_fill(~keep[..., None], 0.0))

    def _heads(self, x: Tensor, *projections: nn.Module) -> list[Tensor]:
        return [rearrange(p(x), "b n (h d) -> b h n d", h=self.num_heads) for p in projections]

    def extra_repr(self) -> str:
        return f"{self.d_model}, {self.num_heads}, window={self.window}" + f", dropout={self.dropout}" * (
            self.dropout > 0
        )


def _flags(name: str, given: Tensor | None, x: Tensor, *, default: bool) -> Tensor:
    """A mask of 0 and 1 as bool ``[batch, seq]``."""
    shape = x.shape[:2]
    if given is None:
        return torch.full(shape, default, device=x.device)
    if given.shape != shape:
        raise ValueError(f"longformer: {name} must have shape [batch, seq] = {list(shape)}, got {list(given.shape)}")
    if given.dtype == torch.bool:
        return given
    if given.is_floating_point() or not bool(((given == 0) | (given == 1)).all()):
        raise ValueError(f"longformer: {name} must be bool or hold only 0 and 1 as integers, got {given.dtype}")
    return given.bool()


def _positions(flags: Tensor) -> Tensor:
    """The positions that are True, ``[batch, most]``, in order and filled up with -1."""
    most = int(flags.sum(dim=1).max()) if flags.numel() else 0
    order = flags.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    return order.masked_fill(~flags.gather(1, order), -1)


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    """The rows ``index`` ``[batch, m]`` of ``[batch, heads, seq, dim]``; -1 takes any, for a mask to hide."""
    return tensor.take_along_dim(index.clamp(min=0)[:, None, :, None], dim=2)


def _put(tensor: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """``tensor`` ``[batch, seq, dim]`` with its rows ``index`` ``[batch, m]`` replaced; -1 goes nowhere."""
    spare = tensor.shape[1]  # a row past the end, cut off again
    longer = torch.cat([tensor, tensor[:, :1]], dim=1)
    where = torch.where(index < 0, spare, index)[..., None].expand_as(rows)
    return longer.scatter(1, where, rows.to(tensor.dtype))[:, :spare]
