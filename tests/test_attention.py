"""The one call: what it accepts, what it gives back, and what it says to what does not fit."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import effattn
from effattn import attention
from effattn.masks import Causal, Dense, Documents, Everything, Global, Padding, Window

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 4, 6, 8
BACKENDS = ["full", "sdpa", "chunked", "sliding_window(left=2, right=2)", "lsh(bucket_size=4)"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


QUERY = draw(BATCH, HEADS, LENGTH, HEAD_DIM, seed=1)
KEY = draw(BATCH, HEADS, LENGTH, HEAD_DIM, seed=2)
VALUE = draw(BATCH, HEADS, LENGTH, HEAD_DIM, seed=3)


def call(**changes: object) -> Tensor:
    output = attention(**{"query": QUERY, "key": KEY, "value": VALUE, **changes})
    assert isinstance(output, Tensor)
    return output


# What comes back


def test_is_scaled_dot_product_attention():
    torch.testing.assert_close(call(), F.scaled_dot_product_attention(QUERY, KEY, VALUE))
    causal = F.scaled_dot_product_attention(QUERY, KEY, VALUE, is_causal=True)
    torch.testing.assert_close(call(mask=Causal()), causal)


@pytest.mark.parametrize("spec", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_output_has_the_dtype_of_the_queries_and_lse_at_least_float32(spec, dtype):
    inputs = [t.to(dtype) for t in (QUERY, KEY, VALUE[..., :5])]
    output = attention(*inputs, backend=spec)
    assert (output.dtype, output.shape) == (dtype, (BATCH, HEADS, LENGTH, 5))
    if spec != "sdpa":
        output, lse = attention(*inputs, backend=spec, return_lse=True)
        assert (lse.dtype, lse.shape) == (torch.promote_types(dtype, torch.float32), (BATCH, HEADS, LENGTH))


def test_a_backend_may_be_a_spec_or_a_value():
    by_spec = call(backend="sliding_window(left=1, right=0)")
    by_value = call(backend=effattn.get("sliding_window", left=1, right=0))
    assert torch.equal(by_spec, by_value)
    torch.testing.assert_close(by_spec, call(mask=Window(1, 0)))


def test_scale():
    torch.testing.assert_close(call(scale=2), call(query=QUERY * 2 * HEAD_DIM**0.5))
    torch.testing.assert_close(call(scale=0.0), VALUE.mean(2, keepdim=True).expand_as(VALUE))


def test_decoding_sees_the_last_key():
    torch.testing.assert_close(call(query=QUERY[:, :, -1:], mask=Causal()), call(mask=Causal())[:, :, -1:])
    first = call(query=QUERY[:, :, -1:], mask=Causal(), query_offset=0)
    torch.testing.assert_close(first, VALUE[:, :, :1])


# Bare tensors


def test_a_bool_tensor_is_a_mask():
    allowed = draw(BATCH, 1, LENGTH, LENGTH) > 0
    assert torch.equal(call(mask=allowed), call(mask=Dense(allowed)))
    for shape in ((), (LENGTH,), (LENGTH, LENGTH), (HEADS, 1, LENGTH), (BATCH, 1, 1, LENGTH)):
        allowed = draw(*shape).abs() < 1.6
        whole = allowed.expand(BATCH, HEADS, LENGTH, LENGTH)
        assert whole.any(-1).all()
        assert shape == () or not whole.all()
        torch.testing.assert_close(call(mask=allowed), F.scaled_dot_product_attention(QUERY, KEY, VALUE, whole))


@pytest.mark.parametrize("shape", [(), (LENGTH,), (LENGTH, LENGTH), (HEADS, 1, LENGTH), (BATCH, 1, LENGTH, 1)])
def test_a_floating_tensor_is_a_bias(shape):
    bias = draw(*shape)
    assert torch.equal(call(mask=bias), call(bias=bias))
    expected = F.scaled_dot_product_attention(QUERY, KEY, VALUE, attn_mask=bias.expand(BATCH, HEADS, LENGTH, LENGTH))
    torch.testing.assert_close(call(bias=bias), expected)


def test_a_bool_mask_and_a_bias_go_together():
    allowed, bias = draw(LENGTH, LENGTH) > -0.5, draw(LENGTH, LENGTH, seed=4)
    joined = bias.masked_fill(~allowed, -math.inf)
    torch.testing.assert_close(call(mask=allowed, bias=bias), call(bias=joined))


# Autocast


@pytest.mark.parametrize("spec", BACKENDS)
def test_autocast_casts_the_inputs_and_nothing_else(spec):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = call(backend=spec, mask=Causal())
        double = call(backend=spec, query=QUERY.double(), key=KEY.double(), value=VALUE.double())
    assert output.dtype == torch.bfloat16
    halves = {name: t.bfloat16() for name, t in (("query", QUERY), ("key", KEY), ("value", VALUE))}
    assert torch.equal(output, call(backend=spec, mask=Causal(), **halves))
    assert double.dtype == torch.float64


@pytest.mark.parametrize("spec", ["full", "sdpa", "chunked", "sliding_window(left=2, right=2)"])
def test_autocast_makes_mixed_dtypes_one(spec):
    """Under autocast a float32 bias meets bfloat16 queries, and gradients come back in float32."""
    inputs = [t.clone().requires_grad_() for t in (QUERY, KEY.bfloat16(), VALUE)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attention(*inputs, backend=spec, bias=draw(LENGTH, LENGTH))
    output.float().square().sum().backward()
    assert [t.grad.dtype for t in inputs] == [torch.float32, torch.bfloat16, torch.float32]


AUTOGRAD = [spec for spec in BACKENDS if spec != "full"]  # whose backward pass is PyTorch's, and so cast too


@pytest.mark.parametrize(
    "spec", [*AUTOGRAD, "sliding_window(global_tokens=(0,))", "lsh(bucket_size=4, count='per_round')"]
)
def test_a_backward_pass_inside_autocast_is_the_same(spec):
    def grads(inside: bool) -> tuple[Tensor, ...]:
        inputs = [t.clone().requires_grad_() for t in (QUERY, KEY, VALUE)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total = attention(*inputs, backend=spec, mask=Causal()).float().square().sum()
            if inside:
                return torch.autograd.grad(total, inputs)
        return torch.autograd.grad(total, inputs)

    assert all(map(torch.equal, grads(True), grads(False)))


def test_the_pattern_under_autocast_is_what_attention_uses():
    query, key = draw(1, 2, 200, 16, seed=1), draw(1, 2, 200, 16, seed=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = effattn.pattern(query, key, backend="lsh(bucket_size=8)")
    outside = effattn.pattern(query.bfloat16(), key.bfloat16(), backend="lsh(bucket_size=8)")
    assert torch.equal(inside.dense(1, 2, 200, 200), outside.dense(1, 2, 200, 200))


@pytest.mark.parametrize("spec", BACKENDS)
def test_the_default_dtype_makes_no_difference(spec):
    expected = call(backend=spec, mask=Causal())
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(call(backend=spec, mask=Causal()), expected)
    finally:
        torch.set_default_dtype(torch.float32)


# Empty


@pytest.mark.parametrize("spec", BACKENDS)
@pytest.mark.parametrize(
    ("batch_size", "num_heads", "query_len", "key_len"),
    [(2, 4, 0, 5), (2, 4, 5, 0), (2, 4, 0, 0), (0, 4, 5, 5), (2, 0, 5, 5)],
)
def test_empty_problems_give_zeros_with_zero_gradients(spec, batch_size, num_heads, query_len, key_len):
    query = draw(batch_size, num_heads, query_len, 8).requires_grad_()
    key, value = (draw(batch_size, num_heads, key_len, d).requires_grad_() for d in (8, 3))
    output = attention(query, key, value, backend=spec, mask=Causal())
    assert output.shape == (batch_size, num_heads, query_len, 3)
    assert not output.any()
    output.sum().backward()
    assert all(t.grad.shape == t.shape and not t.grad.any() for t in (query, key, value))


def test_an_empty_problem_has_a_gradient_for_its_bias_too():
    bias = torch.zeros(LENGTH, 0, requires_grad=True)
    attention(QUERY, KEY[:, :, :0], VALUE[:, :, :0], bias=bias).sum().backward()
    assert bias.grad.shape == (LENGTH, 0)


def test_log_sum_exp_of_no_keys():
    _, lse = attention(QUERY, KEY[:, :, :0], VALUE[:, :, :0], return_lse=True)
    assert lse.shape == (BATCH, HEADS, LENGTH)
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("spec", BACKENDS)
def test_the_pattern_of_an_empty_problem(spec):
    empty = QUERY[:, :, :0]
    assert effattn.pattern(empty, empty, backend=spec, mask=Causal()).dense(BATCH, HEADS, 0, 0).numel() == 0


@pytest.mark.parametrize("spec", BACKENDS)
def test_values_without_a_dimension(spec):
    assert call(backend=spec, value=VALUE[..., :0]).shape == (BATCH, HEADS, LENGTH, 0)


# The pattern


def test_the_pattern_of_an_exact_backend_is_the_callers_mask():
    mask = Causal() & Padding(torch.ones(BATCH, LENGTH).bool())
    for spec in ("full", "sdpa", "chunked"):
        assert effattn.pattern(QUERY, KEY, backend=spec, mask=mask) is mask
        assert effattn.pattern(QUERY, KEY, backend=spec) == Everything()


def test_the_pattern_stays_within_the_callers_mask():
    allowed = draw(LENGTH, LENGTH) > 0
    sizes = (BATCH, HEADS, LENGTH, LENGTH)
    for spec in BACKENDS:
        dense = effattn.pattern(QUERY, KEY, backend=spec, mask=allowed).dense(*sizes)
        assert not (dense & ~allowed).any()


def test_a_bias_has_no_pattern():
    with pytest.raises(ValueError, match="mask: a floating tensor is a bias, which is no part of a pattern"):
        effattn.pattern(QUERY, KEY, backend="full", mask=torch.zeros(LENGTH))


def test_a_pattern_checks_its_arguments():
    with pytest.raises(ValueError, match="key: must have the queries' head_dim 8, got 7"):
        effattn.pattern(QUERY, KEY[..., :7], backend="full")
    with pytest.raises(ValueError, match="padding: keep must have shape"):
        effattn.pattern(QUERY, KEY, backend="full", mask=Padding(torch.ones(1, 9).bool()))


# What padding hides


@pytest.mark.parametrize("spec", [*BACKENDS, "sliding_window(left=1, right=1, global_tokens=(0, 3))"])
@pytest.mark.parametrize("filling", [1e9, math.nan, math.inf])
def test_what_padding_hides_has_no_influence(spec, filling):
    """Not a bit of the result or the gradients changes, whatever stands there; its own gradient is 0."""
    keep = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 0, 0, 0, 0, 0]]).bool()
    hidden = ~keep[:, None, :, None]

    def compute(filling: float, mask: effattn.Mask) -> tuple[Tensor, ...]:
        key, value = (t.masked_fill(hidden, filling).requires_grad_() for t in (KEY, VALUE))
        query = QUERY.clone().requires_grad_()
        output = attention(query, key, value, backend=spec, mask=mask)
        return output, *torch.autograd.grad(output.square().sum(), (query, key, value))

    padding = Padding(keep)
    for mask in (padding, padding & Causal(), Dense(keep[:, None, None]), padding & Causal() | padding & Window(0, 3)):
        filled = compute(filling, mask)
        assert all(map(torch.equal, filled, compute(0.0, mask)))
        assert not any(grad.masked_select(hidden).any() for grad in filled[2:])


# What does not fit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": [1]}, "query: must be a tensor, got list"),
        ({"value": None}, "value: must be a tensor, got NoneType"),
        ({"query": QUERY[0]}, r"query: must have shape \[batch, heads, seq, head_dim\], got \[4, 6, 8\]"),
        ({"key": KEY[None]}, r"key: must have shape \[batch, heads, seq, head_dim\], got \[1, 2, 4, 6, 8\]"),
        ({"query": QUERY.long()}, "query: must be floating, got torch.int64"),
        ({"key": KEY.to(torch.complex64)}, "key: must be floating, got torch.complex64"),
        ({"key": KEY.double()}, "key: must have the queries' dtype torch.float32, got torch.float64"),
        ({"value": VALUE.half()}, "value: must have the queries' dtype torch.float32, got torch.float16"),
        ({"key": KEY.to("meta")}, "key: must be on the queries' device cpu, got meta"),
        ({"key": KEY[:1]}, "key: must have the queries' batch size 2, got 1"),
        ({"value": VALUE[:1]}, "value: must have the queries' batch size 2, got 1"),
        ({"key": KEY[..., :7]}, "key: must have the queries' head_dim 8, got 7"),
        ({"query": QUERY[..., :0], "key": KEY[..., :0]}, "query: head_dim must be >= 1, got 0"),
        ({"value": VALUE[:, :, :5]}, r"value: must have the keys' heads and length \[4, 6\], got \[4, 5\]"),
        ({"value": VALUE[:, :2]}, r"value: must have the keys' heads and length \[4, 6\], got \[2, 6\]"),
        (
            {"key": KEY[:, :3], "value": VALUE[:, :3]},
            "query: heads must be a multiple of the keys' heads 3, got 4$",
        ),
        (
            {"key": KEY[:, :0], "value": VALUE[:, :0]},
            "query: heads must be a multiple of the keys' heads 0, got 4",
        ),
        (
            {"query": draw(2, 7, 4, 8), "key": draw(2, 4, 4, 8), "value": draw(2, 4, 4, 8)},
            r"got 7; the layout is \[batch, heads, seq, head_dim\]",
        ),
        ({"mask": [True]}, "mask: must be a Mask, a tensor or None, got list"),
        ({"mask": torch.ones(LENGTH, LENGTH).long()}, r"mask: a tensor must be bool .* got torch.int64; .* Padding\("),
        ({"mask": torch.zeros(LENGTH), "bias": torch.zeros(LENGTH)}, "mask: a floating tensor is a bias, and bias is"),
        (
            {"mask": torch.ones(5).bool()},
            r"dense: allowed must be broadcastable to .* \[2, 4, 6, 6\], got \[1, 1, 1, 5",
        ),
        ({"mask": Padding(torch.ones(2, 5).bool())}, r"padding: keep must have shape .* = \[2, 6\], got \[2, 5\]"),
        ({"mask": Padding(torch.ones(3, 6).bool())}, r"padding: keep must have shape .* = \[2, 6\], got \[3, 6\]"),
        ({"mask": Causal() & Documents(torch.ones(1, 7).long())}, "documents: ids must have shape"),
        ({"mask": Documents(torch.ones(1, 6).long()), "query_offset": 1}, "documents: queries stand at positions 1..6"),
        ({"mask": Global((6,))}, "global: tokens must be positions below 6, got 6"),
        (
            {"mask": Padding(torch.ones(2, 6, device="meta", dtype=torch.bool))},
            r"mask: must be on the queries' device cpu, got meta in Padding\(bool\[2, 6\]\)",
        ),
        ({"bias": torch.ones(LENGTH).bool()}, "bias: must be a floating tensor, got torch.bool; a bool mask goes to"),
        ({"bias": 1.0}, "bias: must be a floating tensor, got float"),
        ({"bias": torch.zeros(5)}, r"bias: must be broadcastable to .* = \[2, 4, 6, 6\], got \[5\]"),
        ({"bias": torch.zeros(1, 1, 1, 1, 1)}, r"bias: must be broadcastable .* got \[1, 1, 1, 1, 1\]"),
        ({"bias": torch.zeros(3, 1, 1, 1)}, r"bias: must be broadcastable .* got \[3, 1, 1, 1\]"),
        ({"bias": torch.zeros(LENGTH, device="meta")}, "bias: must be on the queries' device cpu, got meta"),
        ({"scale": math.nan}, "scale: must be a finite number or None, got nan"),
        ({"scale": math.inf}, "scale: must be a finite number or None, got inf"),
        ({"scale": "big"}, "scale: must be a finite number or None, got 'big'"),
        ({"scale": torch.ones(())}, r"scale: must be a finite number or None, got tensor\(1.\)"),
        ({"dropout_p": 1.5}, "dropout_p: must lie in 0..1, got 1.5"),
        ({"dropout_p": -0.1}, "dropout_p: must lie in 0..1, got -0.1"),
        ({"dropout_p": math.nan}, "dropout_p: must lie in 0..1, got nan"),
        ({"dropout_p": None}, "dropout_p: must lie in 0..1, got None"),
        ({"query_offset": 1.0}, "query_offset: must be an integer or None, got 1.0"),
        ({"query_offset": True}, "query_offset: must be an integer or None, got True"),
        ({"backend": "fulll"}, r"backend: unknown name 'fulll'; did you mean 'full'\?"),
        ({"backend": "lsh(bucket_size=0)"}, "lsh: bucket_size must be an integer >= 1, got 0"),
        ({"backend": 3}, "backend: must be a spec string or a Backend, got int"),
    ],
)
def test_bad_input_gives_one_clear_error(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        call(**changes)
    assert not isinstance(error.value, effattn.UnsupportedError)
    assert error.value.__cause__ is None


def test_what_a_backend_cannot_do_is_refused_with_every_reason():
    with pytest.raises(effattn.UnsupportedError) as refusal:
        call(backend="lsh(shared_qk=True)", bias=torch.zeros(LENGTH), query_offset=1, mask=Causal())
    assert refusal.value.reasons == (
        "requested a bias; supported none",
        "requested query_offset 1; supported key_len - query_len = 0",
    )


def test_a_dtype_that_nobody_computes_in_is_refused():
    eighths = [t.to(torch.float8_e4m3fn) for t in (QUERY, KEY, VALUE)]
    for spec in BACKENDS:
        with pytest.raises(effattn.UnsupportedError, match="requested float8_e4m3fn; supported float32, float16"):
            attention(*eighths, backend=spec)


# Gradients, whichever way they are asked for


@pytest.mark.parametrize("spec", BACKENDS)
class TestGradients:
    def inputs(self) -> list[Tensor]:
        return [t.clone().requires_grad_() for t in (QUERY, KEY, VALUE)]

    def test_one_input_alone(self, spec):
        inputs = self.inputs()
        expected = torch.autograd.grad(attention(*inputs, backend=spec).square().sum(), inputs)
        for index in range(3):
            some = [t.detach().requires_grad_(i == index) for i, t in enumerate(inputs)]
            (grad,) = torch.autograd.grad(attention(*some, backend=spec).square().sum(), some[index])
            torch.testing.assert_close(grad, expected[index])

    def test_two_backward_passes_through_one_graph(self, spec):
        inputs = self.inputs()
        output = attention(*inputs, backend=spec, mask=Causal()).square().sum()
        first = torch.autograd.grad(output, inputs, retain_graph=True)
        assert all(map(torch.equal, first, torch.autograd.grad(output, inputs)))

    def test_gradients_accumulate(self, spec):
        inputs = self.inputs()
        for _ in range(2):
            attention(*inputs, backend=spec).square().sum().backward()
        once = torch.autograd.grad(attention(*inputs, backend=spec).square().sum(), inputs)
        for tensor, grad in zip(inputs, once, strict=True):
            torch.testing.assert_close(tensor.grad, 2 * grad)

    def test_none_where_none_are_wanted(self, spec):
        expected = attention(*self.inputs(), backend=spec)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                output = attention(*self.inputs(), backend=spec)
            assert not output.requires_grad
            assert torch.equal(output, expected)
        assert not call(backend=spec).requires_grad

    def test_one_tensor_as_query_key_and_value(self, spec):
        x = QUERY.clone().requires_grad_()
        (grad,) = torch.autograd.grad(attention(x, x, x, backend=spec).square().sum(), x)
        apart = [x.detach().clone().requires_grad_() for _ in range(3)]
        grads = torch.autograd.grad(attention(*apart, backend=spec).square().sum(), apart)
        torch.testing.assert_close(grad, sum(grads))


def test_weights_are_those_that_the_output_is_made_of():
    query, key, value = (torch.randn(2, h, 9, 4, dtype=torch.float64) for h in (4, 2, 2))
    mask = Causal() & Padding(torch.arange(9) >= torch.tensor([[0], [3]]))
    options = {"mask": mask, "scale": 0.3}
    for spec in (
        "full",
        "sliding_window(left=2, right=0)",
        "lsh(bucket_size=3)",
        "lsh(bucket_size=3, count='per_round')",
    ):
        weights = effattn.attention_weights(query, key, backend=spec, **options)
        output = effattn.attention(query, key, value, backend=spec, **options)
        torch.testing.assert_close(weights @ value.repeat_interleave(2, dim=1), output)
    biased = effattn.attention_weights(query, key, bias=torch.randn(9, 9), query_offset=0)
    torch.testing.assert_close(biased.sum(-1), torch.ones_like(biased[..., 0]))


def test_weights_are_refused_where_there_is_no_one_pattern():
    query, key = torch.randn(2, 1, 2, 9, 4)
    with pytest.raises(effattn.UnsupportedError, match="draws anew at each call"):
        effattn.attention_weights(query, key, backend="lsh(seed=None)")
    with pytest.raises(effattn.UnsupportedError, match="with a bias, but the backend weighs"):
        effattn.attention_weights(query, key, backend="lsh(count='per_round')", bias=torch.zeros(9))
