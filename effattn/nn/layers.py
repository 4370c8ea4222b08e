"""Encoder and decoder layers: attention and a feed-forward network, each with a residual connection and a norm.

A layer is given its attention modules, so the same layer serves every kind of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..masks import Causal, Mask
from .cache import LayerCache
from .checks import as_mask, check_positive, check_probability
from .multihead import MultiheadAttention

__all__ = ["ACTIVATIONS", "DecoderLayer", "EncoderLayer", "FeedForward"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """Two linear maps with an activation between them, for each token alone."""

    def __init__(self, d_model: int, d_ff: int, *, activation: str = "gelu") -> None:
        super().__init__()
        check_positive("feed-forward", d_model=d_model, d_ff=d_ff)
        if activation not in ACTIVATIONS:
            raise ValueError(f"feed-forward: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation
        self.up = nn.Linear(d_model, d_ff)
        self.down = nn.Linear(d_ff, d_model)

    def forward(self, x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq d_model"]:
        return self.down(ACTIVATIONS[self.activation](self.up(x)))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class _Layer(nn.Module):
    """What both kinds of layers share."""

    def __init__(
        self,
        attention: nn.Module,
        d_ff: int,
        *,
        dropout: float = 0.0,
        activation: str = "gelu",
        norm_first: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        check_probability("layer", dropout=dropout)
        d_model = getattr(attention, "d_model", None)
        if not isinstance(d_model, int):
            raise ValueError(f"layer: attention must be a module with a d_model, got {type(attention).__name__}")
        self.norm_first = norm_first
        self.attention = attention
        self.attention_norm = nn.LayerNorm(d_model, eps=norm_eps)
        self.feed_forward = FeedForward(d_model, d_ff, activation=activation)
        self.feed_forward_norm = nn.LayerNorm(d_model, eps=norm_eps)
        self.dropout = nn.Dropout(dropout)

    def _residual(self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}"


class EncoderLayer(_Layer):
    """Attention, then a feed-forward network.

    Args:
        attention: a module with a ``d_model`` that maps ``[batch, seq, d_model]`` to the same: this package's
            ``MultiheadAttention``, ``LongformerAttention`` or ``ReformerAttention``, or one of your own.
        d_ff: inner width of the feed-forward network.
        dropout: probability of dropping an entry of what is added to the residual, in training alone.
        activation: gelu, gelu_tanh (GPT-2's approximation), relu or silu.
        norm_first: pre-norm, ``x + f(norm(x))`` (GPT-2), or post-norm, ``norm(x + f(x))`` (BERT).
        norm_eps: of the layer norms.
    """

    def forward(self, x: Float[Tensor, "batch seq d_model"], **attention: Any) -> Float[Tensor, "batch seq d_model"]:
        """``attention`` is handed to the attention module: ``mask=...``, ``bias=...``."""
        x = self._residual(x, self.attention_norm, lambda y: self.attention(y, **attention))
        return self._residual(x, self.feed_forward_norm, self.feed_forward)


class DecoderLayer(_Layer):
    """Causal attention, attention to an encoder's output where there is an encoder, then a feed-forward network.

    ``cross_attention`` is a ``MultiheadAttention``, or None: then the layer has no weights for it. The other
    arguments are those of ``EncoderLayer``.
    """

    attention: MultiheadAttention

    def __init__(
        self,
        attention: MultiheadAttention,
        d_ff: int,
        *,
        cross_attention: MultiheadAttention | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(attention, d_ff, **kwargs)
        self.cross_attention = cross_attention
        if cross_attention is not None:
            if cross_attention.d_model != attention.d_model:
                raise ValueError(
                    f"layer: cross_attention must have d_model {attention.d_model}, got {cross_attention.d_model}"
                )
            self.cross_attention_norm = nn.LayerNorm(attention.d_model, eps=self.attention_norm.eps)

    def forward(
        self,
        x: Float[Tensor, "batch seq d_model"],
        encoded: Float[Tensor, "batch encoded_len d_model"] | None = None,
        *,
        mask: Mask | Tensor | None = None,
        encoded_mask: Mask | Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """The layer's output; ``mask`` narrows the causal one, ``encoded_mask`` is over the encoder's tokens.

        With a ``cache``, ``x`` are the new tokens alone, and the mask is over the cached ones too. A layer with
        cross-attention needs ``encoded``, and one without refuses it.
        """
        if (encoded is None) != (self.cross_attention is None):
            has, got = ("no", "some") if encoded is not None else ("a", "none")
            raise ValueError(f"layer: it has {has} cross_attention, and encoded must agree with that, got {got}")
        causal = Causal() & as_mask("layer", mask)
        own, crossed = (None, None) if cache is None else (cache.attention, cache.cross_attention)
        x = self._residual(x, self.attention_norm, lambda y: self.attention(y, mask=causal, cache=own))
        cross_attention = self.cross_attention
        if cross_attention is not None:
            x = self._residual(
                x,
                self.cross_attention_norm,
                lambda y: cross_attention(y, encoded, mask=encoded_mask, cache=crossed),
            )
        return self._residual(x, self.feed_forward_norm, self.feed_forward)
