"""Exact attention in chunks with an online softmax."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..backend import Backend, Request, register
from ..dropout import draw_seed
from ..kernels.flex_engine import serves
from ..kernels.tiles import Problem, tiled_attention
from ..masks import Mask


@register
@dataclass(frozen=True)
class Chunked(Backend):
    """Exact attention in chunks with an online softmax, O(n) memory.

    Rabe & Staats 2021, "Self-attention does not need O(n^2) memory": chunks of ``query_chunk`` rows against chunks
    of ``key_chunk`` keys, forward and backward. Chunks that the mask empties are skipped, so a causal mask costs
    half and a window what the window costs. Chunk sizes come from the fields alone, never from free memory.
    """

    name = "chunked"
    query_chunk: int = 512
    key_chunk: int = 512

    def __post_init__(self) -> None:
        self._require_int("query_chunk", 1)
        self._require_int("key_chunk", 1)

    def resolve(self, request: Request) -> str:
        return "flex" if serves(request) else "tiles"

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
        problem = Problem(
            mask,
            scale,
            query_offset,
            dropout_p,
            draw_seed() if dropout_p else None,
            query_tile=self.query_chunk,
            key_tile=self.key_chunk,
            widest=self.key_chunk,
        )
        output, lse = tiled_attention(query, key, value, problem, bias=bias, need_lse=return_lse)
        return output, lse if return_lse else None
