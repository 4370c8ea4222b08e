"""Hashing that puts vectors at a small angle into one bucket, and the plan of chunks that follows from it.

By random rotations, Andoni et al. 2015 ("Practical and optimal LSH for angular distance"), as used by Reformer
(Kitaev et al. 2020, section 2): a vector's bucket is the nearest of the directions +-R. Or by anchors, directions
that are found among the keys: spherical k-means (Dhillon & Modha 2001) on a sample of them, as routing attention
(Roy et al. 2021) learns its centroids; where many buckets are wanted, a second level divides each bucket by the
residual (Jegou et al. 2011, section 5).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from .sorted_chunks import ChunkPlan
from .workspace import Workspace

__all__ = ["first_kept", "plan_chunks"]

_PROJECTED, _PROJECTED_ON_GPU = 2**19, 2**23  # numbers projected at a time: what fits a cache, or fills a GPU
_SAMPLED = 16  # keys for each anchor
_STEPS = 2  # of k-means
_MOST_ANCHORS = 64  # in one level, until the second has as many
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
    hashing: str = "rotation",
    local: bool = False,
    sinks: int = 0,
) -> ChunkPlan:
    """Hash and sort queries and keys, and lay each chunk of queries beside a window of keys.

    ``keep`` ``[batch or 1, key_len]`` marks the keys that are not padding; the others are sorted last, and so are
    the first ``sinks`` keys. With ``shared``, queries take the buckets of the keys at their index. ``local`` puts a
    round that sorts by position alone before those of ``num_hashes``. Nothing here has a gradient.
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
        hashing,
        local,
        sinks,
    )
    return ChunkPlan.of(parts, chunk_size, width, regular=shared and keep is None and not sinks)


def first_kept(keep: Tensor | None, count: int, key_len: int, device: torch.device) -> Tensor:
    """The first ``count`` keys that are not padding, as bool ``[batch or 1, key_len]``."""
    if keep is None:
        return (torch.arange(key_len, device=device) < count)[None]
    keep = keep.expand(-1, key_len)
    return keep & (keep.cumsum(-1) <= count)


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
    hashing: str = "rotation",
    local: bool = False,
    sinks: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_heads, query_len = query.shape[1:3]
    num_kv_heads, key_len = key.shape[1:3]
    positions = torch.arange(key_len, device=query.device)
    padded_rows = None
    if keep is not None:
        keep = keep.expand(key.shape[0], key_len)
        if query_len == key_len and query_offset == 0:
            padded_rows = ~keep[:, None]
    if sinks:
        apart = first_kept(keep, sinks, key_len, query.device)
        keep = (~apart if keep is None else keep & ~apart).expand(key.shape[0], key_len)

    queries = None if shared else query
    if hashing == "anchors":
        key_buckets, row_buckets = _anchor_buckets(key, queries, keep, num_hashes, chunk_size, seed)
    else:
        rotations = _rotations(num_hashes, key.shape[3], key_len, chunk_size, seed, query.device)
        key_buckets = _buckets(key, rotations)  # [rounds, batch, kv_heads, key_len]
        row_buckets = None if queries is None else _buckets(queries, rotations)
    if local:
        key_buckets = F.pad(key_buckets, (0, 0, 0, 0, 0, 0, 1, 0))
        row_buckets = None if row_buckets is None else F.pad(row_buckets, (0, 0, 0, 0, 0, 0, 1, 0))
    beyond = 2 * key_len + 2  # there are fewer buckets
    if keep is not None:
        key_buckets.masked_fill_(~keep[:, None], beyond)
    key_codes, key_order = (key_buckets * key_len + positions).sort(dim=-1)

    if row_buckets is None:
        row_codes, row_order = key_codes, key_order
    else:
        row_positions = (torch.arange(query_len, device=query.device) + query_offset).clamp(0, key_len - 1)
        if padded_rows is not None:
            # Padded rows too go to the end, or they would move the real ones from chunk to chunk.
            row_buckets.masked_fill_(padded_rows, beyond)
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
def _(query, key, keep, query_offset, chunk_size, num_hashes, look_ahead, width, shared, seed, *options):  # type: ignore[no-untyped-def]
    num_rounds = num_hashes + (len(options) > 1 and options[1])
    rows, keys = (num_rounds, *query.shape[:2]), (num_rounds, *key.shape[:2])
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
    rows_at_once = _rows_at_once(directions)
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


def _rows_at_once(directions: Tensor) -> int:
    numbers = _PROJECTED if directions.device.type == "cpu" else _PROJECTED_ON_GPU
    return max(1, numbers // len(directions))


def _nearest(projected: Float[Tensor, "rounds directions n"]) -> Tensor:
    """Which of the directions +-R a vector is nearest to, ``[rounds, n]``; the negative ones come second.

    Overwrites ``projected``.
    """
    half = projected.shape[1]
    last_bits = _write_index(projected)
    high, low = projected.amax(1), projected.amin(1)
    at, low_at = (extreme.view(torch.int32) & last_bits for extreme in (high, low))
    return torch.where(high >= -low, at, low_at + half)


def _best(scores: Float[Tensor, "rounds anchors n"]) -> Tensor:
    """The anchor of the largest score, int64 ``[rounds, n]``. Overwrites ``scores``."""
    last_bits = _write_index(scores)
    # NaN may hold any index.
    return (scores.amax(1).view(torch.int32) & last_bits).clamp(max=scores.shape[1] - 1).long()


def _write_index(projected: Float[Tensor, "rounds directions n"]) -> int:
    """Put each direction's index in the place of its projections' last bits, and say which bits these are.

    So one maximum or minimum, much faster than those that return an index, brings the index with it.
    """
    last_bits = (1 << (projected.shape[1] - 1).bit_length()) - 1
    index = torch.arange(projected.shape[1], dtype=torch.int32, device=projected.device)[:, None]
    projected.view(torch.int32).bitwise_and_(~last_bits).bitwise_or_(index)
    return last_bits


def _anchor_buckets(
    key: Tensor, query: Tensor | None, keep: Tensor | None, num_hashes: int, bucket_size: int, seed: int
) -> tuple[Tensor, Tensor | None]:
    """The buckets of keys and queries in each round, ``[rounds, batch, heads, n]``.

    Every head of keys has anchors of its own, found among the keys that ``keep`` marks; no other vector has a say.
    The draws are the same for all, so that what stands in one batch row changes nothing in another.
    """
    wanted = max(1, round(key.shape[2] / bucket_size))
    first = min(wanted, max(_MOST_ANCHORS, round(wanted**0.5)))
    sizes = [first] if first == wanted else [first, round(wanted / first)]
    generator = torch.Generator().manual_seed(seed)
    within = torch.rand(num_hashes, _SAMPLED * first, generator=generator, dtype=torch.float64).to(key.device)
    line = torch.randn(num_hashes, key.shape[3], 1, generator=generator, dtype=torch.float32).to(key.device)

    def no_buckets(of: Tensor) -> Tensor:
        return torch.zeros(num_hashes, *of.shape[:3], dtype=torch.int64, device=of.device)

    key_buckets, query_buckets = no_buckets(key), None if query is None else no_buckets(query)
    workspace = Workspace(torch.float32, key.device)
    for batch in range(key.shape[0]):
        for head in range(key.shape[1]):
            keys = key[batch, head] if keep is None else key[batch, head][keep[batch]]
            if not len(keys):
                continue
            # One key of each of as many equal stretches.
            stretch = torch.arange(within.shape[1], device=key.device)
            index = ((stretch + within) * (len(keys) / within.shape[1])).long().clamp(max=len(keys) - 1)
            anchors = _anchors(F.normalize(keys[index].float(), dim=-1), sizes, line)
            _fill(key_buckets[:, batch, head], key[batch, head], anchors, workspace, residual=True)
            if query is not None and query_buckets is not None:
                group = query.shape[1] // key.shape[1]
                for query_head in range(head * group, (head + 1) * group):
                    _fill(query_buckets[:, batch, query_head], query[batch, query_head], anchors, workspace)
    return key_buckets, query_buckets


def _anchors(sample: Float[Tensor, "rounds n dim"], sizes: list[int], line: Tensor) -> list[Tensor]:
    """The anchors of each level ``[rounds, size, dim]``, in order along ``line``, so that neighbours are alike."""
    levels: list[Tensor] = []
    for size in sizes:
        if levels:
            nearest = _best(torch.bmm(levels[-1], sample.mT))
            sample = F.normalize(sample - torch.take_along_dim(levels[-1], nearest[..., None], 1), dim=-1)
        anchors = sample[:, :: sample.shape[1] // size][:, :size]
        for _ in range(_STEPS):
            nearest = _best(torch.bmm(anchors, sample.mT))
            member = nearest[:, None] == torch.arange(size, device=sample.device)[:, None]
            # A product, since adding by index would not be deterministic on CUDA.
            means = F.normalize(torch.bmm(member.to(sample.dtype), sample), dim=-1)
            anchors = torch.where(member.any(-1, keepdim=True), means, anchors)
        levels.append(torch.take_along_dim(anchors, torch.bmm(anchors, line).argsort(dim=1), 1))
    return levels


def _fill(buckets: Tensor, vectors: Tensor, levels: list[Tensor], workspace: Workspace, residual: bool = False) -> None:
    """Write the bucket of each of ``vectors`` ``[n, dim]`` to ``buckets`` ``[rounds, n]``, which is 0 so far.

    Keys go to the anchor nearest in angle, and then to that of what is left of them (``residual``). For a query the
    first anchor's share in all scores is the same, and there is nothing to subtract.
    """
    num_hashes = len(buckets)
    overlap = torch.bmm(levels[0], levels[1].mT) if len(levels) > 1 else None
    anchors = torch.cat([level.flatten(0, 1) for level in levels])
    rows_at_once = _rows_at_once(anchors)
    for x, found in zip(vectors.split(rows_at_once), buckets.split(rows_at_once, dim=1), strict=True):
        x = workspace.convert("x", x)
        projected = torch.mm(anchors, x.mT, out=workspace("projected", len(anchors), len(x)))
        for depth, part in enumerate(projected.split([num_hashes * level.shape[1] for level in levels])):
            scores = part.view(num_hashes, len(part) // num_hashes, len(x))
            if depth and residual and overlap is not None:
                scores -= torch.take_along_dim(overlap, found[..., None], 1).mT * x.norm(dim=-1)
            found.mul_(scores.shape[1]).add_(_best(scores))
