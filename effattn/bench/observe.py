"""A backend that hands every call to a watcher: how to look into a model's attention while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from effattn.backend import Backend, Capabilities, Request
from effattn.masks import Mask
from effattn.reference import BiasFunction

Result = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Observed(Backend):
    """``inner`` in all that it can do, but ``watch(query, key, value, **options)`` makes each of its calls.

    ``watch`` gets what ``Backend.attend`` gets, and returns what that returns: usually ``inner.attend(...)`` of it.
    """

    inner: Backend
    watch: Callable[..., Result]

    name = "observed"

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def unavailable(self) -> str | None:
        return self.inner.unavailable()

    def reasons(self, request: Request) -> list[str]:
        return self.inner.reasons(request)

    def resolve(self, request: Request) -> str:
        return self.inner.resolve(request)

    def pattern(self, query: Tensor, key: Tensor, *, mask: Mask, query_offset: int) -> Mask:
        return self.inner.pattern(query, key, mask=mask, query_offset=query_offset)

    def reference_bias(self, query: Tensor, key: Tensor, *, mask: Mask, query_offset: int) -> BiasFunction | None:
        return self.inner.reference_bias(query, key, mask=mask, query_offset=query_offset)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Result:
        return self.watch(query, key, value, **options)

    def __str__(self) -> str:
        return str(self.inner)
