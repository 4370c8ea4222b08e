"""Reformer's attention: locality-sensitive hashing brings queries and keys that are alike together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..backend import Backend, Capabilities, Request, register
from ..dropout import draw_seed
from ..kernels.hashing import plan_chunks
from ..kernels.sorted_chunks import ChunkPlan, Chunks, chunked_rounds
from ..masks import Mask, padding_of
from ..reference import BiasFunction


@register
@dataclass(frozen=True)
class LSH(Backend):
    """Reformer's attention: tokens hashed by random rotations, sorted, attended in chunks.

    Kitaev, Kaiser & Levskaya 2020, "Reformer", section 2. In each of ``num_hashes`` rounds, queries and keys are
    hashed into about ``key_len / bucket_size`` buckets and sorted by bucket, then position; a chunk of
    ``bucket_size`` queries attends to the keys beside it, ``look_back`` chunks before and ``look_ahead`` after.

    With ``shared_qk`` the key must be the query up to a positive scale, as in the paper (which divides it by its
    length): one hash serves both, and a token attends to itself only where it sees nothing else, whatever the
    scores. Without it, queries and keys are hashed and sorted apart, and a chunk of queries is laid beside the
    keys that come at its place in the order, so that any model can use it.

    Departures from the paper: rounds are joined so that each key counts once however many rounds found it
    (``count="per_round"`` keeps the paper's count); the first chunk looks at nothing before it, instead of at
    the last chunk; any length, without padding to a multiple of the bucket.

    Under a causal mask no gradient and no value reaches the past from the future. But which of the visible keys
    a row meets depends on where the sort puts them, and so also on later tokens. Padded keys are sorted last.

    ``seed`` fixes the rotations: calls are bit-equal, and the global generator is not touched. With
    ``seed=None`` it is drawn from the global generator at each call. Time O(n num_hashes bucket_size), memory O(n).
    """

    name = "lsh"
    bucket_size: int = 64
    num_hashes: int = 4
    look_back: int = 1
    look_ahead: int = 0
    shared_qk: bool = False
    count: str = "once"
    seed: int | None = 0

    def __post_init__(self) -> None:
        self._require_int("bucket_size", 1)
        self._require_int("num_hashes", 1)
        self._require_int("look_back", 0)
        self._require_int("look_ahead", 0)
        self._require_int("seed", 0, optional=True)
        self._require(isinstance(self.shared_qk, bool), "shared_qk", "True or False")
        self._require(self.count in ("once", "per_round"), "count", "'once' or 'per_round'")

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
        return "sorted chunks"

    def pattern(self, query: Tensor, key: Tensor, *, mask: Mask, query_offset: int) -> Mask:
        plan = self._plan(query, key, mask, query_offset)
        found = _Found(plan, query.shape[1] // key.shape[1])
        if not self.shared_qk:
            return mask & found
        chunks = Chunks(plan, mask, 1.0, query_offset, exclude_self=True, once=self.count == "once")
        blank_query, blank_key = torch.zeros_like(query[..., :1]), torch.zeros_like(key[..., :1])
        _, _, alone = chunked_rounds(blank_query, blank_key, blank_key, chunks)
        return mask & replace(found, alone=alone)

    def reference_bias(self, query: Tensor, key: Tensor, *, mask: Mask, query_offset: int) -> BiasFunction | None:
        """With ``count="per_round"`` a pair that c rounds find counts c times: log c on its score."""
        if self.count == "once":
            return None
        plan, group = self._plan(query, key, mask, query_offset), query.shape[1] // key.shape[1]

        def log_count(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            rounds = [plan.meets(i, batch, head, head // group, row, key).double() for i in range(plan.num_rounds)]
            count = torch.stack(rounds).sum(0).clamp(min=1)
            if self.shared_qk:  # a token falls back to itself outside of all rounds
                count = torch.where(key == row + query_offset, 1.0, count)
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
        chunks = Chunks(
            self._plan(query, key, mask, query_offset),
            mask,
            scale,
            query_offset,
            exclude_self=self.shared_qk,
            once=self.count == "once",
            dropout_p=dropout_p,
            dropout_seed=draw_seed() if dropout_p else None,
        )
        output, lse, _ = chunked_rounds(query, key, value, chunks)
        return output, lse if return_lse else None

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
        )


@dataclass(frozen=True, eq=False)
class _Found(Mask):
    """The pairs that some round brought together; a token pairs with itself only where ``alone`` says so."""

    plan: ChunkPlan
    group: int
    alone: Tensor | None = None  # [batch, heads, query_len]; None where a token is like any other key

    def allows(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, query_offset: int) -> Tensor:
        kv_head = head // self.group
        found = self.plan.meets(0, batch, head, kv_head, row, key)
        for index in range(1, self.plan.num_rounds):
            found = found | self.plan.meets(index, batch, head, kv_head, row, key)
        if self.alone is None:
            return found
        is_self = key == row + query_offset
        return torch.where(is_self, self.alone[batch, head, row], found)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.plan.key_rank, self.plan.row_rank, self.plan.chunk_start)
