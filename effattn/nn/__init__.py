"""Attention modules, layers and small models whose attention is any backend's."""

from .bert import Bert, BertConfig, BertForMaskedLM, BertForSequenceClassification
from .cache import Cache, KVCache, LayerCache
from .checkpoints import from_huggingface
from .gpt import GPT, GPTConfig, GPTForCausalLM, GPTForSequenceClassification
from .layers import DecoderLayer, EncoderLayer, FeedForward
from .longformer import LongformerAttention
from .multihead import MultiheadAttention, set_backend
from .positions import ALiBi, LearnedPositions, Rotary, SinusoidalPositions
from .reformer import ReformerAttention

__all__ = [
    "ALiBi",
    "Bert",
    "BertConfig",
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "Cache",
    "DecoderLayer",
    "EncoderLayer",
    "FeedForward",
    "GPT",
    "GPTConfig",
    "GPTForCausalLM",
    "GPTForSequenceClassification",
    "KVCache",
    "LayerCache",
    "LearnedPositions",
    "LongformerAttention",
    "MultiheadAttention",
    "ReformerAttention",
    "Rotary",
    "SinusoidalPositions",
    "from_huggingface",
    "set_backend",
]
