"""Attention problems to try a backend on, and how far from the truth it may be.

The yardstick is not a guess: a backend's error against float64 may be at most twice that of
``F.scaled_dot_product_attention`` on the same inputs in the same dtype, under the pattern of the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from effattn import reference
from effattn.attention import attention
from effattn.attention import pattern as pattern_of
from effattn.backend import Backend, Request
from effattn.masks import Everything, Mask

__all__ = ["Example", "Result", "assert_close_to_reference", "run"]

MakeMask = Callable[["Example"], Mask | None]


@dataclass(frozen=True)
class Example:
    """One problem, by its sizes; tensors are drawn from ``seed``."""

    name: str
    mask: MakeMask = lambda example: None
    batch_size: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4
    query_len: int = 37
    key_len: int = 37
    head_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    query_offset: int | None = None
    bias_shape: tuple[int, ...] | None = None
    bias_requires_grad: bool = True
    scale: float | None = None
    magnitude: float = 1.0  # of queries and keys
    return_lse: bool = False
    backward: bool = True
    seed: int = 0

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query, key, value and bias. Where lengths and heads agree, a key is its query over its length."""
        generator = self.generator()

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        query = draw(self.batch_size, self.num_heads, self.query_len, self.head_dim) * self.magnitude
        if (self.num_heads, self.query_len) == (self.num_kv_heads, self.key_len):
            key = F.normalize(query, dim=-1) * self.head_dim**0.5 * self.magnitude
        else:
            key = draw(self.batch_size, self.num_kv_heads, self.key_len, self.head_dim) * self.magnitude
        value = draw(self.batch_size, self.num_kv_heads, self.key_len, self.value_dim)
        query, key, value = (t.to(self.device, self.dtype).requires_grad_(self.backward) for t in (query, key, value))
        bias = None
        if self.bias_shape is not None:
            bias = draw(*self.bias_shape).to(self.device, self.dtype)
            bias.requires_grad_(self.backward and self.bias_requires_grad)
        return query, key, value, bias

    def request(self) -> Request:
        """What this example asks of a backend."""
        query, key, value, bias = self.inputs()
        return Request.of(
            query,
            key,
            value,
            mask=self.mask(self),
            bias=bias,
            query_offset=self.query_offset,
            return_lse=self.return_lse,
        )


@dataclass(frozen=True)
class Result:
    """Output, log-sum-exp and gradients (query, key, value, bias) of one computation."""

    output: Tensor
    lse: Tensor | None
    grads: tuple[Tensor, ...]


def run(backend: Backend, example: Example) -> Result:
    """The backend on the example."""
    query, key, value, bias = example.inputs()
    made = attention(
        query,
        key,
        value,
        backend=backend,
        mask=example.mask(example),
        bias=bias,
        scale=example.scale,
        query_offset=example.query_offset,
        return_lse=example.return_lse,
    )
    output, lse = made if isinstance(made, tuple) else (made, None)
    return Result(
        output, lse, _gradients(example, output, lse, [t for t in (query, key, value, bias) if t is not None])
    )


def assert_close_to_reference(backend: Backend, example: Example) -> None:
    """Output, log-sum-exp and gradients against the dense reference of the backend's own pattern."""
    got = run(backend, example)
    query, key, _, _ = example.inputs()
    mask = example.mask(example)
    with torch.no_grad():
        pattern = pattern_of(query, key, backend=backend, mask=mask, query_offset=example.query_offset)
    truth = _reference(backend, example, pattern, torch.float64)
    yardstick = _yardstick(backend, example, pattern)
    _assert_within("output", got.output, truth.output, yardstick.output, example)
    if got.lse is not None:
        assert truth.lse is not None
        nothing = truth.lse == -torch.inf
        assert bool((got.lse[nothing] == -torch.inf).all()), "the log-sum-exp of a row that sees nothing is not -inf"
        assert got.lse.dtype == torch.promote_types(example.dtype, torch.float32), f"log-sum-exp in {got.lse.dtype}"
        _assert_within(
            "log-sum-exp",
            got.lse.masked_fill(nothing, 0),
            truth.lse.masked_fill(nothing, 0),
            None,
            example,
        )
    for index, name in enumerate(("query", "key", "value", "bias")[: len(got.grads)]):
        _assert_within(f"gradient of {name}", got.grads[index], truth.grads[index], yardstick.grads[index], example)


def _gradients(example: Example, output: Tensor, lse: Tensor | None, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    wanted = [t for t in inputs if t.requires_grad]
    if not wanted or not output.requires_grad:
        return ()
    generator = example.generator()
    weight = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
    total = (output * weight).sum()
    if lse is not None and lse.requires_grad:
        weight = torch.randn(lse.shape, generator=generator).to(lse.device, lse.dtype)
        total = total + (lse.masked_fill(lse == -torch.inf, 0) * weight).sum()
    return torch.autograd.grad(total, wanted)


def _reference(backend: Backend, example: Example, pattern: Mask, dtype: torch.dtype) -> Result:
    query, key, value, bias = example.inputs()
    weights = _weights(backend, example)
    assert bias is None or weights is None, "an example with a bias for a backend that weighs its pattern"
    output, lse = reference.attention(
        query,
        key,
        value,
        mask=pattern,
        bias=bias if weights is None else weights,
        scale=example.scale,
        query_offset=example.query_offset,
        dtype=dtype,
    )
    used = lse if example.return_lse else None
    return Result(
        output, lse, _gradients(example, output, used, [t for t in (query, key, value, bias) if t is not None])
    )


def _weights(backend: Backend, example: Example) -> reference.BiasFunction | None:
    query, key, _, _ = example.inputs()
    offset = example.key_len - example.query_len if example.query_offset is None else example.query_offset
    return backend.reference_bias(query, key, mask=example.mask(example) or Everything(), query_offset=offset)


def _yardstick(backend: Backend, example: Example, pattern: Mask) -> Result:
    """``F.scaled_dot_product_attention`` under the same pattern, in the example's dtype."""
    query, key, value, bias = example.inputs()
    allowed = pattern.dense(
        example.batch_size,
        example.num_heads,
        example.query_len,
        example.key_len,
        example.query_offset,
        device=query.device,
    )
    additive = torch.zeros(allowed.shape, dtype=query.dtype, device=query.device)
    weights = _weights(backend, example)
    if weights is not None:
        additive = additive + weights(*reference.grid(query, key)).to(query.dtype)
    if bias is not None:
        additive = additive + bias
    additive = additive.masked_fill(~allowed, -torch.inf)
    empty = (additive == -torch.inf).all(-1, keepdim=True)
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=additive.masked_fill(empty, 0.0),
        scale=example.scale,
        enable_gqa=example.num_heads != example.num_kv_heads,
    ).masked_fill(empty, 0.0)
    return Result(
        output, None, _gradients(example, output, None, [t for t in (query, key, value, bias) if t is not None])
    )


def _assert_within(what: str, got: Tensor, truth: Tensor, yardstick: Tensor | None, example: Example) -> None:
    assert got.shape == truth.shape, f"{what}: shape {list(got.shape)}, expected {list(truth.shape)}"
    assert bool(got.isfinite().all()), f"{what}: not finite"
    size = truth.norm().item()
    # Where PyTorch happens to be exact (one key, say), a few roundings of numbers of size 1 remain allowed.
    size = max(size, truth.numel() ** 0.5)
    allowed = 4 * torch.finfo(example.dtype if yardstick is not None else torch.float32).eps * size
    if yardstick is not None:
        allowed = max(allowed, 2 * (yardstick.double() - truth).norm().item())
    error = (got.double() - truth).norm().item()
    assert error <= allowed + 1e-300, (
        f"{what}: error {error:.2e} against float64, allowed {allowed:.2e} (relative {error / max(size, 1e-300):.1e})"
    )
