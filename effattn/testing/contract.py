"""The contract: everything that a backend declares is right, and everything else is refused.

``contract_cases(spec)`` enumerates what is to be shown from the backend's capabilities; each case is small and can
be run by pytest or by ``check_backend``. A backend written elsewhere is held to the same list:

    @pytest.mark.parametrize("case", contract_cases("my_backend"), ids=str)
    def test_contract(case):
        case.check()
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import torch
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from effattn import reference
from effattn.attention import attention
from effattn.attention import pattern as pattern_of
from effattn.backend import Backend, UnsupportedError, get
from effattn.masks import Causal, Dense, Documents, Global, Mask, Padding, Window

from .examples import Example, assert_close_to_reference, run

__all__ = ["Case", "Outcome", "check_backend", "contract_cases"]


class Outcome(Enum):
    """How a case ended: shown to be right, or refused with reasons, as what is not supported must be."""

    HOLDS = "holds"
    REFUSED = "refused"


@dataclass(frozen=True)
class Case:
    """One clause of the contract for one backend; ``check`` raises ``AssertionError`` where it is broken."""

    backend: Backend
    name: str
    _check: Callable[[Backend], Outcome]

    def check(self) -> Outcome:
        return self._check(self.backend)

    def __str__(self) -> str:
        return self.name


# What faulty code raises; anything else is not the backend's fault.
_FAULTS = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


def check_backend(spec: str | Backend, device: str = "cpu") -> dict[str, str]:
    """Run the whole contract: for each case "holds", "refused" or how it is broken."""
    report = {}
    for case in contract_cases(spec, device):
        try:
            report[case.name] = case.check().value
        except AssertionError as error:
            report[case.name] = f"broken: {error}"
        except _FAULTS as error:
            report[case.name] = f"broken: raised {type(error).__name__}: {error}"
    return report


def contract_cases(spec: str | Backend, device: str = "cpu") -> list[Case]:
    """Every clause of the contract for this backend on this device."""
    backend = get(spec)
    cases = [Case(backend, example.name, partial(_matches, example=example)) for example in _examples(device)]
    for clause in _CLAUSES:
        name = clause.__name__.removeprefix("_").replace("_", " ")
        cases.append(Case(backend, name, _on(clause, device)))
    return cases


# Examples: a computation against the dense reference of the backend's own pattern.


def _keep(example: Example) -> Tensor:
    """A padding that starts on the left, has holes, and hides everything in the last batch row."""
    generator = torch.Generator().manual_seed(1)
    keep = torch.rand(example.batch_size, example.key_len, generator=generator) > 0.3
    keep[:, 0] = False
    if example.batch_size > 1:
        keep[-1] = False
    return keep.to(example.device)


def _padding(example: Example) -> Mask:
    return Padding(_keep(example))


def _documents(example: Example) -> Mask:
    return Documents((torch.arange(example.key_len, device=example.device) // 11)[None])


def _dense(example: Example) -> Mask:
    """A random mask; some rows see nothing."""
    generator = torch.Generator().manual_seed(2)
    allowed = torch.rand(example.batch_size, example.num_heads, example.query_len, example.key_len, generator=generator)
    allowed = allowed > 0.5
    allowed[:, :, :: max(example.query_len // 2, 1)] = False
    return Dense(allowed.to(example.device))


def _ragged_global(example: Example) -> Mask:
    tokens = torch.zeros(example.batch_size, example.key_len, dtype=torch.bool, device=example.device)
    for row in range(example.batch_size):
        tokens[row, row :: max(example.key_len // 2, 1)] = True
    return Global(tokens)


MASKS: dict[str, Callable[[Example], Mask | None]] = {
    "no mask": lambda example: None,
    "causal": lambda example: Causal(),
    "window": lambda example: Window(5, 2),
    "window of itself": lambda example: Window(0, 0),
    "dilated window": lambda example: Window(3, 1, dilation=3),
    "window to the left": lambda example: Window(None, 3),
    "padding": _padding,
    "documents": _documents,
    "dense": _dense,
    "dense, one for all heads": lambda example: Dense(_dense(example).allowed[:1, :1]),  # type: ignore[attr-defined]
    "global": lambda example: Causal() & (Window(3, 0) | Global((0, example.key_len // 2))),
    "ragged global": lambda example: Window(2, 2) | _ragged_global(example),
    "causal and padding": lambda example: Causal() & _padding(example),
    "causal and documents": lambda example: Causal() & _documents(example),
    "causal window and documents and padding": lambda example: (
        Causal() & Window(9, 9) & _documents(example) & _padding(example)
    ),
    "causal or window": lambda example: Causal() | Window(0, 4),
}


def _examples(device: str) -> Iterator[Example]:
    plain = Example("float32", device=device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        name = str(dtype).removeprefix("torch.")
        yield replace(plain, name=f"{name}, causal", dtype=dtype, mask=MASKS["causal"])
        yield replace(plain, name=f"{name}, forward only", dtype=dtype, backward=False)
    yield replace(
        plain,
        name="float16, scores past 65504",
        dtype=torch.float16,
        magnitude=200.0,
        mask=MASKS["causal"],
        backward=False,
    )
    for mask_name, mask in MASKS.items():
        yield replace(plain, name=f"mask: {mask_name}", mask=mask)
        yield replace(plain, name=f"mask: {mask_name}, forward only", mask=mask, backward=False)
        yield replace(plain, name=f"mask: {mask_name}, with log-sum-exp", mask=mask, return_lse=True)
    for length in (1, 2, 31, 63, 64, 65, 127, 129, 257):
        for mask_name in ("no mask", "causal", "padding"):
            yield replace(
                plain,
                name=f"length {length}, {mask_name}",
                query_len=length,
                key_len=length,
                mask=MASKS[mask_name],
                num_heads=2,
                num_kv_heads=2,
                head_dim=8,
                value_dim=8,
            )
    for query_len, key_len in ((1, 37), (5, 37), (37, 5), (64, 130), (3, 1)):
        for mask_name in ("no mask", "causal", "window", "padding", "documents"):
            if query_len > key_len and mask_name == "documents":
                continue  # queries before position 0 have no document
            yield replace(
                plain,
                name=f"{query_len} queries on {key_len} keys, {mask_name}",
                query_len=query_len,
                key_len=key_len,
                mask=MASKS[mask_name],
            )
    for offset in (0, 7, -3, 40):
        yield replace(
            plain,
            name=f"query_offset {offset}",
            query_len=20,
            query_offset=offset,
            mask=lambda example: Causal() & Window(6, 0),
        )
    for num_heads, num_kv_heads in ((4, 2), (6, 2), (4, 1)):
        for mask_name in ("causal", "dense", "causal and padding"):
            yield replace(
                plain,
                name=f"{num_heads} heads on {num_kv_heads}, {mask_name}",
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                mask=MASKS[mask_name],
            )
    for head_dim, value_dim in ((16, 8), (8, 24), (40, 40), (1, 1), (128, 128)):
        yield replace(
            plain,
            name=f"head_dim {head_dim}, values {value_dim}",
            head_dim=head_dim,
            value_dim=value_dim,
            mask=MASKS["causal"],
        )
    for shape in ((37,), (37, 37), (4, 1, 37), (2, 1, 37, 1), (2, 4, 37, 37)):
        yield replace(plain, name=f"bias {list(shape)}", bias_shape=shape, mask=MASKS["causal"])
    yield replace(plain, name="bias without gradient", bias_shape=(37, 37), bias_requires_grad=False)
    yield replace(plain, name="bias in float16", bias_shape=(37, 37), dtype=torch.float16, bias_requires_grad=False)
    yield replace(
        plain, name="bias, grouped heads", bias_shape=(4, 37, 37), num_kv_heads=2, mask=MASKS["causal and padding"]
    )
    yield replace(plain, name="scale", scale=0.3, mask=MASKS["causal"])
    yield replace(plain, name="one batch row, one head", batch_size=1, num_heads=1, num_kv_heads=1)


def _matches(backend: Backend, example: Example) -> Outcome:
    reasons = backend.reasons(example.request())
    if reasons:
        return _is_refused(backend, example, reasons)
    if not backend.capabilities.pattern:  # no dense reference to compare with: it runs, and gives finite numbers
        result = run(backend, example)
        assert all(bool(t.isfinite().all()) for t in (result.output, *result.grads)), "not finite"
        return Outcome.HOLDS
    assert_close_to_reference(backend, example)
    return Outcome.HOLDS


def _is_refused(backend: Backend, example: Example, reasons: list[str]) -> Outcome:
    try:
        run(backend, example)
    except UnsupportedError as error:
        assert list(error.reasons) == reasons, f"raised {error.reasons}, but reasons() says {reasons}"
        return Outcome.REFUSED
    raise AssertionError(f"reasons() says {reasons}, but the call went through")


# Clauses: properties that a comparison with the reference does not show.

Clause = Callable[[Backend, str], Outcome]
_CLAUSES: list[Clause] = []


def _clause(function: Clause) -> Clause:
    _CLAUSES.append(function)
    return function


def _on(clause: Clause, device: str) -> Callable[[Backend], Outcome]:
    return lambda backend: clause(backend, device)


def _plain(backend: Backend, device: str, **changes: object) -> Example:
    """A small causal example in the first dtype that the backend declares."""
    base = Example("plain", device=device, dtype=backend.capabilities.dtypes[0], mask=MASKS["causal"])
    return replace(base, backward=backend.capabilities.backward, **changes)  # type: ignore[arg-type]


def _served(backend: Backend, example: Example) -> bool:
    return not backend.reasons(example.request())


@_clause
def _spec_gives_the_backend_back(backend: Backend, device: str) -> Outcome:
    assert get(str(backend)) == backend, f"get({str(backend)!r}) gives {get(str(backend))}"
    assert hash(get(str(backend))) == hash(backend)
    json.dumps(dataclasses.asdict(backend))  # type: ignore[call-overload]
    return Outcome.HOLDS


@_clause
def _padding_has_no_influence(backend: Backend, device: str) -> Outcome:
    """Anything may stand behind padding, NaN and inf too: not a bit of the result changes."""
    example = _plain(backend, device, mask=lambda e: Padding(_keep(e)) & Causal(), return_lse=backend.capabilities.lse)
    if not _served(backend, example):
        return Outcome.REFUSED
    hidden = ~_keep(example)
    results = []
    for filling in (0.0, 1e4, float("nan"), float("inf")):
        query, key, value, _ = example.inputs()
        with torch.no_grad():
            for tensor in (key, value):
                tensor.masked_fill_(hidden[:, None, :, None], filling)
        output = attention(query, key, value, backend=backend, mask=example.mask(example))
        assert isinstance(output, Tensor)
        grads = torch.autograd.grad(output.float().square().sum(), (query, key, value)) if example.backward else ()
        assert all(bool(t.isfinite().all()) for t in (output, *grads)), f"{filling} behind padding reaches the result"
        for grad in grads[1:]:
            assert not bool(grad.transpose(1, 2)[hidden].any()), "a hidden key or value has a gradient"
        results.append((output, *grads))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), "padding changes the result"
    return Outcome.HOLDS


@_clause
def _the_future_has_no_influence(backend: Backend, device: str) -> Outcome:
    """Under a causal mask: exact zero gradients to the future, and no change where the pattern stays the same."""
    example = _plain(backend, device)
    if not _served(backend, example):
        return Outcome.REFUSED
    cut = example.query_len // 2
    query, key, value, _ = example.inputs()
    output = attention(query, key, value, backend=backend, mask=Causal())
    assert isinstance(output, Tensor)
    if example.backward:
        for grad in torch.autograd.grad(output[:, :, :cut].float().sum(), (query, key, value)):
            assert not bool(grad[:, :, cut:].any()), "the past has a gradient to the future"
    with torch.no_grad():
        before = _effective(backend, query, key)[:, :, :cut]
        output = output[:, :, :cut].clone()
        for tensor in (query, key, value):
            tensor[:, :, cut:] = tensor[:, :, cut:].roll(1, dims=-1) * 2
        after = _effective(backend, query, key)[:, :, :cut]
        changed = attention(query, key, value, backend=backend, mask=Causal())
        assert isinstance(changed, Tensor)
    unmoved = (before == after).all(-1)
    got, want = changed[:, :, :cut][unmoved], output[unmoved]
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-6), "the future changes the past"
    return Outcome.HOLDS


@_clause
def _decoding_equals_prefill(backend: Backend, device: str) -> Outcome:
    """One query against all keys is the last row of the whole, wherever the pattern is the same."""
    example = replace(_plain(backend, device), backward=False)
    if not _served(backend, example) or not _served(backend, replace(example, query_len=1)):
        return Outcome.REFUSED
    query, key, value, _ = example.inputs()
    last = query[:, :, -1:]
    whole = attention(query, key, value, backend=backend, mask=Causal())
    step = attention(last, key, value, backend=backend, mask=Causal())
    assert isinstance(whole, Tensor)
    assert isinstance(step, Tensor)
    same = (_effective(backend, query, key)[:, :, -1:] == _effective(backend, last, key)).all(-1)
    assert torch.allclose(step[same], whole[:, :, -1:][same], rtol=1e-5, atol=1e-6), "decoding differs from prefill"
    return Outcome.HOLDS


@_clause
def _layout_makes_no_difference(backend: Backend, device: str) -> Outcome:
    """Transposed, expanded and strided inputs give what contiguous ones give."""
    example = replace(_plain(backend, device), backward=False)
    if not _served(backend, example):
        return Outcome.REFUSED

    def seq_first(t: Tensor) -> Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def dim_first(t: Tensor) -> Tensor:
        return t.mT.contiguous().mT

    def every_other(t: Tensor) -> Tensor:
        return t.repeat_interleave(2, dim=3)[..., ::2]

    def expanded(t: Tensor) -> Tensor:
        return t[:1, :1].expand_as(t)

    tensors = example.inputs()[:3]
    for change in (seq_first, dim_first, every_other, expanded):
        changed = [change(t) for t in tensors]
        got = attention(*changed, backend=backend, mask=Causal())
        want = attention(*(t.contiguous() for t in changed), backend=backend, mask=Causal())
        assert isinstance(got, Tensor)
        assert isinstance(want, Tensor)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6), f"{change.__name__} input gives another result"
    return Outcome.HOLDS


@_clause
def _inputs_stay_as_they_were(backend: Backend, device: str) -> Outcome:
    example = _plain(backend, device, mask=lambda e: Causal() & _padding(e))
    if not _served(backend, example):
        return Outcome.REFUSED
    tensors = example.inputs()[:3]
    copies = [t.detach().clone() for t in tensors]
    output = attention(*tensors, backend=backend, mask=example.mask(example))
    assert isinstance(output, Tensor)
    if example.backward:
        output.float().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True)), "an input was written to"
    return Outcome.HOLDS


@_clause
def _calls_repeat_bit_by_bit(backend: Backend, device: str) -> Outcome:
    """Two calls are equal, and without dropout the global generator is not touched."""
    example = _plain(backend, device)
    if not backend.capabilities.deterministic or not _served(backend, example):
        return Outcome.REFUSED
    state = torch.get_rng_state()
    first, second = run(backend, example), run(backend, example)
    assert torch.equal(first.output, second.output), "two calls differ"
    assert all(torch.equal(a, b) for a, b in zip(first.grads, second.grads, strict=True)), "two gradients differ"
    assert torch.equal(state, torch.get_rng_state()), "the global generator was used"
    return Outcome.HOLDS


@_clause
def _gradcheck(backend: Backend, device: str) -> Outcome:
    sizes = {
        "query_len": 7,
        "key_len": 7,
        "head_dim": 3,
        "value_dim": 2,
        "batch_size": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
    }
    example = replace(
        _plain(backend, device),
        dtype=torch.float64,
        backward=True,
        mask=lambda e: Causal() & Window(4, 0),
        **sizes,  # type: ignore[arg-type]
    )
    if not _served(backend, example):
        return Outcome.REFUSED
    query, key, value, _ = example.inputs()
    with_lse = backend.capabilities.lse_grad

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return attention(query, key, value, backend=backend, mask=example.mask(example), return_lse=with_lse)

    right = torch.autograd.gradcheck(call, (query, key, value), atol=1e-6, raise_exception=False)
    assert right, "the gradient is not that of the output"
    return Outcome.HOLDS


@_clause
def _second_derivatives_work_or_are_refused(backend: Backend, device: str) -> Outcome:
    example = replace(_plain(backend, device), backward=True)
    if not _served(backend, example):
        return Outcome.REFUSED
    query, key, value, _ = example.inputs()
    output = attention(query, key, value, backend=backend, mask=Causal())
    assert isinstance(output, Tensor)
    (grad,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    try:
        grad.square().sum().backward()
    except RuntimeError as error:
        # once_differentiable, a fused kernel of PyTorch, a custom operator: each names what has no derivative.
        message = str(error)
        known = ("differentiate twice", "is not implemented", "no autograd formula", "double backward")
        assert any(reason in message for reason in known), message
        return Outcome.REFUSED
    assert query.grad is not None
    assert bool(query.grad.isfinite().all())
    assert bool(query.grad.any())
    return Outcome.HOLDS


@_clause
def _empty_lengths_give_zeros(backend: Backend, device: str) -> Outcome:
    for sizes in ({"query_len": 0}, {"key_len": 0}, {"batch_size": 0}, {"query_len": 0, "key_len": 0}):
        example = replace(_plain(backend, device, mask=MASKS["no mask"]), **sizes)  # type: ignore[arg-type]
        if not _served(backend, example):
            continue
        result = run(backend, example)
        assert result.output.shape == (example.batch_size, 4, example.query_len, 16)
        assert not bool(result.output.any())
        assert all(not bool(grad.any()) for grad in result.grads)
    return Outcome.HOLDS


@_clause
def _dropout_keeps_the_mean(backend: Backend, device: str) -> Outcome:
    """Dropped weights are made up for on average, and a generator state gives the same draw again."""
    example = _plain(backend, device, query_len=16, key_len=16, head_dim=8, value_dim=4)
    request = replace(example.request(), dropout_p=0.25)
    if backend.reasons(request):
        return _dropout_is_refused(backend, example)
    copies, calls = 25, 12
    query, key, value = (x.repeat(copies, 1, 1, 1) for x in example.inputs()[:3])  # each copy has draws of its own

    def call(dropout_p: float) -> Tensor:
        output = attention(query, key, value, backend=backend, mask=Causal(), dropout_p=dropout_p)
        assert isinstance(output, Tensor)
        return output.detach()

    torch.manual_seed(0)
    first, second = call(0.25).chunk(copies)[:2]
    assert not torch.equal(first, second), "dropout draws the same for every batch row"
    moved = torch.stack([call(0.25) for _ in range(calls)]).double() - call(0.0)
    draws = rearrange(moved, "calls (copies b) h l d -> (calls copies) b h l d", copies=copies)
    spread = draws.std(0) / len(draws) ** 0.5
    assert bool(draws.std(0).amax() > 0), "dropout does nothing"
    assert bool((draws.mean(0).abs() <= 6 * spread + 1e-5).all()), "dropout changes the mean"
    torch.manual_seed(3)
    first = call(0.25)
    torch.manual_seed(3)
    assert torch.equal(first, call(0.25)), "the same generator state gives another draw"
    assert not bool(call(1.0).any()), "dropout_p 1 leaves something"
    return Outcome.HOLDS


def _dropout_is_refused(backend: Backend, example: Example) -> Outcome:
    query, key, value, _ = example.inputs()
    try:
        attention(query, key, value, backend=backend, mask=Causal(), dropout_p=0.25)
    except UnsupportedError:
        return Outcome.REFUSED
    raise AssertionError("dropout is not declared, but the call went through")


@_clause
def _checkpointing_changes_nothing(backend: Backend, device: str) -> Outcome:
    """Recomputation in the backward pass sees the same draws: gradients are equal, with dropout too."""
    example = replace(_plain(backend, device), backward=True)
    if not _served(backend, example):
        return Outcome.REFUSED
    dropout_p = 0.25 if backend.capabilities.dropout else 0.0
    query, key, value, _ = example.inputs()

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = attention(query, key, value, backend=backend, mask=Causal(), dropout_p=dropout_p)
        assert isinstance(output, Tensor)
        return output

    torch.manual_seed(1)
    plain = torch.autograd.grad(call(query, key, value).square().sum(), (query, key, value))
    torch.manual_seed(1)
    output = checkpoint(call, query, key, value, use_reentrant=False)
    again = torch.autograd.grad(output.square().sum(), (query, key, value))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(plain, again, strict=True))
    return Outcome.HOLDS


@_clause
def _autocast_chooses_the_dtype(backend: Backend, device: str) -> Outcome:
    example = replace(_plain(backend, device), dtype=torch.float32, backward=False)
    if not _served(backend, replace(example, dtype=torch.bfloat16)):
        return Outcome.REFUSED
    query, key, value, _ = example.inputs()
    with torch.autocast(device, dtype=torch.bfloat16):
        got = attention(query, key, value, backend=backend, mask=Causal())
    want = attention(*(t.bfloat16() for t in (query, key, value)), backend=backend, mask=Causal())
    assert isinstance(got, Tensor)
    assert isinstance(want, Tensor)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want), "autocast and a cast by hand differ"
    return Outcome.HOLDS


def _effective(backend: Backend, query: Tensor, key: Tensor) -> Tensor:
    """Pattern and weights of the backend under a causal mask, as one additive ``[B, H, L, S]`` tensor."""
    batch_size, num_heads, query_len, _ = query.shape
    sizes = (batch_size, num_heads, query_len, key.shape[2])
    offset = key.shape[2] - query_len
    pattern = pattern_of(query, key, backend=backend, mask=Causal())
    allowed = pattern.dense(batch_size, num_heads, query_len, key.shape[2], device=query.device)
    weights = backend.reference_bias(query, key, mask=Causal(), query_offset=offset)
    additive = torch.zeros(sizes, device=query.device)
    if weights is not None:
        additive = additive + weights(*reference.grid(query, key))
    return additive.masked_fill(~allowed, -torch.inf)
