"""The one call: checks its arguments, fills in the defaults, and hands over to a backend."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from .backend import Backend, Request, UnsupportedError, get
from .masks import Dense, Everything, Mask, calm_padded_rows, hide_padding
from .reference import score_rows

__all__ = ["attention", "attention_weights", "pattern"]


def attention(
    query: Float[Tensor, "batch heads query_len head_dim"],
    key: Float[Tensor, "batch kv_heads key_len head_dim"],
    value: Float[Tensor, "batch kv_heads key_len value_dim"],
    *,
    backend: str | Backend = "full",
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    query_offset: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ``query`` over ``key`` and ``value`` by any registered backend.

    Args:
        query, key, value: floating tensors of one dtype and device (autocast casts them). ``heads`` is a
            multiple of ``kv_heads``: query head h reads key head ``h // (heads / kv_heads)``.
        backend: a name, a spec string such as ``"sliding_window(left=128)"``, or a ``Backend``.
        mask: a mask of ``effattn.masks``; a bool tensor is ``Dense`` (True = may attend), a floating one is
            ``bias``, as in ``F.scaled_dot_product_attention``.
        bias: added to the scaled scores; broadcastable to ``[batch, heads, query_len, key_len]``; it gets a
            gradient. It is no mask, but a row that is -inf everywhere sees nothing.
        scale: factor of the scores; None means ``head_dim ** -0.5``.
        dropout_p: probability in 0..1 of dropping a weight. A function has no training flag: pass 0 in evaluation.
        query_offset: query i stands at position ``query_offset + i``; None means ``key_len - query_len``, so that
            the last query sees the last key. torch's top-left ``is_causal`` is 0.
        return_lse: also return the log-sum-exp of each row's scores.

    Returns:
        The output ``[batch, heads, query_len, value_dim]`` in the queries' dtype, and with ``return_lse`` the
        log-sum-exp ``[batch, heads, query_len]`` in at least float32. A row that sees nothing gives 0 and -inf.

    Raises:
        ValueError: an argument does not fit; the message names it, what was given and what is allowed.
        UnsupportedError: the backend cannot do this; the message lists every reason.
    """
    chosen = get(backend)
    query, key, value = _autocast(query, key, value)
    _check_inputs(query, key, value)
    mask, bias = _mask_and_bias(mask, bias)
    _check_options(query, key, bias, scale, dropout_p, query_offset)
    batch_size, num_heads, query_len, head_dim = query.shape
    key_len = key.shape[2]
    offset = key_len - query_len if query_offset is None else query_offset
    _check_mask(mask, query, key_len, offset)
    chosen.check(
        Request.of(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            dropout_p=dropout_p,
            query_offset=offset,
            return_lse=return_lse,
        )
    )
    lse: Tensor | None
    if 0 in (batch_size, num_heads, query_len, key_len):
        output, lse = _nothing(query, key, value, bias)
    else:
        key, value = hide_padding(mask, key, value)
        query = calm_padded_rows(mask, query, offset)
        with torch.autocast(query.device.type, enabled=False):
            output, lse = chosen.attend(
                query,
                key,
                value,
                mask=mask,
                bias=bias,
                scale=head_dim**-0.5 if scale is None else float(scale),
                dropout_p=dropout_p,
                query_offset=offset,
                return_lse=return_lse,
            )
    if return_lse:
        assert lse is not None, f"{chosen} declares the log-sum-exp and returned none"
        return output, lse
    return output


def pattern(
    query: Float[Tensor, "batch heads query_len head_dim"],
    key: Float[Tensor, "batch kv_heads key_len head_dim"],
    *,
    backend: str | Backend,
    mask: Mask | Tensor | None = None,
    query_offset: int | None = None,
) -> Mask:
    """What ``backend`` effectively attends to under ``mask``, as a mask; ``.dense(...)`` materialises it.

    An exact backend gives back the caller's mask. Arguments and errors as in ``attention``.
    """
    chosen = get(backend)
    query, key = _autocast(query, key)
    _check_inputs(query, key, key)
    mask, bias = _mask_and_bias(mask, None)
    if bias is not None:
        raise ValueError(
            "mask: a floating tensor is a bias, which is no part of a pattern; give a bool tensor or a Mask"
        )
    offset = key.shape[2] - query.shape[2] if query_offset is None else query_offset
    _check_mask(mask, query, key.shape[2], offset)
    (key,) = hide_padding(mask, key)
    query = calm_padded_rows(mask, query, offset)
    with torch.autocast(query.device.type, enabled=False):
        return chosen.pattern(query, key, mask=mask, query_offset=offset)


def attention_weights(
    query: Float[Tensor, "batch heads query_len head_dim"],
    key: Float[Tensor, "batch kv_heads key_len head_dim"],
    *,
    backend: str | Backend = "full",
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    query_offset: int | None = None,
) -> Float[Tensor, "batch heads query_len key_len"]:
    """The softmax over the pattern of ``backend``, in at least float32, before dropout. A row that sees nothing is 0.

    By the dense reference: quadratic, for looking at. Arguments and errors as in ``attention``; a backend without a
    softmax pattern, or with another one at each call, is refused with ``UnsupportedError``.
    """
    chosen = get(backend)
    query, key = _autocast(query, key)
    mask, bias = _mask_and_bias(mask, bias)
    offset = key.shape[2] - query.shape[2] if query_offset is None else query_offset
    seen = pattern(query, key, backend=chosen, mask=mask, query_offset=offset)
    _check_options(query, key, bias, scale, 0.0, offset)
    able, reasons = chosen.capabilities, []
    if not able.pattern:
        reasons.append("requested attention weights; supported the output only")
    if not able.deterministic:
        reasons.append("requested attention weights of a backend that draws anew at each call; set its seed")
    own_bias = None if reasons else chosen.reference_bias(query, key, mask=mask, query_offset=offset)
    if own_bias is not None and bias is not None:
        reasons.append("requested attention weights with a bias, but the backend weighs its pattern; supported none")
    if reasons:
        raise UnsupportedError(chosen, reasons)
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        rows = score_rows(
            query,
            key,
            mask=seen,
            bias=bias if own_bias is None else own_bias,
            scale=scale,
            query_offset=offset,
            dtype=dtype,
        )
        weights = [block.weights for block in rows]
    return torch.cat(weights, dim=2) if weights else query.new_zeros(*query.shape[:3], key.shape[2], dtype=dtype)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, attention runs in its dtype, as ``F.scaled_dot_product_attention`` does."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )


def _check_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(f"{name}: must have shape [batch, heads, seq, head_dim], got {list(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ValueError(f"{name}: must be floating, got {tensor.dtype}")
    for name, tensor in tensors.items():
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name}: must have the queries' dtype {query.dtype}, got {tensor.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"{name}: must be on the queries' device {query.device}, got {tensor.device}")
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(f"{name}: must have the queries' batch size {query.shape[0]}, got {tensor.shape[0]}")
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"key: must have the queries' head_dim {query.shape[3]}, got {key.shape[3]}")
    if query.shape[3] == 0:
        raise ValueError("query: head_dim must be >= 1, got 0")
    if value.shape[1:3] != key.shape[1:3]:
        raise ValueError(
            f"value: must have the keys' heads and length {list(key.shape[1:3])}, got {list(value.shape[1:3])}"
        )
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    if num_heads % num_kv_heads if num_kv_heads else num_heads:
        hint = ""
        if query.shape[2] == key.shape[1] or query.shape[1] == query.shape[2]:
            hint = "; the layout is [batch, heads, seq, head_dim]"
        raise ValueError(f"query: heads must be a multiple of the keys' heads {num_kv_heads}, got {num_heads}{hint}")


def _mask_and_bias(mask: Mask | Tensor | None, bias: Tensor | None) -> tuple[Mask, Tensor | None]:
    if mask is None or isinstance(mask, Mask):
        return (Everything() if mask is None else mask), bias
    if not isinstance(mask, Tensor):
        raise ValueError(f"mask: must be a Mask, a tensor or None, got {type(mask).__name__}")
    if mask.dtype == torch.bool:
        return Dense(mask), bias
    if not mask.is_floating_point():
        raise ValueError(
            f"mask: a tensor must be bool (True = may attend) or floating (a bias), got {mask.dtype}; "
            "a 0/1 padding mask is Padding(keep)"
        )
    if bias is not None:
        raise ValueError("mask: a floating tensor is a bias, and bias is given too; add them, or give one")
    return Everything(), mask


def _check_options(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    scale: float | None,
    dropout_p: float,
    query_offset: int | None,
) -> None:
    if bias is not None:
        shape = [*query.shape[:3], key.shape[2]]
        if not isinstance(bias, Tensor) or not bias.is_floating_point():
            got = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
            raise ValueError(f"bias: must be a floating tensor, got {got}; a bool mask goes to mask")
        if bias.device != query.device:
            raise ValueError(f"bias: must be on the queries' device {query.device}, got {bias.device}")
        sizes = [1] * (4 - bias.dim()) + list(bias.shape)
        if bias.dim() > 4 or any(got not in (1, want) for got, want in zip(sizes, shape, strict=True)):
            raise ValueError(
                f"bias: must be broadcastable to [batch, heads, query_len, key_len] = {shape}, got {list(bias.shape)}"
            )
    if scale is not None and not (isinstance(scale, int | float) and math.isfinite(scale)):
        raise ValueError(f"scale: must be a finite number or None, got {scale!r}")
    if not (isinstance(dropout_p, int | float) and 0 <= dropout_p <= 1):
        raise ValueError(f"dropout_p: must lie in 0..1, got {dropout_p!r}")
    if query_offset is not None and (not isinstance(query_offset, int) or isinstance(query_offset, bool)):
        raise ValueError(f"query_offset: must be an integer or None, got {query_offset!r}")


def _check_mask(mask: Mask, query: Tensor, key_len: int, query_offset: int) -> None:
    batch_size, num_heads, query_len, _ = query.shape
    mask.validate(batch_size, num_heads, query_len, key_len, query_offset)
    for tensor in mask.tensors:
        if tensor.device != query.device:
            raise ValueError(f"mask: must be on the queries' device {query.device}, got {tensor.device} in {mask!r}")


def _nothing(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result where a length is 0: zeros and -inf, still a function of the inputs, with zero gradients."""
    everything = torch.ones((), dtype=torch.bool, device=query.device)
    total = query.sum() + key.sum() + value.sum()
    if bias is not None:
        total = total + bias.sum().to(total.dtype)
    zero = total.masked_fill(everything, 0.0)
    output = zero.expand(*query.shape[:3], value.shape[3]).clone()
    dtype = torch.promote_types(query.dtype, torch.float32)
    return output, output.new_full(query.shape[:3], -math.inf, dtype=dtype)
