"""What decoding keeps: the keys and values of the tokens read so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["Cache", "KVCache", "LayerCache"]


@dataclass
class KVCache:
    """Keys and values of one attention module, ``[batch, kv_heads, length, head_dim]``, positions already applied."""

    key: Tensor | None = None
    value: Tensor | None = None

    @property
    def length(self) -> int:
        """How many tokens are kept."""
        return 0 if self.key is None else self.key.shape[2]

    def append(
        self, key: Float[Tensor, "batch kv_heads new head_dim"], value: Float[Tensor, "batch kv_heads new head_dim"]
    ) -> tuple[Tensor, Tensor]:
        """Keep ``key`` and ``value`` after what is there, and give back all. Copies, as much as attention reads."""
        if self.key is not None and self.value is not None:
            if key.shape[0] != self.key.shape[0]:
                raise ValueError(f"cache: holds a batch of {self.key.shape[0]}, got one of {key.shape[0]}")
            if key.dtype != self.key.dtype:
                raise ValueError(f"cache: holds {self.key.dtype}, got {key.dtype}")
            key, value = torch.cat([self.key, key], dim=2), torch.cat([self.value, value], dim=2)
        self.key, self.value = key, value
        return key, value


@dataclass
class LayerCache:
    """What one decoder layer keeps: of its own tokens, and of the encoder's, which are projected once."""

    attention: KVCache = field(default_factory=KVCache)
    cross_attention: KVCache = field(default_factory=KVCache)


class Cache:
    """What a decoder of ``num_layers`` layers keeps: empty at first, filled by each forward pass that is given it."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """How many tokens have been read."""
        return self.layers[0].attention.length
