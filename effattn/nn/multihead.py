"""Multi-head attention as a module, with any backend behind it."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ..attention import attention, attention_weights
from ..backend import Backend, Request, get
from ..masks import Mask, band_of
from .cache import KVCache
from .checks import as_mask, check_positive, check_probability, check_states
from .positions import ALiBi, Rotary

__all__ = ["MultiheadAttention", "set_backend"]


class MultiheadAttention(nn.Module):
    """Multi-head attention, to itself or to a ``context``, by any backend (Vaswani et al. 2017, section 3.2.2).

    Args:
        d_model: width of the input and the output; a multiple of ``num_heads``.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of ``num_heads``; None: as many (grouped-query attention).
        backend: a name, a spec string or a ``Backend``; the attribute of that name may be set at any time.
        bias: whether the four projections have one.
        dropout: probability of dropping an attention weight, in training alone.
        positions: ``Rotary`` turns queries and keys; ``ALiBi`` biases the scores, which are then computed in at least
            float32. Self-attention only.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        backend: str | Backend = "sdpa",
        bias: bool = True,
        dropout: float = 0.0,
        positions: Rotary | ALiBi | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_positive("attention", d_model=d_model, num_heads=num_heads, num_kv_heads=num_kv_heads)
        check_probability("attention", dropout=dropout)
        if d_model % num_heads:
            raise ValueError(f"attention: d_model must be a multiple of num_heads = {num_heads}, got {d_model}")
        if num_heads % num_kv_heads:
            raise ValueError(f"attention: num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}")
        head_dim = d_model // num_heads
        if isinstance(positions, Rotary) and positions.head_dim != head_dim:
            raise ValueError(f"attention: positions must be rotary for head_dim {head_dim}, got {positions.head_dim}")
        if isinstance(positions, ALiBi) and positions.num_heads != num_heads:
            raise ValueError(f"attention: positions must be ALiBi for {num_heads} heads, got {positions.num_heads}")
        self.d_model, self.num_heads, self.num_kv_heads, self.head_dim = d_model, num_heads, num_kv_heads, head_dim
        self.dropout = dropout
        self.positions = positions
        self.q_proj = nn.Linear(d_model, d_model, bias=bias)
        self.k_proj = nn.Linear(d_model, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(d_model, num_kv_heads * head_dim, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)
        self.backend = backend

    @property
    def backend(self) -> Backend:
        """What computes the attention; a name or spec string may be assigned too."""
        return self._backend

    @backend.setter
    def backend(self, backend: str | Backend) -> None:
        self._backend = get(backend)

    def forward(
        self,
        x: Float[Tensor, "batch seq d_model"],
        context: Float[Tensor, "batch context_len d_model"] | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """Each token's attention over all tokens, or over those of ``context``.

        Args:
            x: the tokens that ask; with a cache, the new ones, which stand after those that it holds.
            context: what they attend to instead of themselves (cross-attention).
            mask, bias: as in ``effattn.attention``, over the keys ``[batch, heads, seq, key_len]``, cached ones
                included. Nothing is causal unless the mask says so.
            cache: of self-attention, extended by this call, for any number of new tokens at a time; the mask must
                then be causal. Of cross-attention: holds the projected context, computed by the first call.

        Raises:
            ValueError: shapes that do not fit, or a cache without a causal mask.
            UnsupportedError: the backend cannot do this.
        """
        q, k, v, mask, bias = self._prepare(x, context, mask, bias, cache)
        dropout_p = self.dropout if self.training else 0.0
        dtype = q.dtype
        if isinstance(self.positions, ALiBi):  # half precision, which some backends narrow a bias to, cannot hold it
            q, k, v = (t.to(torch.promote_types(dtype, torch.float32)) for t in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):  # the projections are in its dtype already
            output = attention(q, k, v, backend=self._backend, mask=mask, bias=bias, dropout_p=dropout_p)
        assert isinstance(output, Tensor)
        return self.out_proj(rearrange(output.to(dtype), "b h l d -> b l (h d)"))

    @torch.no_grad()
    def weights(
        self,
        x: Float[Tensor, "batch seq d_model"],
        context: Float[Tensor, "batch context_len d_model"] | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Float[Tensor, "batch heads seq key_len"]:
        """The attention weights that ``forward`` would use, from the backend's own pattern, before dropout.

        In at least float32, without gradients; a row that sees nothing is 0. Quadratic, by the dense reference: for
        looking at, not for training. A backend without a softmax pattern, or that draws anew at each call, is
        refused with ``UnsupportedError``.
        """
        q, k, _, mask, bias = self._prepare(x, context, mask, bias, None)
        self._backend.check(Request.of(q, k, k, mask=mask, bias=bias))
        return attention_weights(q, k, backend=self._backend, mask=mask, bias=bias)

    def _prepare(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Mask | Tensor | None,
        bias: Tensor | None,
        cache: KVCache | None,
    ) -> tuple[Tensor, Tensor, Tensor, Mask, Tensor | None]:
        """Query, key, value, mask and bias as ``effattn.attention`` takes them."""
        check_states("attention", "x", x, self.d_model)
        if isinstance(mask, Tensor) and mask.is_floating_point():
            if bias is not None:
                raise ValueError("attention: a floating mask is a bias, and bias is given too; add them, or give one")
            mask, bias = None, mask
        mask = as_mask("attention", mask)
        q = rearrange(self.q_proj(x), "b l (h d) -> b h l d", d=self.head_dim)
        if context is not None:
            return q, *self._attend_to(context, cache), mask, bias
        offset = 0 if cache is None else cache.length
        if cache is not None and band_of(mask)[0].right != 0:
            raise ValueError(
                "attention: a cache needs a causal mask, since tokens read before cannot see later ones; "
                f"give Causal() & mask, got {mask}"
            )
        k, v = self._keys_and_values(x)
        if isinstance(self.positions, Rotary):
            q, k = self.positions(q, offset), self.positions(k, offset)
        if cache is not None:
            k, v = cache.append(k, v)
        if isinstance(self.positions, ALiBi):
            penalty = self.positions(mask, q.shape[2], k.shape[2], offset, q.device)
            bias = penalty if bias is None else bias + penalty
        return q, k, v, mask, bias

    def _attend_to(self, context: Tensor, cache: KVCache | None) -> tuple[Tensor, Tensor]:
        if self.positions is not None:
            raise ValueError(
                f"attention: {type(self.positions).__name__} is for self-attention, "
                "a context has no positions relative to x"
            )
        check_states("attention", "context", context, self.d_model)
        if cache is None:
            return self._keys_and_values(context)
        if cache.key is None or cache.value is None:
            return cache.append(*self._keys_and_values(context))
        held, got = [cache.key.shape[0], cache.length], list(context.shape[:2])
        if held != got:
            raise ValueError(f"attention: the cache holds a context of [batch, seq] = {held}, got {got}")
        return cache.key, cache.value

    def _keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (rearrange(p(x), "b s (h d) -> b h s d", d=self.head_dim) for p in (self.k_proj, self.v_proj))
        return k, v

    def extra_repr(self) -> str:
        heads = f"{self.d_model}, {self.num_heads}" + f", {self.num_kv_heads}" * (self.num_kv_heads != self.num_heads)
        return f"{heads}, backend={str(self._backend)!r}" + f", dropout={self.dropout}" * (self.dropout > 0)


def set_backend(model: nn.Module, backend: str | Backend) -> None:
    """Give every ``MultiheadAttention`` within ``model`` this backend; one alone: set its attribute ``backend``.

    Raises ``ValueError`` where there is none: ``effattn.swap`` serves other modules.
    """
    chosen = get(backend)
    modules = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
    if not modules:
        raise ValueError(f"set_backend: there is no effattn.nn.MultiheadAttention in {type(model).__name__}")
    for module in modules:
        module.backend = chosen
