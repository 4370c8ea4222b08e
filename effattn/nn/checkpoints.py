"""Models with the weights of Hugging Face checkpoints: BERT, GPT-2, Longformer and Reformer layers.

Each weight of ours is looked up under its Hugging Face name. What is missing, left over or of another shape is an
error that names it, and so is a configuration that these models do not compute.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..backend import Backend
from .bert import Bert, BertConfig, BertForMaskedLM, BertForSequenceClassification
from .gpt import GPT, GPTConfig, GPTForCausalLM, GPTForSequenceClassification
from .layers import EncoderLayer
from .longformer import LongformerAttention
from .reformer import ReformerAttention

__all__ = ["from_huggingface"]

Renaming = tuple[tuple[str, str], ...]  # from a pattern in our name to Hugging Face's, each applied in turn

_ENCODER_LAYER: Renaming = (
    (r"\battention\.q_proj\b", "attention.self.query"),
    (r"\battention\.k_proj\b", "attention.self.key"),
    (r"\battention\.v_proj\b", "attention.self.value"),
    (r"\battention\.(query|key|value)(_global)?\b", r"attention.self.\1\2"),
    (r"\battention\.out_proj\b", "attention.output.dense"),
    (r"\battention_norm\b", "attention.output.LayerNorm"),
    (r"\bfeed_forward\.up\b", "intermediate.dense"),
    (r"\bfeed_forward\.down\b", "output.dense"),
    (r"\bfeed_forward_norm\b", "output.LayerNorm"),
)
_BERT: Renaming = (
    (r"\btokens\b", "embeddings.word_embeddings"),
    (r"\bpositions\b", "embeddings.position_embeddings"),
    (r"\bsegments\b", "embeddings.token_type_embeddings"),
    (r"\bembedding_norm\b", "embeddings.LayerNorm"),
    (r"\bpooler\b", "pooler.dense"),
    (r"\blayers\b", "encoder.layer"),
    *_ENCODER_LAYER,
    (r"^transform\b", "cls.predictions.transform.dense"),
    (r"^transform_norm\b", "cls.predictions.transform.LayerNorm"),
    (r"^bias$", "cls.predictions.bias"),
)
_GPT2: Renaming = (
    (r"^gpt\b", "transformer"),
    (r"^classifier\b", "score"),
    (r"\btokens\b", "wte"),
    (r"\bpositions\b", "wpe"),
    (r"\blayers\b", "h"),
    (r"\battention\.[qkv]_proj\b", "attn.c_attn"),
    (r"\battention\.out_proj\b", "attn.c_proj"),
    (r"\battention_norm\b", "ln_1"),
    (r"\bfeed_forward\.up\b", "mlp.c_fc"),
    (r"\bfeed_forward\.down\b", "mlp.c_proj"),
    (r"\bfeed_forward_norm\b", "ln_2"),
    (r"\bnorm\b", "ln_f"),
)
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Buffers that checkpoints of older releases hold, and that no weight of ours stands for.
_BUFFERS = re.compile(r"(^|\.)(embeddings\.(position_ids|token_type_ids)|attn\.(bias|masked_bias))$")
# The second name of a weight that two places share.
_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.weight": "transformer.wte.weight",
}


def from_huggingface(
    source: nn.Module | str | Path | Mapping[str, Tensor],
    config: Mapping[str, Any] | None = None,
    *,
    architecture: str | None = None,
    backend: str | Backend = "sdpa",
    ignore: tuple[str, ...] = (),
) -> nn.Module:
    """A model or layer of this package with the weights of a Hugging Face one: float32, on the CPU, in evaluation mode.

    Args:
        source: a Hugging Face model or layer; a folder with ``config.json`` and ``model.safetensors`` (or its shards,
            or ``pytorch_model.bin``); or a state dict.
        config: Hugging Face's configuration as a dict; needed for a state dict alone.
        architecture: the Hugging Face class that the weights are of; None: what ``source`` or its configuration says.
            ``BertModel``, ``BertForMaskedLM``, ``BertForSequenceClassification``, ``GPT2Model``, ``GPT2LMHeadModel``
            and ``GPT2ForSequenceClassification`` give ``Bert``, ``BertForMaskedLM``, ...; ``LongformerSelfAttention``
            and ``LSHSelfAttention`` a ``LongformerAttention`` and a ``ReformerAttention``, ``LongformerLayer`` an
            ``EncoderLayer``; layers come from a module only.
        backend: of the attention, in the models.
        ignore: beginnings of names in the checkpoint to leave out on purpose, such as ``"cls.seq_relationship"``.

    Raises:
        ValueError: a weight that is missing, left over or of another shape, by its name in the checkpoint; tied
            weights that differ; an architecture or a setting that is not computed here.
    """
    if isinstance(source, nn.Module):
        architecture = architecture or type(source).__name__
        state: Mapping[str, Tensor] = source.state_dict()
        if not hasattr(source, "config"):
            raise ValueError(
                f"from_huggingface: source must be a Hugging Face module, got a {architecture} without a config"
            )
        config = source.config.to_dict()  # type: ignore[operator, union-attr]
    elif isinstance(source, str | Path):
        config, state = _read_folder(Path(source))
    else:
        state = source
        if config is None:
            raise ValueError("from_huggingface: a state dict alone does not say its sizes; give config too")
    if architecture is None:
        named = config.get("architectures") or ["none"]
        architecture = str(named[0])
    if architecture not in _BUILDERS:
        raise ValueError(
            f"from_huggingface: architecture must be one of {', '.join(_BUILDERS)}, got {architecture}; "
            "name it where the checkpoint does not"
        )
    build, renaming = _BUILDERS[architecture]
    state = {_modern(name): tensor for name, tensor in state.items() if not name.startswith(ignore)}
    with torch.random.fork_rng(devices=[]):  # the weights drawn here are replaced at once
        model = build(config, state, source, backend)
    _load(model, state, renaming, architecture)
    return model.eval()


def _load(model: nn.Module, state: Mapping[str, Tensor], renaming: Renaming, architecture: str) -> None:
    """Copy every weight from under its Hugging Face name, and account for every name there is."""
    rest = {name: tensor for name, tensor in state.items() if not _BUFFERS.search(name)}
    faults = []
    for second, first in _TIED.items():
        tensor = rest.pop(second, None)
        if tensor is not None and first in rest and not torch.equal(tensor, rest[first]):
            faults.append(f"{second} differs from {first}; here they are one weight")
    used = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            theirs = name
            for pattern, replacement in renaming:
                theirs = re.sub(pattern, replacement, theirs)
            if theirs not in rest:
                faults.append(f"{theirs} is missing")
                continue
            used.add(theirs)
            tensor = rest[theirs]
            if renaming is _GPT2:
                tensor = _as_linear(name, theirs, tensor)
            if tensor.shape != parameter.shape:
                faults.append(f"{theirs} must have shape {list(parameter.shape)}, got {list(tensor.shape)}")
                continue
            parameter.copy_(tensor)
    faults += [f"{name} is unexpected; leave it out with ignore=" for name in rest if name not in used]
    if faults:
        raise ValueError(f"from_huggingface: the checkpoint is no {architecture}:\n  - " + "\n  - ".join(faults))


def _as_linear(ours: str, theirs: str, tensor: Tensor) -> Tensor:
    """GPT-2 keeps its matrices transposed, and those of query, key and value as one."""
    if ".c_" in theirs and tensor.dim() == 2:
        tensor = tensor.T
    if ".c_attn." in theirs and len(tensor) % 3 == 0:
        tensor = tensor.chunk(3)["qkv".index(ours.split(".")[-2][0])]
    return tensor


def _modern(name: str) -> str:
    """The names of TensorFlow's first BERT checkpoints as they are now."""
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name))


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not (folder / "config.json").is_file():
        raise ValueError(f"from_huggingface: {folder} must be a folder with a config.json")
    config = json.loads((folder / "config.json").read_text())
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    elif (folder / "pytorch_model.bin").is_file():
        return config, torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    else:
        raise ValueError(f"from_huggingface: {folder} must hold model.safetensors, its shards or pytorch_model.bin")
    from safetensors.torch import load_file

    state: dict[str, Tensor] = {}
    for name in files:
        state |= load_file(folder / name)
    return config, state


def _need(config: Mapping[str, Any], **allowed: Any) -> None:
    """Refuse settings that these models do not compute; a setting that is absent has its default."""
    for name, value in allowed.items():
        if config.get(name, value) != value:
            raise ValueError(f"from_huggingface: {name} must be {value!r}, got {config[name]!r}")


def _activation(config: Mapping[str, Any], name: str) -> str:
    given = config[name]
    if given not in _ACTIVATIONS:
        raise ValueError(f"from_huggingface: {name} must be one of {', '.join(_ACTIVATIONS)}, got {given!r}")
    return _ACTIVATIONS[given]


def _num_labels(config: Mapping[str, Any]) -> int:
    return len(config.get("id2label") or {}) or config.get("num_labels") or 2


def _bert(head: Callable[[BertConfig], nn.Module]) -> Callable[..., nn.Module]:
    def build(config: Mapping[str, Any], state: Mapping[str, Tensor], _: object, backend: str | Backend) -> nn.Module:
        _need(config, is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
        return head(
            BertConfig(
                vocab_size=config["vocab_size"],
                d_model=config["hidden_size"],
                num_layers=config["num_hidden_layers"],
                num_heads=config["num_attention_heads"],
                d_ff=config["intermediate_size"],
                max_len=config["max_position_embeddings"],
                activation=_activation(config, "hidden_act"),
                dropout=config["hidden_dropout_prob"],
                attention_dropout=config["attention_probs_dropout_prob"],
                norm_eps=config["layer_norm_eps"],
                num_labels=_num_labels(config),
                backend=backend,
                type_vocab_size=config["type_vocab_size"],
                pooler=any(name.startswith("pooler.") for name in state),
            )
        )

    return build


def _gpt2(head: Callable[[GPTConfig], nn.Module]) -> Callable[..., nn.Module]:
    def build(config: Mapping[str, Any], _: object, __: object, backend: str | Backend) -> nn.Module:
        _need(
            config,
            add_cross_attention=False,
            scale_attn_weights=True,
            scale_attn_by_inverse_layer_idx=False,
            embd_pdrop=config["resid_pdrop"],
        )
        return head(
            GPTConfig(
                vocab_size=config["vocab_size"],
                d_model=config["n_embd"],
                num_layers=config["n_layer"],
                num_heads=config["n_head"],
                d_ff=config.get("n_inner"),
                max_len=config["n_positions"],
                activation=_activation(config, "activation_function"),
                dropout=config["resid_pdrop"],
                attention_dropout=config["attn_pdrop"],
                norm_eps=config["layer_norm_epsilon"],
                num_labels=_num_labels(config),
                backend=backend,
            )
        )

    return build


def _longformer_attention(
    config: Mapping[str, Any], _: object, module: Any, __: object, *, out_proj: bool = False
) -> LongformerAttention:
    return LongformerAttention(
        config["hidden_size"],
        config["num_attention_heads"],
        window=module.one_sided_attn_window_size,
        dropout=config["attention_probs_dropout_prob"],
        out_proj=out_proj,
    )


def _longformer_layer(config: Mapping[str, Any], _: object, module: Any, __: object) -> EncoderLayer:
    return EncoderLayer(
        _longformer_attention(config, None, module.attention.self, None, out_proj=True),
        config["intermediate_size"],
        dropout=config["hidden_dropout_prob"],
        activation=_activation(config, "hidden_act"),
        norm_eps=config["layer_norm_eps"],
    )


def _reformer_attention(config: Mapping[str, Any], _: object, module: Any, __: object) -> ReformerAttention:
    _need(config, lsh_num_chunks_before=1, lsh_num_chunks_after=0)
    return ReformerAttention(
        config["hidden_size"],
        config["num_attention_heads"],
        head_dim=config["attention_head_size"],
        backend=f"lsh(bucket_size={module.chunk_length}, num_hashes={module.num_hashes}, "
        f"look_back={module.num_chunks_before}, look_ahead={module.num_chunks_after}, "
        "shared_qk=True, count='per_round')",
        dropout=config["lsh_attention_probs_dropout_prob"],
        out_proj=False,
    )


Builder = Callable[[Mapping[str, Any], Mapping[str, Tensor], Any, str | Backend], nn.Module]
_BUILDERS: dict[str, tuple[Builder, Renaming]] = {
    "BertModel": (_bert(Bert), _BERT),
    "BertForMaskedLM": (_bert(BertForMaskedLM), _BERT),
    "BertForSequenceClassification": (_bert(BertForSequenceClassification), _BERT),
    "GPT2Model": (_gpt2(GPT), _GPT2),
    "GPT2LMHeadModel": (_gpt2(GPTForCausalLM), _GPT2),
    "GPT2ForSequenceClassification": (_gpt2(GPTForSequenceClassification), _GPT2),
    "LongformerSelfAttention": (_longformer_attention, ()),
    "LongformerLayer": (_longformer_layer, _ENCODER_LAYER),
    "LSHSelfAttention": (_reformer_attention, ()),
}
