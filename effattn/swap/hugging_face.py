"""Hugging Face models, through both interfaces of transformers: ``AttentionInterface``, ``AttentionMaskInterface``.

transformers describes a mask by a function of four indices, joined from the closures of its ``masking_utils``, and
leaves it to the implementation what to make of it. Here the closures are read back into the mask algebra, which
takes O(n): nothing of size query_len x key_len is built. A closure that is not known is refused by name, unless the
mask is a single row.

A mask travels from the model to its layers as a ``BlockMask``, the one kind of mask besides a tensor that
transformers hands through untouched, from ``generate`` too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import reduce
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..masks import Causal, Dense, Documents, Everything, Mask, Padding, Window, pack, unpack
from .sites import ATTRIBUTE, Site, attention_dropout, reachable_names

NAME = "effattn"

# What an attention function is handed that changes its result beyond softmax(q k^T scale + bias) v.
_BEYOND_SOFTMAX = ("softcap", "s_aux", "sinks", "indices", "block_indices")


class ModelMask(BlockMask):
    """The mask that a model asked for: ``mask`` over ``key_len`` keys, queries from ``query_offset`` on.

    ``request`` is what the model asked with, from which a layer that was not swapped gets the mask that it knows.
    """

    def __init__(
        self, mask: Mask, query_offset: int, shape: tuple[int, int, int, int], request: dict[str, Any]
    ) -> None:
        self.mask = mask
        self.query_offset = query_offset
        self.size = shape
        self.request = request

    @property
    def shape(self) -> tuple[int, ...]:
        """``(batch, 1, query_len, key_len)``: four dimensions tell transformers that the mask is made."""
        return self.size

    @property
    def ndim(self) -> int:
        return len(self.size)

    def dim(self) -> int:
        return len(self.size)

    def to(self, device: torch.device | str, **options: Any) -> ModelMask:
        """On ``device``: what accelerate asks for where the layers of a model lie on several."""
        packed, tensors = pack(self.mask)
        moved = {
            name: value.to(device, **options) if isinstance(value, Tensor) else value
            for name, value in self.request.items()
        }
        mask = unpack(packed, [tensor.to(device, **options) for tensor in tensors])
        return ModelMask(mask, self.query_offset, self.size, {**moved, "device": device})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copying asks for, before there is anything to print
            raise AttributeError(name)
        raise AttributeError(f"swap: a model asks its mask for {name!r}, but effattn's is no tensor; it is {self!r}")

    def __getitem__(self, index: Any) -> Any:
        raise ValueError(f"swap: a model takes a part of its mask, but effattn's is no tensor; it is {self!r}")

    def __repr__(self) -> str:
        return f"ModelMask({self.mask!r}, query_offset={self.query_offset}, shape={self.shape})"

    __str__ = __repr__

    def made_by(self, implementation: str) -> Any:
        """The mask as another implementation has it."""
        return masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[implementation](**self.request)


# From the model to the mask algebra -------------------------------------------------------------------------


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> ModelMask:
    """The function that ``AttentionMaskInterface`` calls, with the arguments and defaults of transformers' own."""
    request = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "device": device,
        **options,
    }
    if mask_function is masking_utils.causal_mask_function:
        mask: Mask = Causal()
    elif mask_function is masking_utils.bidirectional_mask_function:
        mask = Everything()
    else:
        mask = _read(request)
    if attention_mask is not None:
        keep: Any = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        keep = keep[:, kv_offset : kv_offset + kv_length].bool()
        if torch.compiler.is_compiling() or not bool(keep.all()):
            mask = mask & Padding(keep)
    return ModelMask(mask, int(q_offset) - kv_offset, (batch_size, 1, q_length, kv_length), request)


@torch.compiler.disable
def _read(request: dict[str, Any]) -> Mask:
    """The algebra of a closure; outside of torch.compile, which cannot look into one."""
    try:
        return _Reader(request).read(request["mask_function"])
    except _NotExpressedError as error:
        if request["q_length"] == 1:
            skips = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
            row: Any = masking_utils.sdpa_mask(**{**request, **skips, "attention_mask": None})
            return Dense(row)
        raise ValueError(
            f"swap: the model asks for the mask {error}, which effattn cannot express; it knows causal, sliding "
            "windows, chunks, packed documents, blocks and padding. Pass a mask of your own as a 4-dimensional "
            "attention_mask, or leave these layers out with layers="
        ) from None


class _NotExpressedError(Exception):
    """A mask function that is none of those in ``masking_utils``."""


class _Reader:
    """Reads a mask function of transformers, whose indices are absolute, as a mask of keys from ``kv_offset`` on."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.keys = slice(request["kv_offset"], request["kv_offset"] + request["kv_length"])
        self.positions = torch.arange(self.keys.start, self.keys.stop, device=request["device"])[None]

    def read(self, function: Callable[..., Any]) -> Mask:
        if function is masking_utils.causal_mask_function:
            return Causal()
        if function is masking_utils.bidirectional_mask_function:
            return Everything()
        rule = _RULES.get(function.__code__) if isinstance(function, FunctionType) else None
        if rule is None:
            name = getattr(function, "__qualname__", type(function).__name__)
            raise _NotExpressedError(f"{getattr(function, '__module__', '?')}.{name}")
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        return rule(self, **{name: cell.cell_contents for name, cell in cells})

    def all_of(self, mask_functions: Iterable[Callable[..., Any]]) -> Mask:
        everything: Mask = Everything()
        return reduce(Mask.__and__, map(self.read, mask_functions), everything)

    def any_of(self, mask_functions: Iterable[Callable[..., Any]]) -> Mask:
        return reduce(Mask.__or__, map(self.read, mask_functions))

    def window_back(self, sliding_window: int) -> Mask:
        return Window(sliding_window - 1, None)

    def window_both(self, sliding_window: int) -> Mask:
        return Window(sliding_window, sliding_window)

    def chunks(self, chunk_size: int, left_padding: Tensor) -> Mask:
        return Documents((self.positions - left_padding[:, None]).div(chunk_size, rounding_mode="floor"))

    def blocks(self, block_sequence_ids: Tensor) -> Mask:
        ids = block_sequence_ids[:, self.keys]
        return Documents(ids) & Padding(ids >= 0)

    def packed(self, packed_sequence_mask: Tensor) -> Mask:
        return Documents(packed_sequence_mask[:, self.keys])

    def repositioned(self, mask_function: Callable[..., Any], position_ids: Tensor) -> Mask:
        # Positions start anew in each document and go up by one, and transformers always joins the documents too:
        # within one, distances are those of the indices. Only chunks ask where a token stands.
        self.positions = position_ids[:, self.keys]
        return self.read(mask_function)

    def padding(self, padding_mask: Tensor) -> Mask:
        return Padding(padding_mask[:, self.keys].bool())


def _rules() -> dict[CodeType, Callable[..., Mask]]:
    """By the code object that all closures of one function share."""
    some, utils = torch.zeros(1, 1, dtype=torch.long), masking_utils
    causal = utils.causal_mask_function
    rules: dict[Any, Callable[..., Mask]] = {
        utils.and_masks(causal): _Reader.all_of,
        utils.or_masks(causal): _Reader.any_of,
        utils.sliding_window_overlay(1): _Reader.window_back,
        utils.sliding_window_bidirectional_overlay(1): _Reader.window_both,
        utils.chunked_overlay(1, some): _Reader.chunks,
        utils.blockwise_overlay(some): _Reader.blocks,
        utils.packed_sequence_mask_function(some): _Reader.packed,
        utils.remap_positions_for_packed_sequence(causal, some): _Reader.repositioned,
        utils.padding_mask_function(some): _Reader.padding,
    }
    return {closure.__code__: rule for closure, rule in rules.items()}


_RULES = _rules()


# From the layer to the backend ------------------------------------------------------------------------------


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ModelMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function that ``AttentionInterface`` calls: the output ``[batch, seq, heads, dim]``, and weights on request.

    A 4-dimensional tensor as the mask is the user's own: bool = may attend, floating = added to the scores.
    """
    site: Site | None = getattr(module, ATTRIBUTE, None)
    if site is None:
        raise ValueError(
            f"swap: a {type(module).__name__} that is no site of the swapped model asks for effattn's attention; "
            "it was made after the swap, or shares the configuration of the swapped model"
        )
    if site.backend is None:
        assert site._implementation is not None, f"{site} is neither served nor left as it was"
        if isinstance(attention_mask, ModelMask):
            attention_mask = attention_mask.made_by(site._implementation)
        given = {"is_causal": is_causal, "position_bias": position_bias}
        options |= {name: value for name, value in given.items() if value is not None}
        unswapped = original(module, site._implementation)
        return unswapped(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options)
    beyond = [name for name in _BEYOND_SOFTMAX if options.get(name) is not None]
    if beyond:
        raise ValueError(f"swap: {site.path} asks for {', '.join(beyond)}, which is beyond softmax attention")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    mask, bias, query_offset = _mask_and_bias(site, attention_mask, is_causal, query, key, options)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    asked: dict[str, Any] = {"mask": mask, "bias": bias, "scale": scaling, "query_offset": query_offset}
    output = site.attend(query, key, value, dropout_p=dropout, **asked)
    weights = site.weights(query, key, **asked) if options.get("output_attentions") else None
    return output.transpose(1, 2).contiguous(), weights


def _mask_and_bias(
    site: Site, given: ModelMask | Tensor | None, is_causal: bool, query: Tensor, key: Tensor, options: dict[str, Any]
) -> tuple[Mask, Tensor | None, int | None]:
    query_len, key_len = query.shape[2], key.shape[2]
    if isinstance(given, ModelMask):
        if given.shape[2:] != (query_len, key_len):
            raise ValueError(
                f"swap: {site.path} attends from {query_len} queries to {key_len} keys with a mask made for "
                f"{given.shape[2]} and {given.shape[3]}"
            )
        return given.mask, None, given.query_offset
    if given is None:
        if options.get("sliding_window") is not None and key_len > options["sliding_window"]:
            raise ValueError(f"swap: {site.path} asks for a sliding window, but the model made no mask for it")
        # PyTorch's alignment, on which models without a mask rely.
        return (Causal(), None, 0) if is_causal and query_len > 1 else (Everything(), None, None)
    if given.dim() == 2 and not given.is_floating_point():
        return (Causal() if is_causal else Everything()) & Padding(given), None, None
    if given.dim() == 4 and given.dtype == torch.bool:
        return Dense(given), None, None
    if given.dim() == 4 and given.is_floating_point():
        return Everything(), given, None
    raise ValueError(
        f"swap: {site.path} was given a mask of {given.dtype}{list(given.shape)}; supported are bool or floating "
        "[batch, heads, query_len, key_len] and bool or 0/1 [batch, key_len]"
    )


# From the configuration to the interface --------------------------------------------------------------------


def register() -> None:
    """Make ``NAME`` known to transformers; nothing changes for a model that does not ask for it."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def configurations(model: nn.Module, path: str) -> list[PretrainedConfig]:
    """The configurations by which the module at ``path`` and the models around it choose their attention."""
    parts = path.split(".") if path else []
    owners = [model, *(model.get_submodule(".".join(parts[:end])) for end in range(1, len(parts) + 1))]
    found: list[PretrainedConfig] = []
    for owner in owners:
        config = getattr(owner, "config", None)
        if isinstance(config, PretrainedConfig) and not any(config is known for known in found):
            found.append(config)
    return found


def original(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """The attention function that serves ``module`` under ``implementation``."""
    if implementation != "eager":
        return ALL_ATTENTION_FUNCTIONS[implementation]
    function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise ValueError(
            f"swap: the module of {type(module).__name__} has no eager_attention_forward, with which layers that are "
            "not selected would go on; set_attn_implementation('sdpa') first, or select all layers"
        )
    return function


def refusals(module: nn.Module) -> list[str]:
    """Why this attention cannot be served, as far as it can be told before it runs."""
    names = reachable_names(type(module))  # type: ignore[arg-type]
    passed = [name for name in _BEYOND_SOFTMAX if f"{name}=" in names]
    if getattr(getattr(module, "config", None), "attn_logit_softcapping", None) is None:
        passed = [name for name in passed if name != "softcap"]  # passed as None
    return [f"it passes {name}, which is beyond softmax attention" for name in passed]


def needs(module: nn.Module) -> list[dict[str, Any]]:
    """What this attention will ask of a backend, as the fields of a ``Request``: one whole pass, and decoding."""
    config: Any = getattr(module, "config", None)
    if config is None:
        return [{}]
    num_heads = getattr(config, "num_attention_heads", None) or 1
    head_dim = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
    if head_dim is None:
        head_dim = max(getattr(config, "hidden_size", num_heads) // num_heads, 1)
    causal = bool(getattr(module, "is_causal", False)) and getattr(config, "is_causal", True)
    mask: Mask = Causal() if causal else Everything()
    window = getattr(module, "sliding_window", None)
    if isinstance(window, int):
        mask = mask & Window(window - 1, None if causal else window - 1)
    asked = {
        "num_heads": num_heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or num_heads,
        "head_dim": head_dim,
        "value_dim": head_dim,
        "mask": mask,
        "dropout_p": attention_dropout(module),
    }
    if "position_bias=" in reachable_names(type(module)):  # type: ignore[arg-type]
        asked |= {"bias": True, "bias_grad": module.training}
    decodes = causal and getattr(config, "use_cache", False)
    return [asked, {**asked, "query_len": 1}] if decodes else [asked]
