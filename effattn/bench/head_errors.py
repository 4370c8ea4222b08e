"""The errors of each head of one layer on sampled query rows, against full attention in float64.

Full attention is computed once for any number of backends. What is held against it is what the backend gives, so the
figures are of its total error; how much of that is rounding stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import effattn
from effattn import reference
from effattn.backend import Backend
from effattn.bench import errors
from effattn.bench.capture import LayerInputs
from effattn.masks import Causal, Mask, evaluate

POSITION_BINS = 16


@dataclass(frozen=True)
class FullRows:
    """Full causal attention on some query rows of a layer, and the gradients of a random loss of these rows.

    Memory: four times heads x rows x seq_len float64.
    """

    inputs: LayerInputs
    mask: Mask
    rows: Int[Tensor, " rows"]
    weights: Float[Tensor, "1 heads rows seq"]
    largest: Float[Tensor, "1 heads rows seq"]  # the weights of each row, in falling order
    output: Float[Tensor, "1 heads rows value_dim"]
    grad_output: Float[Tensor, "1 heads rows value_dim"] | None
    grads: tuple[Tensor, Tensor, Tensor] | None

    @classmethod
    def of(cls, inputs: LayerInputs, num_rows: int, *, seed: int, gradients: bool) -> FullRows:
        """Rows sampled as ``errors.sample_rows`` does; ``gradients`` cost about six times as much as the rest."""
        query, key, value, mask = inputs.query, inputs.key, inputs.value, Causal()
        rows = errors.sample_rows(query.shape[2], num_rows, seed).to(query.device)
        blocks = list(reference.score_rows(query, key, mask=mask, scale=inputs.scale, rows=rows))
        weights = torch.cat([block.weights for block in blocks], dim=2)
        grad_output = grads = None
        if gradients:
            generator = torch.Generator().manual_seed(seed + 1)
            shape = (*query.shape[:2], len(rows), value.shape[3])
            grad_output = torch.randn(shape, generator=generator).to(query)
            options: dict[str, Any] = {"mask": mask, "scale": inputs.scale, "rows": rows}
            grads = reference.gradients(query, key, value, grad_output, **options)
        return cls(
            inputs=inputs,
            mask=mask,
            rows=rows,
            weights=weights,
            largest=weights.sort(dim=-1, descending=True).values,
            output=errors.weigh(weights, value.double()),
            grad_output=grad_output,
            grads=grads,
        )

    def errors_of(self, backend: Backend) -> dict[str, Any]:
        """The fields of a record: of the layer, ``*_by_head`` of each head, and ``rel_l2_by_position``.

        Relative errors are of the output's L2 or L1 norm over rows and head_dim; ``worst_row_rel_l2`` is that of the
        row and head that are furthest off; ``_low`` and ``_high`` are the limits of ``errors.relative_interval``.

        Raises:
            UnsupportedError: if the backend cannot serve the layer.
            ArithmeticError: if a sampled row of the output is not finite.
        """
        output, grads = self._run(backend)
        ours = output[:, :, self.rows].double()
        if not ours.isfinite().all():
            broken = int((~ours.isfinite()).sum())
            raise ArithmeticError(f"{broken} of {ours.numel()} sampled values of the output are NaN or infinite")
        record = self._distances(ours) | self._gradient_distances(grads)
        if backend.capabilities.pattern:
            record |= self._of_pattern(backend, ours)
        return record

    def _run(self, backend: Backend) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        """The backend's output, and its gradients of the loss that reads the sampled rows."""
        tensors = [tensor.detach() for tensor in (self.inputs.query, self.inputs.key, self.inputs.value)]
        options: dict[str, Any] = {"backend": backend, "mask": self.mask, "scale": self.inputs.scale}
        if self.grad_output is None:
            with torch.no_grad():
                output = effattn.attention(*tensors, **options)
            assert isinstance(output, Tensor)
            return output, None
        with torch.enable_grad():
            leaves = [tensor.clone().requires_grad_() for tensor in tensors]
            output = effattn.attention(*leaves, **options)
            assert isinstance(output, Tensor)
            query, key, value = torch.autograd.grad(output[:, :, self.rows], leaves, self.grad_output)
        return output.detach(), (query, key, value)

    def _distances(self, ours: Tensor) -> dict[str, Any]:
        """How far ``ours`` is from full attention: of the layer, then of each head."""
        off, full = (ours - self.output)[0], self.output[0]
        squared, norm = off.square().sum(-1), full.square().sum(-1)  # [heads, rows]
        seq_len = self.inputs.query.shape[2]
        record: dict[str, Any] = {}
        for suffix, pool in (("", True), ("_by_head", False)):
            squared_, norm_ = (x.sum(0, keepdim=True) if pool else x for x in (squared, norm))
            off_, full_, ours_ = (x.transpose(0, 1).flatten(1)[None] if pool else x for x in (off, full, ours[0]))
            low, high = errors.relative_interval(squared_, norm_, seq_len)
            fields = {
                "rel_l2": _ratio(squared_.sum(-1), norm_.sum(-1)).sqrt(),
                "rel_l2_low": low,
                "rel_l2_high": high,
                "rel_l1": _ratio(off_.abs().flatten(1).sum(-1), full_.abs().flatten(1).sum(-1)),
                "cosine": torch.cosine_similarity(ours_.flatten(1), full_.flatten(1), dim=-1),
                "rmse": off_.flatten(1).square().mean(-1).sqrt(),
            }
            for name, values in fields.items():
                record[name + suffix] = float(values[0]) if pool else values.tolist()
        worst = _ratio(squared, norm).amax(-1).sqrt()
        record |= {"worst_row_rel_l2": float(worst.max()), "worst_row_rel_l2_by_head": worst.tolist()}
        bins = self.rows * POSITION_BINS // seq_len
        by_bin = [x.sum(0).new_zeros(POSITION_BINS).index_add_(0, bins, x.sum(0)) for x in (squared, norm)]
        filled = torch.bincount(bins, minlength=POSITION_BINS) > 0
        in_bins = _ratio(*by_bin).sqrt().tolist()
        record["rel_l2_by_position"] = [
            value if seen else None for value, seen in zip(in_bins, filled.tolist(), strict=True)
        ]
        return record

    def _gradient_distances(self, grads: tuple[Tensor, Tensor, Tensor] | None) -> dict[str, Any]:
        record: dict[str, Any] = {}
        if grads is None or self.grads is None:
            return record
        for name, got, want in zip(("query", "key", "value"), grads, self.grads, strict=True):
            off, full = ((x.double()[0]).square().flatten(1).sum(-1) for x in (got - want, want))
            record[f"grad_{name}_rel_l2"] = float(_ratio(off.sum(), full.sum()).sqrt())
            record[f"grad_{name}_rel_l2_by_head"] = _ratio(off, full).sqrt().tolist()
        return record

    def _allowed(self, pattern: Mask) -> Bool[Tensor, "1 heads rows seq"]:
        _, num_heads, _, seq_len = self.weights.shape
        batch, heads, keys = (torch.arange(size, device=self.rows.device) for size in (1, num_heads, seq_len))
        return evaluate(pattern, batch, heads, self.rows, keys, 0).expand_as(self.weights)

    def _of_pattern(self, backend: Backend, ours: Tensor) -> dict[str, Any]:
        """What the pattern keeps, what as many of the largest weights would give, and the backend's rounding."""
        query, key, value = self.inputs.query, self.inputs.key, self.inputs.value.double()
        pattern = effattn.pattern(query, key, backend=backend, mask=self.mask)
        bias = backend.reference_bias(query, key, mask=self.mask, query_offset=0)
        seen = self.rows + 1.0
        if pattern is self.mask and bias is None:
            kept = oracle = self.output
            recall = self.output.new_ones(self.output.shape[1])
            density = 1.0
        else:
            allowed = self._allowed(pattern)
            kept = _attend(self.weights * allowed, value)
            if bias is not None:
                options: dict[str, Any] = {"mask": pattern, "bias": bias, "scale": self.inputs.scale}
                kept, _ = reference.attention(query, key, value, rows=self.rows, **options)
            recall = (self.weights * allowed).sum(-1).mean(-1)[0]
            # The weight of the last key that the budget of its row allows; what weighs less is left out.
            count = allowed.sum(-1, keepdim=True)
            least = self.largest.gather(-1, (count - 1).clamp(min=0))
            best = self.weights.where((self.weights >= least) & (count > 0), 0.0)
            oracle = _attend(best, value)
            density = float(count.double().mean((0, 1)).sum() / seen.sum())
        norm = self.output[0].square().sum((1, 2))
        record: dict[str, Any] = {"density": density}
        for name, got in (("oracle_rel_l2", oracle), ("approximation_rel_l2", kept)):
            off = (got - self.output)[0].square().sum((1, 2))
            record[name] = float(_ratio(off.sum(), norm.sum()).sqrt())
            record[f"{name}_by_head"] = _ratio(off, norm).sqrt().tolist()
        record["recall"], record["recall_by_head"] = float(recall.mean()), recall.tolist()
        record["implementation_rel_l2"] = errors.rel_l2(ours, kept)
        return record


def _attend(weights: Tensor, value: Tensor) -> Tensor:
    """The output of rows whose weights need not sum to 1; 0 where nothing is left of them."""
    total = weights.sum(-1, keepdim=True)
    return errors.weigh(weights, value) / torch.where(total > 0, total, 1.0)


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """``part / whole``, and 0 where there is nothing of either."""
    return torch.where(part == 0, torch.zeros_like(part), part / whole)
