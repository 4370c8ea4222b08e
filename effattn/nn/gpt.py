"""GPT-style decoders (Radford et al. 2019): causal pre-norm layers, with heads for the next token and for classes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..masks import Mask
from .cache import Cache
from .checks import check_token_ids
from .generate import generate
from .layers import DecoderLayer
from .stack import Config, Stack, init_weights

__all__ = ["GPT", "GPTConfig", "GPTForCausalLM", "GPTForSequenceClassification"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig(Config):
    """As ``Config``; the defaults are GPT-2 small."""

    vocab_size: int = 50257
    max_len: int = 1024
    activation: str = "gelu_tanh"


class GPT(Stack):
    """Embeddings, ``num_layers`` causal layers and a final norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = config.table()
        self.dropout = nn.Dropout(config.dropout)
        layers = [
            DecoderLayer(config.attention(), norm_first=True, **config.layer_options())
            for _ in range(config.num_layers)
        ]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.apply(init_weights)
        # Each layer adds twice to the residual; GPT-2 keeps the sum's size whatever the depth.
        for layer in layers:
            for last in (layer.attention.out_proj, layer.feed_forward.down):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * config.num_layers))

    def new_cache(self) -> Cache:
        """An empty cache for ``forward``."""
        return Cache(self.config.num_layers)

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Tensor | None = None,
        *,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        mask: Mask | Tensor | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """The last layer's states, normed.

        Args:
            input_ids: tokens; with a cache, those that come after what it holds, any number at a time.
            attention_mask: ``[batch, key_len]``, 1 or True for real tokens and 0 or False for padding, on either
                side; ``key_len`` counts the cached tokens too.
            position_ids: None: counted from each row's first real token, so that padding on the left changes nothing.
            mask: narrows the causal one further, ``Documents`` or ``Window`` say; over the cached tokens too.
            cache: what ``new_cache`` gave; this call extends it.
        """
        check_token_ids("gpt", "input_ids", input_ids, self.config.vocab_size)
        if cache is not None and self.recomputes:
            raise ValueError(
                "gpt: gradient checkpointing runs layers twice, which would fill the cache twice; give none"
            )
        if cache is not None and len(cache.layers) != len(self.layers):
            raise ValueError(f"gpt: the cache must be of {len(self.layers)} layers, got {len(cache.layers)}")
        past_len = 0 if cache is None else cache.length
        joint, position_ids = self.mask_and_positions(input_ids, attention_mask, mask, position_ids, past_len)
        x = self.tokens(input_ids)
        if self.positions is not None:
            x = x + self.positions(position_ids).to(x.dtype)
        x = self.dropout(x)
        caches = [None] * len(self.layers) if cache is None else cache.layers
        options = ({"mask": joint, "cache": own} for own in caches)
        return self.norm(self.run(zip(self.layers, options, strict=True), x))


class GPTForCausalLM(nn.Module):
    """``GPT`` with scores of every next token; the output matrix is the embedding's."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gpt = GPT(config)

    @property
    def config(self) -> GPTConfig:
        return self.gpt.config

    def new_cache(self) -> Cache:
        """An empty cache for ``forward``."""
        return self.gpt.new_cache()

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Tensor | None = None,
        *,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        mask: Mask | Tensor | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> Float[Tensor, "batch seq vocab"]:
        """Logits of the token after each; ``last_only``: after the last one alone. Arguments as of ``GPT.forward``."""
        states = self.gpt(input_ids, attention_mask, position_ids=position_ids, mask=mask, cache=cache)
        return F.linear(states[:, -1:] if last_only else states, self.gpt.tokens.weight)

    generate = generate


class GPTForSequenceClassification(nn.Module):
    """``GPT`` with scores of ``num_labels`` classes from each row's last token that is not padding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gpt = GPT(config)
        self.classifier = nn.Linear(config.d_model, config.num_labels, bias=False)
        init_weights(self.classifier)

    @property
    def config(self) -> GPTConfig:
        return self.gpt.config

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Tensor | None = None,
        *,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        mask: Mask | Tensor | None = None,
    ) -> Float[Tensor, "batch labels"]:
        """Logits; arguments as of ``GPT.forward``."""
        states = self.gpt(input_ids, attention_mask, position_ids=position_ids, mask=mask)
        if attention_mask is None:
            return self.classifier(states[:, -1])
        from_the_end = attention_mask.to(torch.int8).flip(1).argmax(dim=1)
        index = states.shape[1] - 1 - from_the_end
        return self.classifier(states[torch.arange(len(states), device=states.device), index])
