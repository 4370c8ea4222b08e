"""What a swap changes in a model: its hidden states layer by layer, and its logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..backend import Backend
from .swapping import Selector, Swap, swap

__all__ = ["Comparison", "Drift", "compare"]


@dataclass(frozen=True)
class Drift:
    """How far one tensor moved: ``|got - want| / |want|``, and the cosine between the two, over all real tokens."""

    path: str
    rel_l2: float
    cosine: float


@dataclass(frozen=True)
class Comparison:
    """The drift of every layer and of the output. Prints as a table.

    ``top_token_agreement`` is the share of real tokens whose largest logit stayed the same one (the largest entry,
    where the model returns a bare tensor); None for a model that returns several outputs and calls none of them logits.
    ``swap`` is the report of the swapped run.
    """

    layers: tuple[Drift, ...]
    output: Drift
    top_token_agreement: float | None
    swap: Swap

    def __str__(self) -> str:
        rows = [("", "rel_l2", "cosine")]
        rows += [(d.path, f"{d.rel_l2:.2e}", f"{d.cosine:.6f}") for d in (*self.layers, self.output)]
        width = max(len(row[0]) for row in rows)
        lines = [f"{path.ljust(width)}  {rel_l2:>9}  {cosine:>9}" for path, rel_l2, cosine in rows]
        if self.top_token_agreement is not None:
            what = "top token" if self.output.path == "logits" else "largest entry"
            lines.append(f"{what} unchanged: {self.top_token_agreement:.2%}")
        return "\n".join(lines)

    __repr__ = __str__


@torch.no_grad()
def compare(
    model: nn.Module,
    inputs: Mapping[str, Any] | Tensor | tuple[Any, ...],
    backend: str | Backend | Mapping[Selector, str | Backend],
    *,
    layers: Selector | list[Selector] | None = None,
    strict: bool = True,
) -> Comparison:
    """Run ``model`` on ``inputs`` as it is and swapped, and say what moved.

    Args:
        inputs: what the model is called with: keyword arguments (a tokenizer's output), a tensor, or a tuple of
            arguments. Tokens that its ``attention_mask`` hides are left out.
        backend, layers, strict: as in ``swap``.

    Returns:
        The drift after each layer that holds a site, in order, and of the logits (else the first output).

    Raises:
        ValueError: the model is in training mode, where dropout would drown the drift; or as in ``swap``.
    """
    if model.training:
        raise ValueError("compare: model must be in evaluation mode, where nothing is dropped; call model.eval()")
    with swap(model, backend, layers=layers, strict=strict) as swapped:
        blocks = dict.fromkeys(_block(site.path) for site in swapped.sites)
        got_states, got = _run(model, inputs, blocks)
    want_states, want = _run(model, inputs, blocks)
    drifts = tuple(
        _drift(
            path, got_states[path], want_states[path], _keep(inputs, want_states[path], "decoder" in path.split("."))
        )
        for path in blocks
        if path in want_states
    )
    (name, got_output), (_, want_output) = _output_of(got), _output_of(want)
    keep = _keep(inputs, want_output, isinstance(inputs, Mapping) and "decoder_attention_mask" in inputs)
    agreement = None
    if name == "logits" or isinstance(want, Tensor):
        same = got_output.argmax(-1) == want_output.argmax(-1)
        agreement = float((same if keep is None else same[keep]).double().mean())
    return Comparison(drifts, _drift(name, got_output, want_output, keep), agreement, swapped)


def _block(path: str) -> str:
    """The layer that a site belongs to: its path up to the first number."""
    names = path.split(".")
    numbers = [i for i, name in enumerate(names) if name.isdigit()]
    return ".".join(names[: numbers[0] + 1]) if numbers else path


def _run(model: nn.Module, inputs: Any, blocks: Mapping[str, None]) -> tuple[dict[str, Tensor], Any]:
    """The output of every block that ran, and of the model."""
    states: dict[str, Tensor] = {}

    def record(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            states[path] = _first_tensor(output)

        return hook

    handles = [model.get_submodule(path).register_forward_hook(record(path)) for path in blocks if path]
    try:
        if isinstance(inputs, Mapping):
            return states, model(**inputs)
        return states, model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    finally:
        for handle in handles:
            handle.remove()


def _output_of(output: Any) -> tuple[str, Tensor]:
    logits = getattr(output, "logits", None)
    return ("output", _first_tensor(output)) if logits is None else ("logits", logits)


def _first_tensor(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    return next(value for value in values if isinstance(value, Tensor))


def _keep(inputs: Any, states: Tensor, in_decoder: bool) -> Tensor | None:
    """Which tokens of ``[batch, seq, ...]`` states are real, by the masks that the model is given."""
    if not isinstance(inputs, Mapping):
        return None
    mask = inputs.get("decoder_attention_mask" if in_decoder else "attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape == states.shape[:2]:
        return mask.bool()
    return None


def _drift(path: str, got: Tensor, want: Tensor, keep: Tensor | None) -> Drift:
    if keep is not None:
        got, want = got[keep], want[keep]
    got, want = got.flatten().double(), want.flatten().double()
    return Drift(path, float((got - want).norm() / want.norm()), float(torch.cosine_similarity(got, want, dim=0)))
