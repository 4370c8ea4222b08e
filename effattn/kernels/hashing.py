"""Locality-sensitive hashing by random rotations, and the plan of chunks that follows from it.

Andoni et al. 2015 ("Practical and optimal LSH for angular distance"), as used by Reformer (Kitaev et al. 2020,
section 2): a vector's bucket is the nearest of the directions +-R, so vectors at a small angle tend to share it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from .sorted_chunks import ChunkPlan
from .workspace import Workspace

__all__ = ["plan_chunks"]

_PROJECTED = 2**19  # numbers projected at a time
_MOST_BUCKETS = 128  # in one rotation; more are made of two, as Reformer's code does, so that hashing stays O(n sqrt n)


def plan_chunks(
    query: Float[Tensor, "batch heads query_len head_dim"],
    key: Float[Tensor, "batch kv_heads key_len head_dim"],
    keep: Tensor | None,
    *,
    query_offset: int,
    chunk_size: int,
    num_hashes: int,
    look_back: int,
    look_ahead: int,
    shared: bool,
    seed: int,
) -> ChunkPlan:
    """Hash and sort queries and keys, and lay each chunk of queries beside a window of keys.

    ``keep`` ``[batch or 1, key_len]`` marks the keys that are not padding; the others are sorted last. With
    ``shared``, queries take the buckets of the keys at their index. Nothing here has a gradient.
    """
    width = min((1 + look_back + look_ahead) * chunk_size, key.shape[2])
    parts = _plan(
        query.detach(),
        key.detach(),
        keep,
        query_offset,
        chunk_size,
        num_hashes,
        look_ahead,
        width,
        shared,
        seed,
    )
    return ChunkPlan.of(parts, chunk_size, width, regular=shared and keep is None)


@torch.library.custom_op("effattn::plan_chunks", mutates_args=())
def _plan(
    query: Tensor,
    key: Tensor,
    keep: Tensor | None,
    query_offset: int,
    chunk_size: int,
    num_hashes: int,
    look_ahead: int,
    width: int,
    shared: bool,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_heads, query_len, head_dim = query.shape[1:]
    num_kv_heads, key_len = key.shape[1:3]
    positions = torch.arange(key_len, device=query.device)
    rotations = _rotations(num_hashes, head_dim, key_len, chunk_size, seed, query.device)
    key_buckets = _buckets(key, rotations)  # [rounds, batch, kv_heads, key_len]
    beyond = math.prod(2 * rotation.shape[2] for rotation in rotations)
    if keep is not None:
        keep = keep.expand(key.shape[0], key_len)
        key_buckets.masked_fill_(~keep[:, None], beyond)
    key_codes, key_order = (key_buckets * key_len + positions).sort(dim=-1)

    if shared:
        row_codes, row_order = key_codes, key_order
    else:
        row_positions = (torch.arange(query_len, device=query.device) + query_offset).clamp(0, key_len - 1)
        row_buckets = _buckets(query, rotations)
        if keep is not None and query_len == key_len and query_offset == 0:
            # Padded rows too go to the end, or they would move the real ones from chunk to chunk.
            row_buckets.masked_fill_(~keep[:, None], beyond)
        row_codes, row_order = (row_buckets * key_len + row_positions).sort(dim=-1, stable=True)
        key_codes = key_codes.repeat_interleave(num_heads // num_kv_heads, dim=2)

    # A window ends where the keys of its chunk's middle row end, plus half a chunk: with as many keys as rows in
    # each bucket, that is where the chunk itself ends.
    num_chunks = -(-query_len // chunk_size)
    half = (chunk_size - 1) // 2
    middle = (torch.arange(num_chunks, device=query.device) * chunk_size + half).clamp(max=query_len - 1)
    ends = torch.searchsorted(key_codes, row_codes[..., middle].contiguous(), right=True) + chunk_size - half - 1
    latest = torch.tensor(key_len - width, device=query.device)
    if keep is not None:
        latest = (keep.sum(-1) - width).clamp(min=0)[:, None, None]
    chunk_start = torch.minimum((ends + look_ahead * chunk_size - width).clamp(min=0), latest)

    row_rank = _inverse(row_order)
    filled = F.pad(row_order.int(), (0, num_chunks * chunk_size - query_len), value=query_len)
    return filled, row_rank, key_order.int(), _inverse(key_order), chunk_start.int()


@_plan.register_fake
def _(query, key, keep, query_offset, chunk_size, num_hashes, *rest):  # type: ignore[no-untyped-def]
    rows, keys = (num_hashes, *query.shape[:2]), (num_hashes, *key.shape[:2])
    query_len, key_len = query.shape[2], key.shape[2]
    num_chunks = -(-query_len // chunk_size)
    shapes = (
        (*rows, num_chunks * chunk_size),
        (*rows, query_len),
        (*keys, key_len),
        (*keys, key_len),
        (*rows, num_chunks),
    )
    return tuple(query.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _inverse(order: Tensor) -> Tensor:
    """The rank of each index in orders ``[..., n]``, as int32."""
    ranks = torch.arange(order.shape[-1], dtype=torch.int32, device=order.device)
    return torch.empty_like(order, dtype=torch.int32).scatter_(-1, order, ranks.expand_as(order))


def _rotations(
    num_hashes: int, head_dim: int, key_len: int, bucket_size: int, seed: int, device: torch.device
) -> list[Tensor]:
    """The factors of the hash, each ``[rounds, head_dim, buckets / 2]``; the buckets are their product."""
    wanted = max(2, 2 * round(key_len / (2 * bucket_size)))
    factors = [wanted]
    if wanted > _MOST_BUCKETS:
        first = 2 * max(1, round(wanted**0.5 / 2))
        factors = [first, 2 * max(1, round(wanted / first / 2))]
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(num_hashes, head_dim, n // 2, generator=generator, dtype=torch.float32).to(device) for n in factors
    ]


def _buckets(vectors: Tensor, rotations: list[Tensor]) -> Tensor:
    """The bucket of each vector in each round, ``[rounds, batch, heads, n]``."""
    num_hashes = rotations[0].shape[0]
    buckets = torch.zeros(num_hashes, *vectors.shape[:3], dtype=torch.int64, device=vectors.device)
    directions = torch.cat([rotation.mT.flatten(0, 1) for rotation in rotations])
    rows_at_once = max(1, _PROJECTED // len(directions))
    workspace = Workspace(torch.float32, vectors.device)
    for batch in range(vectors.shape[0]):
        for head in range(vectors.shape[1]):
            # A block at a time: the projections are larger than the vectors.
            for x, found in zip(
                vectors[batch, head].split(rows_at_once),
                buckets[:, batch, head].split(rows_at_once, dim=1),
                strict=True,
            ):
                projected = workspace("projected", len(directions), len(x))
                torch.mm(directions, workspace.convert("x", x).mT, out=projected)
                for part in projected.split([num_hashes * rotation.shape[2] for rotation in rotations]):
                    half = len(part) // num_hashes
                    found.mul_(2 * half).add_(_nearest(part.view(num_hashes, half, len(x))))
    return buckets


def _nearest(projected: Float[Tensor, "rounds directions n"]) -> Tensor:
    """Which of the directions +-R a vector is nearest to, ``[rounds, n]``; the negative ones come second.

    The index takes the place of the projection's last bits, so that one maximum and one minimum, which are much
    faster than those that return an index, find both. It is read back from there. Overwrites ``projected``.
    """
    half = projected.shape[1]
    last_bits = (1 << (half - 1).bit_length()) - 1
    index = torch.arange(half, dtype=torch.int32, device=projected.device)[:, None]
    projected.view(torch.int32).bitwise_and_(~last_bits).bitwise_or_(index)
    high, low = projected.amax(1), projected.amin(1)
    at, low_at = (extreme.view(torch.int32) & last_bits for extreme in (high, low))
    return torch.where(high >= -low, at, low_at + half)
