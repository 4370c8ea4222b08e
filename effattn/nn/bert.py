"""BERT-style encoders (Devlin et al. 2019): post-norm layers, with heads for masked tokens and for classification."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..masks import Mask
from .checks import check_token_ids
from .layers import ACTIVATIONS, EncoderLayer
from .stack import Config, Stack, init_weights

__all__ = ["Bert", "BertConfig", "BertForMaskedLM", "BertForSequenceClassification"]


@dataclass(frozen=True, kw_only=True)
class BertConfig(Config):
    """As ``Config``; the defaults are BERT-base.

    ``type_vocab_size`` is the number of kinds of segments; ``pooler`` adds the projection of the first token that
    ``Bert.pool`` needs, and which classification always has.
    """

    vocab_size: int = 30522
    max_len: int = 512
    norm_eps: float = 1e-12
    type_vocab_size: int = 2
    pooler: bool = False


class Bert(Stack):
    """Embeddings and ``num_layers`` bidirectional layers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.segments = nn.Embedding(config.type_vocab_size, config.d_model)
        self.positions = config.table()
        self.embedding_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            EncoderLayer(config.attention(), **config.layer_options()) for _ in range(config.num_layers)
        )
        self.pooler = nn.Linear(config.d_model, config.d_model) if config.pooler else None
        self.apply(init_weights)

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Tensor | None = None,
        token_type_ids: Int[Tensor, "batch seq"] | None = None,
        *,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        mask: Mask | Tensor | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """The last layer's states.

        Args:
            input_ids: tokens.
            attention_mask: ``[batch, seq]``, 1 or True for real tokens and 0 or False for padding, on either side.
            token_type_ids: the segment of each token; None: all 0.
            position_ids: None: counted from each row's first real token, so that padding on the left changes nothing.
            mask: narrows attention further, ``Documents`` or ``Window`` say.
        """
        check_token_ids("bert", "input_ids", input_ids, self.config.vocab_size)
        joint, position_ids = self.mask_and_positions(input_ids, attention_mask, mask, position_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        check_token_ids("bert", "token_type_ids", token_type_ids, self.config.type_vocab_size)
        x = self.tokens(input_ids) + self.segments(token_type_ids)
        if self.positions is not None:
            x = x + self.positions(position_ids).to(x.dtype)
        x = self.dropout(self.embedding_norm(x))
        return self.run(((layer, {"mask": joint}) for layer in self.layers), x)

    def pool(
        self, states: Float[Tensor, "batch seq d_model"], attention_mask: Tensor | None = None
    ) -> Float[Tensor, "batch d_model"]:
        """The first real token, [CLS], through the pooler and tanh."""
        if self.pooler is None:
            raise ValueError("bert: the model has no pooler; build it with BertConfig(pooler=True)")
        if attention_mask is None:
            first = states[:, 0]
        else:
            index = attention_mask.to(torch.int8).argmax(dim=1)
            first = states[torch.arange(len(states), device=states.device), index]
        return torch.tanh(self.pooler(first))


class BertForMaskedLM(nn.Module):
    """``Bert`` with scores of every token at each place; the output matrix is the embedding's."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bert = Bert(config)
        self.transform = nn.Linear(config.d_model, config.d_model)
        self.transform_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        init_weights(self.transform)

    @property
    def config(self) -> BertConfig:
        return self.bert.config

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Tensor | None = None,
        token_type_ids: Int[Tensor, "batch seq"] | None = None,
        *,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        mask: Mask | Tensor | None = None,
    ) -> Float[Tensor, "batch seq vocab"]:
        """Logits; arguments as of ``Bert.forward``."""
        states = self.bert(input_ids, attention_mask, token_type_ids, position_ids=position_ids, mask=mask)
        states = self.transform_norm(ACTIVATIONS[self.config.activation](self.transform(states)))
        return F.linear(states, self.bert.tokens.weight, self.bias)


class BertForSequenceClassification(nn.Module):
    """``Bert`` with scores of ``num_labels`` classes from the pooled first real token, [CLS]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bert = Bert(replace(config, pooler=True))
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.d_model, config.num_labels)
        init_weights(self.classifier)

    @property
    def config(self) -> BertConfig:
        return self.bert.config

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Tensor | None = None,
        token_type_ids: Int[Tensor, "batch seq"] | None = None,
        *,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        mask: Mask | Tensor | None = None,
    ) -> Float[Tensor, "batch labels"]:
        """Logits; arguments as of ``Bert.forward``."""
        states = self.bert(input_ids, attention_mask, token_type_ids, position_ids=position_ids, mask=mask)
        return self.classifier(self.dropout(self.bert.pool(states, attention_mask)))
