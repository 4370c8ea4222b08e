"""Reformer's attention: locality-sensitive hashing brings queries and keys that are alike together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..backend import Backend, Capabilities, Request, register
from ..dropout import draw_seed
from ..kernels.flex_engine import serves
from ..kernels.hashing import first_kept, plan_chunks
from ..kernels.merge import merge
from ..kernels.sorted_chunks import ChunkPlan, Chunks, chunked_rounds
from ..kernels.sorted_flex import flex_rounds
from ..kernels.tiles import Problem, tiled_attention
from ..masks import Mask, Padding, Taken, padding_of
from ..reference import BiasFunction


@register
@dataclass(frozen=True)
class LSH(Backend):
    """Reformer's attention: tokens hashed, sorted, attended in chunks.

    Kitaev, Kaiser & Levskaya 2020, "Reformer", section 2. In each of ``num_hashes`` rounds, queries and keys are
    hashed into about ``key_len / bucket_size`` buckets and sorted by bucket, then position; a chunk of
    ``bucket_size`` queries attends to the keys beside it, ``look_back`` chunks before and ``look_ahead`` after.

    ``hashing="rotation"`` is the paper's: random directions, drawn without a look at the data.
    ``hashing="anchors"`` finds directions among the keys instead, anew in every round and for every head of keys:
    two steps of spherical k-means on a sample of 16 keys a bucket (where there are more than 64 buckets, a second
    level divides each), put in order along a random line, so that neighbouring buckets are alike. A key goes to the
    anchor nearest in angle, a query to that of the largest product.

    ``local`` adds a round that sorts by position alone, so that a chunk meets its own surroundings. The first
    ``sinks`` keys that are not padding are seen by all queries that may, and stay out of the hashing (Xiao et al.
    2023, "Efficient streaming language models with attention sinks"); not with ``shared_qk``. A real model
    needs both: ``experiments/hashing.yaml`` shows what each is worth.

    With ``shared_qk`` the key must be the query up to a positive scale, as in the paper (which divides it by its
    length): one hash serves both, and a token attends to itself only where it sees nothing else, whatever the
    scores. Without it, queries and keys are hashed and sorted apart, and a chunk of queries is laid beside the
    keys that come at its place in the order, so that any model can use it.

    Departures from the paper: rounds are joined so that each key counts once however many rounds found it
    (``count="per_round"`` keeps the paper's count); the first chunk looks at nothing before it, instead of at
    the last chunk; any length, without padding to a multiple of the bucket.

    Under a causal mask no gradient and no value reaches the past from the future. But which of the visible keys
    a row meets depends on where the sort puts them, and so also on later tokens. With anchors it depends on these
    in one more way: anchors are found among the keys of the whole sequence, past and future, but for padding and
    sinks; of the queries they see nothing. Padded keys are sorted last.

    ``seed`` fixes all draws: calls are bit-equal, and the global generator is not touched. With
    ``seed=None`` it is drawn from the global generator at each call. Time O(n num_hashes bucket_size), memory O(n).
    """

    name = "lsh"
    bucket_size: int = 64
    num_hashes: int = 4
    look_back: int = 1
    look_ahead: int = 0
    shared_qk: bool = False
    count: str = "once"
    hashing: str = "rotation"
    local: bool = False
    sinks: int = 0
    seed: int | None = 0

    def __post_init__(self) -> None:
        self._require_int("bucket_size", 1)
        self._require_int("num_hashes", 1)
        self._require_int("look_back", 0)
        self._require_int("look_ahead", 0)
        self._require_int("seed", 0, optional=True)
        self._require(isinstance(self.shared_qk, bool), "shared_qk", "True or False")
        self._require(self.count in ("once", "per_round"), "count", "'once' or 'per_round'")
        self._require(self.hashing in ("rotation", "anchors"), "hashing", "'rotation' or 'anchors'")
        self._require(isinstance(self.local, bool), "local", "True or False")
        self._require_int("sinks", 0)
        self._require(not (self.shared_qk and self.sinks), "sinks", "0 with shared_qk")

    @property
    def capabilities(self) -> Capabilities:
        own = not self.shared_qk
        return Capabilities(
            bias=False,
            bias_grad=False,
            grouped_heads=own,
            cross_length=own,
            query_offset=own,
            deterministic=self.seed is not None,
        )

    def resolve(self, request: Request) -> str:
        return "sorted flex" if serves(request) else "sorted chunks"

    def pattern(self, query: Tensor, key: Tensor, *, mask: Mask, query_offset: int) -> Mask:
        if _is_nothing(query, key):
            return mask
        plan = self._plan(query, key, mask, query_offset)
        found = _Found(plan, query.shape[1] // key.shape[1], self._sinks(key, mask) if self.sinks else None)
        if not self.shared_qk:
            return mask & found
        chunks = Chunks(plan, mask, 1.0, query_offset, exclude_self=True, once=self.count == "once")
        blank_query, blank_key = torch.zeros_like(query[..., :1]), torch.zeros_like(key[..., :1])
        _, _, alone = chunked_rounds(blank_query, blank_key, blank_key, chunks)
        return mask & replace(found, alone=alone)

    def reference_bias(self, query: Tensor, key: Tensor, *, mask: Mask, query_offset: int) -> BiasFunction | None:
        """With ``count="per_round"`` a pair that c rounds find counts c times: log c on its score."""
        if self.count == "once" or _is_nothing(query, key):
            return None
        plan, group = self._plan(query, key, mask, query_offset), query.shape[1] // key.shape[1]
        sinks = self._sinks(key, mask) if self.sinks else None

        def log_count(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            rounds = [plan.meets(i, batch, head, head // group, row, key).double() for i in range(plan.num_rounds)]
            count = torch.stack(rounds).sum(0).clamp(min=1)
            if self.shared_qk:  # a token falls back to itself outside of all rounds
                count = torch.where(key == row + query_offset, 1.0, count)
            if sinks is not None:
                count = torch.where(_look_up(sinks, batch, key), 1.0, count)
            return count.log()

        return log_count

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
        plan = self._plan(query, key, mask, query_offset)
        seed = draw_seed() if dropout_p else None
        sinks = self._sinks(key, mask) if self.sinks else None
        chunks = Chunks(
            plan,
            mask if sinks is None else mask & Padding(~sinks),
            scale,
            query_offset,
            exclude_self=self.shared_qk,
            once=self.count == "once",
            dropout_p=dropout_p,
            dropout_seed=seed,
        )
        if serves(Request.of(query, key, value, dropout_p=dropout_p)):
            output, lse = flex_rounds(query, key, value, chunks)
        else:
            output, lse, _ = chunked_rounds(query, key, value, chunks)
        if sinks is not None:
            seen = _see_few(query, key, value, sinks, self.sinks, Problem(mask, scale, query_offset, dropout_p, seed))
            output, lse = merge([(output, lse), seen])
        return output, lse if return_lse else None

    def _sinks(self, key: Tensor, mask: Mask) -> Tensor:
        """The sinks as bool ``[batch or 1, key_len]``."""
        return first_kept(padding_of(mask), self.sinks, key.shape[2], key.device)

    def _plan(self, query: Tensor, key: Tensor, mask: Mask, query_offset: int) -> ChunkPlan:
        return plan_chunks(
            query,
            key,
            padding_of(mask),
            query_offset=query_offset,
            chunk_size=self.bucket_size,
            num_hashes=self.num_hashes,
            look_back=self.look_back,
            look_ahead=self.look_ahead,
            shared=self.shared_qk,
            seed=int(draw_seed()) if self.seed is None else self.seed,
            hashing=self.hashing,
            local=self.local,
            sinks=self.sinks,
        )


@dataclass(frozen=True, eq=False)
class _Found(Mask):
    """The pairs that some round brought together, and all with the sinks; a token pairs with itself only where
    ``alone`` says so."""

    plan: ChunkPlan
    group: int
    sinks: Tensor | None = None  # bool [batch or 1, key_len]
    alone: Tensor | None = None  # [batch, heads, query_len]; None where a token is like any other key

    def allows(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, query_offset: int) -> Tensor:
        kv_head = head // self.group
        found = self.plan.meets(0, batch, head, kv_head, row, key)
        for index in range(1, self.plan.num_rounds):
            found = found | self.plan.meets(index, batch, head, kv_head, row, key)
        if self.sinks is not None:
            found = found | _look_up(self.sinks, batch, key)
        if self.alone is None:
            return found
        is_self = key == row + query_offset
        return torch.where(is_self, self.alone[batch, head, row], found)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.plan.key_rank, self.plan.row_rank, self.plan.chunk_start)


def _is_nothing(query: Tensor, key: Tensor) -> bool:
    """Whether there is no pair at all, and so nothing to hash."""
    return 0 in (*query.shape[:3], key.shape[2])


def _see_few(
    query: Tensor, key: Tensor, value: Tensor, few: Tensor, most: int, problem: Problem
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of all queries over the at most ``most`` keys that ``few`` ``[batch or 1, n]`` marks."""
    # A stable sort lists the marked ones first, in order; -1 stands for none.
    marked, index = few.sort(dim=-1, descending=True, stable=True)
    marked, index = marked[:, :most], index[:, :most]
    key, value = (torch.take_along_dim(t, index[:, None, :, None], 2) for t in (key, value))
    taken = Taken(problem.mask, None, index.masked_fill(~marked, -1))
    return tiled_attention(query, key, value, replace(problem, mask=taken, wide_output=True, query_tile=1024))


def _look_up(marks: Tensor, batch: Tensor, key: Tensor) -> Tensor:
    """``marks`` ``[batch or 1, n]`` of a batch row at a key."""
    return marks[batch if marks.shape[0] > 1 else torch.zeros_like(batch), key]
