"""A bias in a dtype with fewer digits, for kernels that take it in the queries' dtype alone."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["narrow"]


def narrow(additive: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """``additive`` ``[..., query_len, key_len]`` in ``dtype``, and how far each row was moved ``[..., 1]``, or None.

    Where ``dtype`` is the narrower one, the largest entry of each row is moved to 0. Softmax does not see that, and
    what is rounded is only how far an entry lies below the largest: a bias that grows with the position (ALiBi) would
    lose the differences between neighbours. Add the move to the log-sum-exp. No row is -inf everywhere.
    """
    if torch.promote_types(additive.dtype, dtype) == dtype:
        return additive.to(dtype), None
    moved = additive.detach().amax(-1, keepdim=True)
    return (additive - moved).to(dtype), moved
