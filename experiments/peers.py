"""The attention that others have published, as backends: what ``make peers`` measures ours beside.

Each calls its package's own code on query, key and value as they are, without projections, so that one attention is
compared with another. A package that is missing is a reason why its backend does not run; nothing is imported before
it is used. Lengths that a package cannot serve are refused, since padding would change what it computes.

    effattn check "peer_local_attention(window=4)" --plugins experiments/peers.py
"""

from __future__ import annotations

import functools
import importlib
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

import effattn
from effattn import Backend, Capabilities, Causal, Mask, Request, Window
from effattn.kernels.hashing import plan_chunks
from effattn.reference import BiasFunction

SINGLE_AND_HALF = (torch.float32, torch.float16, torch.bfloat16)


class _Peer(Backend):
    """Self-attention by a package of others: the output alone, of equal lengths and heads."""

    package: ClassVar[str] = ""
    module: ClassVar[str] = ""
    masks: ClassVar[tuple[type[Mask], ...]] = ()
    dtypes: ClassVar[tuple[torch.dtype, ...]] = SINGLE_AND_HALF
    deterministic: ClassVar[bool] = True
    has_pattern: ClassVar[bool] = True

    @property
    def backward(self) -> bool:
        return True

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            masks=self.masks,
            bias=False,
            bias_grad=False,
            dtypes=self.dtypes,
            value_head_dim=False,
            grouped_heads=False,
            cross_length=False,
            query_offset=False,
            dropout=False,
            backward=self.backward,
            lse=False,
            lse_grad=False,
            deterministic=self.deterministic,
            pattern=self.has_pattern,
        )

    def unavailable(self) -> str | None:
        return _why_missing(self.package, self.module) if self.module else None

    def reasons(self, request: Request) -> list[str]:
        reasons = super().reasons(request)
        if request.query_len % self.multiple:
            reasons.append(f"requested seq_len {request.query_len}; supported multiples of {self.multiple}")
        return reasons

    @property
    def multiple(self) -> int:
        """What lengths must be a multiple of."""
        return 1

    def resolve(self, request: Request) -> str:
        return self.package or "torch"

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask,
        bias: Tensor | None,
        scale: float,
        dropout_p: float,
        query_offset: int,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        return self.compute(query, key, value, scale, causal=Causal in mask.kinds()), None

    def compute(self, query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> Tensor:
        """The output ``[B, H, N, D]``."""
        raise NotImplementedError


@functools.cache
def _why_missing(package: str, module: str) -> str | None:
    try:
        _import(module)
    except ImportError as error:
        return f"requires {package}, which cannot be imported here: {error}"
    return None


def _import(module: str) -> Any:
    with warnings.catch_warnings():  # packages of several years ago warn about themselves
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


# The dense baseline and the bands ---------------------------------------------------------------------------


@effattn.register
@dataclass(frozen=True)
class DenseSDPA(_Peer):
    """``F.scaled_dot_product_attention`` and nothing around it."""

    name = "peer_sdpa_dense"
    masks = (Causal,)

    def compute(self, query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)


@dataclass(frozen=True)
class _Band(_Peer):
    """What sees ``window`` keys on each side of a query, and the query's own."""

    window: int = 256

    def __post_init__(self) -> None:
        self._require_int("window", 1)

    def pattern(self, query: Tensor, key: Tensor, *, mask: Mask, query_offset: int) -> Mask:
        return mask & Window(self.window, self.window)


@effattn.register
@dataclass(frozen=True)
class LocalAttention(_Band):
    """local-attention's ``LocalAttention`` with the exact window of each token, without positions of its own."""

    name = "peer_local_attention"
    package, module = "local-attention", "local_attention"
    masks = (Causal,)

    @property
    def multiple(self) -> int:
        return self.window

    def compute(self, query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> Tensor:
        attention = _import(self.module).LocalAttention(
            self.window,
            causal=causal,
            look_backward=1,
            look_forward=0 if causal else 1,
            exact_windowsize=True,
            scale=scale,
            use_rotary_pos_emb=False,
        )
        return attention(query, key, value)


@effattn.register
@dataclass(frozen=True)
class HFLongformer(_Band):
    """Hugging Face's ``LongformerSelfAttention`` with what its projections would have given."""

    name = "peer_hf_longformer"
    package, module = "transformers", "transformers.models.longformer.modeling_longformer"

    @property
    def multiple(self) -> int:
        return 2 * self.window

    def compute(self, query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> Tensor:
        batch_size, num_heads, seq_len, head_dim = query.shape
        core = _longformer_core(self.window, num_heads, head_dim)
        # It divides the query by sqrt(head_dim), in place, and lays all three out as [N, B, H, D].
        core.query.hand_over((query * (scale * head_dim**0.5)).permute(2, 0, 1, 3))
        core.key.hand_over(key.permute(2, 0, 1, 3))
        core.value.hand_over(value.permute(2, 0, 1, 3))
        nothing = query.new_zeros(batch_size, seq_len)
        (output,) = core(
            query.new_empty(1).expand(batch_size, seq_len, num_heads * head_dim),  # only its shape is read
            attention_mask=nothing,
            is_index_masked=nothing.bool(),
            is_global_attn=False,
        )
        return output.unflatten(2, (num_heads, head_dim)).transpose(1, 2)


class _HandedOver(torch.nn.Module):
    """Stands where a projection stood: gives what it was handed over, once, and keeps nothing."""

    def hand_over(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def forward(self, _: Tensor) -> Tensor:
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        return tensor


@functools.cache
def _longformer_core(window: int, num_heads: int, head_dim: int) -> Any:
    from transformers import LongformerConfig

    config = LongformerConfig(
        attention_window=[2 * window],
        num_attention_heads=num_heads,
        hidden_size=num_heads * head_dim,
        num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng():  # for the weights that are thrown away
        core = _import(HFLongformer.module).LongformerSelfAttention(config, 0)
    core.query, core.key, core.value = _HandedOver(), _HandedOver(), _HandedOver()
    return core


@effattn.register
@dataclass(frozen=True)
class FlexBand(_Band):
    """PyTorch's FlexAttention with the band as its block mask, compiled for the length as its users do."""

    name = "peer_flex_band"
    masks = (Causal,)

    def reasons(self, request: Request) -> list[str]:
        reasons = super().reasons(request)
        if request.backward and request.device == "cpu":
            reasons.append("requested a backward pass on cpu; supported forward only: FlexAttention has no other there")
        return reasons

    def compute(self, query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> Tensor:
        block_mask = _band_block_mask(self.window, causal, query.shape[2], str(query.device))
        return _compiled_flex()(query, key, value, block_mask=block_mask, scale=scale)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    _import("torch._inductor.compile_fx")
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _band_block_mask(window: int, causal: bool, seq_len: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    most_ahead = 0 if causal else window

    def band(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (row - key <= window) & (key - row <= most_ahead)

    return create_block_mask(band, None, None, seq_len, seq_len, device=device)


# Hashing ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Hashed(_Peer):
    """Reformer's attention: ``key`` must be ``query / |query|``, since both packages take the query alone.

    They draw their rotations from torch's global generator at each call. ``pattern`` draws too, so it is that of a
    call which begins at the same state of the generator. A first chunk looks back at the round before.

    Their gradient is that of the one tensor that is query and key, not those of two, so it is refused; with
    ``joint_gradient`` the query gets it and the key zeros, which is enough to time it.
    """

    bucket_size: int = 64
    num_hashes: int = 4
    joint_gradient: bool = False

    deterministic = False

    def __post_init__(self) -> None:
        self._require_int("bucket_size", 2)
        self._require_int("num_hashes", 1)
        self._require(isinstance(self.joint_gradient, bool), "joint_gradient", "True or False")

    @property
    def backward(self) -> bool:
        return self.joint_gradient

    @property
    def multiple(self) -> int:
        return 2 * self.bucket_size

    def compute(self, query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> Tensor:
        output = self.compute_shared(query, key, value, scale)
        if self.joint_gradient and key.requires_grad:
            output = output + 0 * key[:1, :1, :1, :1]
        return output

    def compute_shared(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The output ``[B, H, N, D]``; the key, which is ``query / |query|``, may be looked at for hashing alone."""
        raise NotImplementedError

    def order(self, query: Tensor, key: Tensor) -> Tensor:
        """Positions ``[B, H, num_hashes, N]`` as each round sorts them."""
        raise NotImplementedError

    def pattern(self, query: Tensor, key: Tensor, *, mask: Mask, query_offset: int) -> Mask:
        return mask & _Met(self._places(query, key))

    def reference_bias(self, query: Tensor, key: Tensor, *, mask: Mask, query_offset: int) -> BiasFunction | None:
        """A pair that c rounds bring together counts c times: log c on its score."""
        met = _Met(self._places(query, key))

        def log_count(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return met.count(batch, head, row, key).clamp(min=1).double().log()

        return log_count

    def _places(self, query: Tensor, key: Tensor) -> Tensor:
        """The chunk of each position ``[B, H, num_hashes, N]``; numbers go on from round to round."""
        state = torch.get_rng_state()
        order = self.order(query, key)
        torch.set_rng_state(state)
        seq_len = order.shape[-1]
        ranks = torch.empty_like(order).scatter_(-1, order, torch.arange(seq_len).expand_as(order))
        first = torch.arange(self.num_hashes)[:, None] * (seq_len // self.bucket_size)
        return ranks // self.bucket_size + first


@dataclass(frozen=True, eq=False)
class _Met(Mask):
    """The pairs that share a chunk, or whose key stands in the chunk before the row's; nobody meets oneself."""

    chunk: Tensor  # [B, H, rounds, N]

    def count(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        """In how many rounds the pair meets."""
        rounds = self.chunk.shape[2]
        num_chunks = int(self.chunk.max()) + 1
        met = torch.zeros(torch.broadcast_shapes(batch.shape, head.shape, row.shape, key.shape), dtype=torch.int32)
        for index in range(rounds):
            own = self.chunk[batch, head, index, row]
            for seen in (own, (own - 1) % num_chunks):
                met += self.chunk[batch, head, seen * rounds // num_chunks, key] == seen
        return met.masked_fill(row == key, 0)

    def allows(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, query_offset: int) -> Tensor:
        return self.count(batch, head, row, key) > 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.chunk,)


@effattn.register
@dataclass(frozen=True)
class ReformerPytorch(_Hashed):
    """reformer-pytorch's ``LSHAttention``, which counts a key in each round that finds it.

    With ``order_seed`` it sorts as ``lsh(shared_qk=True, seed=order_seed)`` does instead of by rotations of its own,
    and then differs from ``lsh(count="per_round")`` in the rows of first chunks alone.
    """

    name = "peer_reformer_pytorch"
    package, module = "reformer-pytorch", "reformer_pytorch.reformer_pytorch"
    order_seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_int("order_seed", 0, optional=True)

    def compute_shared(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        batch_size, num_heads, _, head_dim = query.shape
        attention = self._attention()
        if self.order_seed is not None:
            codes = self._codes(key)
            attention.hash_vectors = lambda *_, **__: codes
        factor = scale * head_dim**0.5
        merged = (query if factor == 1 else query * factor).flatten(0, 1)
        output = attention(merged, value.flatten(0, 1))[0]
        return output.unflatten(0, (batch_size, num_heads))

    def order(self, query: Tensor, key: Tensor) -> Tensor:
        batch_size, num_heads, seq_len, _ = query.shape
        if self.order_seed is None:
            codes = self._attention().hash_vectors(seq_len // self.bucket_size, query.detach().flatten(0, 1))
        else:
            codes = self._codes(key)
        codes = codes.view(batch_size, num_heads, self.num_hashes, seq_len)
        return (codes * seq_len + torch.arange(seq_len)).argsort(-1)

    def _attention(self) -> Any:
        return _import(self.module).LSHAttention(bucket_size=self.bucket_size, n_hashes=self.num_hashes).eval()

    def _codes(self, key: Tensor) -> Tensor:
        """Our places in the order, which sort as our buckets do: ``[B * H, num_hashes * N]``."""
        plan = plan_chunks(
            key,
            key,
            None,
            query_offset=0,
            chunk_size=self.bucket_size,
            num_hashes=self.num_hashes,
            look_back=1,
            look_ahead=0,
            shared=True,
            seed=int(self.order_seed or 0),
        )
        rank = plan.key_rank.long()
        rank = rank + torch.arange(self.num_hashes).view(-1, 1, 1, 1) * key.shape[2]
        return rank.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)


@effattn.register
@dataclass(frozen=True)
class HFReformer(_Hashed):
    """Hugging Face's ``LSHSelfAttention`` with what its projections would have given, its buckets as it sets them."""

    name = "peer_hf_reformer"
    package, module = "transformers", "transformers.models.reformer.modeling_reformer"
    dtypes = (torch.float32, torch.bfloat16)

    def compute_shared(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        core = self._core(query)
        core.query_key.hand_over(query * scale)  # against keys of length 1
        core.value.hand_over(value)
        return core(query.transpose(1, 2)).hidden_states

    def order(self, query: Tensor, key: Tensor) -> Tensor:
        seq_len = query.shape[2]
        buckets = self._core(query)._hash_vectors(query, self.num_hashes, None)
        return buckets.unflatten(2, (self.num_hashes, seq_len)).argsort(dim=-1, stable=True)

    def _core(self, query: Tensor) -> Any:
        return _reformer_core(self.bucket_size, self.num_hashes, *query.shape[1:])


@functools.cache
def _reformer_core(bucket_size: int, num_hashes: int, num_heads: int, seq_len: int, head_dim: int) -> Any:
    from transformers import ReformerConfig

    class Core(_import(HFReformer.module).LSHSelfAttention):  # type: ignore[misc]
        """The layer on heads that are split already."""

        def _split_hidden_size_dim(self, x: Tensor, *sizes: int) -> Tensor:
            return x

        def _merge_hidden_size_dims(self, x: Tensor, *sizes: int) -> Tensor:
            return x

    config = ReformerConfig(
        num_attention_heads=num_heads,
        attention_head_size=head_dim,
        hidden_size=num_heads * head_dim,
        lsh_attn_chunk_length=bucket_size,
        num_hashes=num_hashes,
        lsh_attention_probs_dropout_prob=0.0,
        max_position_embeddings=seq_len,
        is_decoder=False,
    )
    with torch.random.fork_rng():  # for the weights that are thrown away
        core = Core(config)
    core.query_key, core.value = _HandedOver(), _HandedOver()
    logging.disable(logging.WARNING)  # it would tell that it sets the number of buckets, as it recommends
    core._set_num_buckets(seq_len)
    logging.disable(logging.NOTSET)
    return core


# Without a softmax pattern ----------------------------------------------------------------------------------


@effattn.register
@dataclass(frozen=True)
class Performer(_Peer):
    """performer-pytorch's ``FastAttention``: positive random features instead of the softmax; no pattern."""

    name = "peer_performer"
    package, module = "performer-pytorch", "performer_pytorch.performer_pytorch"
    has_pattern = False
    num_features: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        self._require_int("num_features", 1)
        self._require_int("seed", 0)

    def compute(self, query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> Tensor:
        head_dim = query.shape[3]
        attention = _performer_attention(self.num_features, self.seed, head_dim).to(query.device)
        factor = scale * head_dim**0.5
        return attention(query if factor == 1 else query * factor, key, value)


@functools.cache
def _performer_attention(num_features: int, seed: int, head_dim: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _import(Performer.module).FastAttention(head_dim, nb_features=num_features)


@effattn.register
@dataclass(frozen=True)
class Nystrom(_Peer):
    """nystrom-attention's ``NystromAttention`` with what its projection would have given; no pattern."""

    name = "peer_nystrom"
    package, module = "nystrom-attention", "nystrom_attention"
    has_pattern = False
    dtypes = (torch.float32,)
    num_landmarks: int = 256
    pinv_iterations: int = 6

    def __post_init__(self) -> None:
        self._require_int("num_landmarks", 1)
        self._require_int("pinv_iterations", 1)

    @property
    def multiple(self) -> int:
        return self.num_landmarks

    def compute(self, query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> Tensor:
        num_heads, _, head_dim = query.shape[1:]
        core = _nystrom_core(self.num_landmarks, self.pinv_iterations, num_heads, head_dim)
        factor = scale * head_dim**0.5
        heads = (query if factor == 1 else query * factor, key, value)
        merged = torch.cat([t.transpose(1, 2).flatten(2) for t in heads], dim=-1)
        core.to_qkv.hand_over(merged)
        return core(query.transpose(1, 2).flatten(2)).unflatten(2, (num_heads, head_dim)).transpose(1, 2)


@functools.cache
def _nystrom_core(num_landmarks: int, pinv_iterations: int, num_heads: int, head_dim: int) -> Any:
    with torch.random.fork_rng():  # for the weights that are thrown away
        core = _import(Nystrom.module).NystromAttention(
            dim=num_heads * head_dim,
            dim_head=head_dim,
            heads=num_heads,
            num_landmarks=num_landmarks,
            pinv_iterations=pinv_iterations,
            residual=False,
        )
    core.to_qkv, core.to_out = _HandedOver(), torch.nn.Identity()
    return core
