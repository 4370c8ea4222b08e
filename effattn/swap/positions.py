"""More positions for a pretrained model: longer learned tables, or slower rotary angles.

An efficient attention alone does not let BERT read 4096 tokens: its table of positions ends at 512.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["extend_positions"]

_METHODS = ("tile", "interpolate", "rope_scaling")
_TABLE_NAMES = ("position", "pos_emb", "wpe")


def extend_positions(model: nn.Module, max_len: int, method: str = "tile") -> nn.Module:
    """Let ``model`` read ``max_len`` tokens: its position tables, buffers and configuration, in place.

    The weights are kept: nothing but the table of positions changes. Parameters of it are new objects, so make an
    optimiser afterwards. A tokenizer has a limit of its own (``tokenizer.model_max_length``).

    Args:
        max_len: tokens, at least as many as now. Rows that a table reserves (RoBERTa's, OPT's) are added.
        method: for learned tables ``"tile"``, which repeats the rows (Longformer, Beltagy et al. 2020, section 5, and
            the better start for local attention, since near distances look as before), or ``"interpolate"``, which
            stretches them linearly. For rotary models ``"rope_scaling"``, YaRN (Peng et al. 2023), on the layers
            that attend to everything.

    Returns:
        The same model.

    Raises:
        ValueError: ``max_len`` is below what the model has, the method does not fit its positions, or no positions of
            either kind are found (relative biases and ALiBi have no end).
    """
    if method not in _METHODS:
        raise ValueError(f"extend_positions: method must be one of {', '.join(_METHODS)}, got {method!r}")
    if not isinstance(max_len, int) or isinstance(max_len, bool) or max_len < 1:
        raise ValueError(f"extend_positions: max_len must be an integer >= 1, got {max_len!r}")
    tables, rotary = list(_find_tables(model)), list(_find_rotary(model))
    name = type(model).__name__
    if not tables and not rotary:
        raise ValueError(f"extend_positions: {name} has neither a learned table of positions nor rotary ones")
    kind, fitting = ("a learned table", _METHODS[:2]) if tables else ("rotary positions", _METHODS[2:])
    if method not in fitting:
        raise ValueError(
            f"extend_positions: method {method!r} does not fit {name}, which has {kind}; use {' or '.join(fitting)}"
        )
    longest = max(table.max_len for table in tables) if tables else max(c.max_position_embeddings for _, _, c in rotary)
    if max_len < longest:
        raise ValueError(f"extend_positions: max_len must be at least the {longest} that {name} has, got {max_len}")
    if max_len > longest:
        if tables:
            _extend_tables(model, tables, max_len, method)
        else:
            _scale_rotary(rotary, max_len)
    return model


# Learned tables ---------------------------------------------------------------------------------------------


@dataclass
class _Table:
    module: Any
    reserved: int  # rows in front that stand for no position
    config: Any  # whose max_position_embeddings counts the rows, or None

    @property
    def rows(self) -> int:
        return len(self.module.weight)

    @property
    def max_len(self) -> int:
        return self.rows - self.reserved


def _find_tables(model: nn.Module) -> Iterator[_Table]:
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            continue
        if getattr(module, "max_len", None) == weight.shape[0]:  # this project's
            yield _Table(module, 0, None)
        elif isinstance(module, nn.Embedding) and any(name in path.split(".")[-1] for name in _TABLE_NAMES):
            padding = module.padding_idx
            reserved = getattr(module, "offset", 0 if padding is None else padding + 1)
            config = _owner(model, path)
            if config is not None and config.max_position_embeddings in (len(weight), len(weight) - reserved):
                yield _Table(module, reserved, config)


def _owner(model: nn.Module, path: str) -> Any:
    """The nearest configuration above ``path`` that counts positions."""
    parts = path.split(".")
    for end in range(len(parts), -1, -1):
        config = getattr(model.get_submodule(".".join(parts[:end])), "config", None)
        if isinstance(getattr(config, "max_position_embeddings", None), int):
            return config
    return None


def _extend_tables(model: nn.Module, tables: list[_Table], max_len: int, method: str) -> None:
    widths = {table.rows: table.reserved + max_len for table in tables}
    for path, buffer in model.named_buffers():
        if buffer.dim() >= 2 and buffer.shape[-1] == buffer.shape[-2] and buffer.shape[-1] in widths:
            raise ValueError(f"extend_positions: the buffer {path} is a mask of {list(buffer.shape)}, of fixed length")
    lengthened, configs = [], {}
    for table in tables:
        weight: Any = table.module.weight
        rows = torch.cat([weight[: table.reserved], _lengthen(weight[table.reserved :], max_len, method)])
        lengthened.append((table.module, nn.Parameter(rows.detach().clone(), requires_grad=weight.requires_grad)))
        if table.config is not None:
            grown = table.config.max_position_embeddings + max_len - table.max_len
            configs[id(table.config)] = table.config, grown
    for module, longer in lengthened:  # from here on nothing can fail
        module.weight = longer
        if isinstance(module, nn.Embedding):
            module.num_embeddings = len(longer)
    for config, grown in configs.values():
        config.max_position_embeddings = grown
    for path, buffer in list(model.named_buffers()):
        owner, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        if buffer.dim() != 2 or buffer.shape[1] not in widths:
            continue
        width, persistent = widths[buffer.shape[1]], name not in owner._non_persistent_buffers_set
        if name == "position_ids":
            longer_ids = torch.arange(width, device=buffer.device, dtype=buffer.dtype).expand(len(buffer), -1)
            owner.register_buffer(name, longer_ids, persistent)
        elif name == "token_type_ids":
            owner.register_buffer(name, buffer.new_zeros(len(buffer), width), persistent)


@torch.no_grad()
def _lengthen(rows: Tensor, max_len: int, method: str) -> Tensor:
    if method == "tile":
        return rows.repeat(-(-max_len // len(rows)), 1)[:max_len]
    stretched = F.interpolate(rows.float().T[None], size=max_len, mode="linear", align_corners=True)
    return stretched[0].T.to(rows.dtype)


# Rotary angles ----------------------------------------------------------------------------------------------


def _find_rotary(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Parent, name and configuration of every rotary embedding of transformers."""
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        if hasattr(module, "rope_type") and getattr(config, "rope_parameters", None) and path:
            parent, _, name = path.rpartition(".")
            yield model.get_submodule(parent), name, config


def _scale_rotary(rotary: list[tuple[nn.Module, str, Any]], max_len: int) -> None:
    replacements, configs = [], {}
    for parent, name, config in rotary:
        module = getattr(parent, name)
        scaled = copy.deepcopy(config)
        scaled.rope_parameters = _yarn(scaled.rope_parameters, config.max_position_embeddings, max_len)
        scaled.max_position_embeddings = max_len
        device = next((buffer.device for buffer in module.buffers()), None)
        fresh = type(module)(scaled).to(device)
        fresh.config = config
        replacements.append((parent, name, fresh))
        configs[id(config)] = config, scaled.rope_parameters
    for config, parameters in configs.values():  # from here on nothing can fail
        config.max_position_embeddings = max_len
        config.rope_parameters = parameters
    for parent, name, fresh in replacements:
        setattr(parent, name, fresh)


def _yarn(parameters: dict[str, Any], old_len: int, max_len: int) -> dict[str, Any]:
    """``config.rope_parameters`` with YaRN; where layers differ, for those that attend to everything."""
    if "rope_type" not in parameters:
        full = parameters.get("full_attention")
        if full is None:
            raise ValueError(f"extend_positions: no full_attention in rope_parameters, got {', '.join(parameters)}")
        return {**parameters, "full_attention": _yarn(full, old_len, max_len)}
    if parameters["rope_type"] != "default":
        raise ValueError(
            f"extend_positions: the rotary positions are scaled already, rope_type {parameters['rope_type']!r}; "
            "load the model without that"
        )
    return {
        **parameters,
        "rope_type": "yarn",
        "factor": max_len / old_len,
        "original_max_position_embeddings": old_len,
    }
