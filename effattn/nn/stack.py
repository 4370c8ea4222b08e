"""What the BERT- and GPT-style models share: their configuration, their positions, running their layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..backend import Backend, get
from ..masks import Mask, Padding
from .checks import as_mask, check_positive, check_probability
from .layers import ACTIVATIONS
from .multihead import MultiheadAttention
from .positions import ALiBi, LearnedPositions, Rotary, SinusoidalPositions, positions_of

__all__ = ["Config", "Positions", "Stack", "init_weights"]

Positions = Literal["learned", "sinusoidal", "rotary", "alibi"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and choices that both kinds of models have; the defaults are those of the base models.

    Args:
        vocab_size: tokens.
        d_model: width; a multiple of ``num_heads``.
        num_layers, num_heads: depth, and query heads of each layer.
        num_kv_heads: key and value heads; None: as many as ``num_heads``.
        d_ff: inner width of the feed-forward networks; None: 4 x ``d_model``.
        max_len: positions of the learned table; of no account for the other kinds, which have no limit.
        positions: learned, sinusoidal, rotary or alibi.
        activation: gelu, gelu_tanh, relu or silu.
        dropout: of embeddings and of what is added to the residual; attention_dropout: of attention weights.
        norm_eps: of the layer norms.
        num_labels: classes of the classification head.
        backend: of every layer's attention; ``set_backend`` or a layer's attribute change it later.
    """

    vocab_size: int
    d_model: int = 768
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int | None = None
    d_ff: int | None = None
    max_len: int
    positions: Positions = "learned"
    activation: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    norm_eps: float = 1e-5
    num_labels: int = 2
    backend: str | Backend = "sdpa"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "d_model", "num_layers", "num_heads", "max_len", "num_labels")
        check_positive("config", **{name: getattr(self, name) for name in sizes})
        check_probability("config", dropout=self.dropout, attention_dropout=self.attention_dropout)
        for name, allowed in (("positions", get_args(Positions)), ("activation", tuple(ACTIVATIONS))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"config: {name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.d_ff is not None:
            check_positive("config", d_ff=self.d_ff)
        get(self.backend)  # an unknown one is refused here

    @property
    def inner(self) -> int:
        """Inner width of the feed-forward networks."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    def layer_options(self) -> dict[str, Any]:
        """What ``EncoderLayer`` and ``DecoderLayer`` take beside their attention."""
        return {
            "d_ff": self.inner,
            "dropout": self.dropout,
            "activation": self.activation,
            "norm_eps": self.norm_eps,
        }

    def attention(self) -> MultiheadAttention:
        """A new attention module."""
        positions: Rotary | ALiBi | None = None
        if self.positions == "rotary":
            positions = Rotary(self.d_model // self.num_heads)
        elif self.positions == "alibi":
            positions = ALiBi(self.num_heads)
        return MultiheadAttention(
            self.d_model,
            self.num_heads,
            self.num_kv_heads,
            backend=self.backend,
            dropout=self.attention_dropout,
            positions=positions,
        )

    def table(self) -> nn.Module | None:
        """What gives a vector to add for each position, or None where attention is told of positions instead."""
        if self.positions == "learned":
            return LearnedPositions(self.max_len, self.d_model)
        return SinusoidalPositions(self.d_model) if self.positions == "sinusoidal" else None


class Stack(nn.Module):
    """A model of this package; ``gradient_checkpointing = True`` makes training recompute each layer."""

    gradient_checkpointing = False

    @property
    def recomputes(self) -> bool:
        """Whether a forward pass now would be run again in the backward pass."""
        return self.gradient_checkpointing and self.training and torch.is_grad_enabled()

    def run(self, layers: Iterable[tuple[nn.Module, dict[str, Any]]], x: Tensor) -> Tensor:
        """``x`` through all layers, each with its own keyword arguments."""
        for layer, options in layers:
            if self.recomputes:
                x = checkpoint(layer, x, use_reentrant=False, **options)
            else:
                x = layer(x, **options)
        return x

    def mask_and_positions(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        mask: Mask | Tensor | None,
        position_ids: Tensor | None,
        past_len: int = 0,
    ) -> tuple[Mask, Tensor]:
        """Padding and ``mask`` joined, and the positions of ``input_ids`` counted from each row's first real token."""
        batch_size, query_len = input_ids.shape
        joint = as_mask("model", mask)
        keep = None
        if attention_mask is not None:
            if torch.compiler.is_compiling():  # its values cannot be looked at
                attention_mask = attention_mask.bool()
            padding = Padding(attention_mask)
            padding.validate(batch_size, 1, query_len, past_len + query_len, past_len)
            joint, keep = padding & joint, padding.keep
        if position_ids is None:
            position_ids = positions_of(keep, query_len, past_len + query_len, input_ids.device)
        elif position_ids.shape not in (input_ids.shape, (1, query_len)):
            wanted, got = list(input_ids.shape), list(position_ids.shape)
            raise ValueError(f"model: position_ids must have the shape of input_ids {wanted}, got {got}")
        return joint, position_ids


def init_weights(module: nn.Module) -> None:
    """Normal weights of deviation 0.02 and zero biases, as BERT and GPT-2 begin."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
