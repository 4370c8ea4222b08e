"""Every backend, with random fields, on random problems, against the dense reference of its own pattern.

What is computed is compared in float64, where a wrong mask cannot hide behind rounding. How precisely the other
dtypes are computed is compared on problems large enough for rounding errors to average out.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import Sizes, examples, masks, sizes, square_sizes
from torch import Tensor

import effattn
from effattn import Backend, Capabilities, get, reference
from effattn.masks import Everything, Mask
from effattn.testing.examples import Example, assert_close_to_reference

chunks = st.sampled_from([3, 7, 16, 64])
reach = st.sampled_from([None, 0, 1, 3, 64])

BACKENDS: dict[str, st.SearchStrategy[Backend]] = {
    "full": st.just(get("full")),
    "sdpa": st.builds(get, st.just("sdpa"), kernel=st.sampled_from(["auto", "math", "flash"])),
    "chunked": st.builds(get, st.just("chunked"), query_chunk=chunks, key_chunk=chunks),
    "sliding_window": st.builds(
        get,
        st.just("sliding_window"),
        left=reach,
        right=reach,
        dilation=st.sampled_from([1, 2, 3, 50]),
        global_tokens=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    ),
    "lsh": st.builds(
        lambda shared_qk, sinks, **fields: get("lsh", shared_qk=shared_qk, sinks=0 if shared_qk else sinks, **fields),
        bucket_size=chunks,
        num_hashes=st.integers(1, 4),
        look_back=st.integers(0, 2),
        look_ahead=st.integers(0, 1),
        shared_qk=st.booleans(),
        sinks=st.sampled_from([0, 0, 3]),
        local=st.booleans(),
        hashing=st.sampled_from(["rotation", "anchors"]),
        count=st.sampled_from(["once", "per_round"]),
        seed=st.integers(0, 9),
    ),
}


@dataclass(frozen=True)
class Always:
    """A mask for an example; prints as the mask, so that a failing example can be read."""

    mask: Mask

    def __call__(self, example: Example) -> Mask:
        return self.mask

    def __repr__(self) -> str:
        return repr(self.mask)


@st.composite
def random_examples(draw: st.DrawFn, able: Capabilities) -> Example:
    """Any sizes, mask, bias, scale and offset that such a backend may be asked for, in float64."""
    longest = draw(st.sampled_from([6, 70]))
    of = draw(sizes(longest) if able.cross_length else square_sizes(longest))
    mask = draw(masks(of))
    shapes = [(), (of.key_len,), (of.query_len, 1), (of.num_heads, 1, of.key_len), (of.batch_size, 1, 1, 1), of.shape]
    return Example(
        "random",
        mask=Always(mask),
        batch_size=of.batch_size,
        num_heads=of.num_heads,
        num_kv_heads=draw(st.sampled_from([1, of.num_heads])) if able.grouped_heads else of.num_heads,
        query_len=of.query_len,
        key_len=of.key_len,
        head_dim=draw(st.sampled_from([1, 4])),
        value_dim=draw(st.sampled_from([1, 4, 5])),
        dtype=torch.float64,
        query_offset=of.query_offset,
        bias_shape=draw(st.sampled_from([None] * len(shapes) + shapes)) if able.bias else None,
        scale=draw(st.sampled_from([None, 0.3, 3.0])),
        return_lse=able.lse and draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def by_the_pattern(backend: Backend, example: Example) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Output, log-sum-exp and gradients of dense attention under what the backend says that it attends to."""
    query, key, value, bias = example.inputs()
    mask = example.mask(example) or Everything()
    weights = backend.reference_bias(query, key, mask=mask, query_offset=example.query_offset)
    output, lse = reference.attention(
        query,
        key,
        value,
        mask=effattn.pattern(query, key, backend=backend, mask=mask, query_offset=example.query_offset),
        bias=bias if weights is None else weights,
        scale=example.scale,
        query_offset=example.query_offset,
    )
    return output, lse, gradients(example, output, lse, (query, key, value, bias))


def gradients(
    example: Example, output: Tensor, lse: Tensor | None, inputs: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    total = output.sin().sum()
    if example.return_lse:
        assert lse is not None
        total = total + lse.masked_fill(lse == -torch.inf, 0).sin().sum()
    return torch.autograd.grad(total, [t for t in inputs if t is not None])


@pytest.mark.parametrize("name", BACKENDS)
def test_the_pattern_is_what_is_computed(name):
    @given(st.data())
    @examples(120)
    def check(data: st.DataObject) -> None:
        backend = data.draw(BACKENDS[name])
        example = data.draw(random_examples(backend.capabilities))
        assume(not backend.reasons(example.request()))
        inputs = example.inputs()
        query, key, value, bias = inputs
        made = effattn.attention(
            query,
            key,
            value,
            backend=backend,
            mask=example.mask(example),
            bias=bias,
            scale=example.scale,
            query_offset=example.query_offset,
            return_lse=example.return_lse,
        )
        output, lse = made if example.return_lse else (made, None)
        expected, expected_lse, expected_gradients = by_the_pattern(backend, example)
        torch.testing.assert_close(output, expected)
        if lse is not None:
            torch.testing.assert_close(lse, expected_lse)
        torch.testing.assert_close(gradients(example, output, lse, inputs), expected_gradients)

    check()


@st.composite
def larger_examples(draw: st.DrawFn) -> Example:
    """Self-attention over some hundred tokens in the dtypes that models use."""
    length = draw(st.integers(90, 150))
    of = Sizes(batch_size=2, num_heads=4, query_len=length, key_len=length, query_offset=0)
    return Example(
        "random",
        mask=Always(draw(masks(of))),
        query_len=length,
        key_len=length,
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_rounding_is_at_most_twice_pytorchs(name):
    @given(BACKENDS[name], larger_examples())
    @examples(15)
    def check(backend: Backend, example: Example) -> None:
        assume(not backend.reasons(example.request()))
        assert_close_to_reference(backend, example)

    check()
