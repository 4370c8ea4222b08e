"""What users of comparable libraries stumble over, each a test that carries the row's id.

The rows are those about attention that can run on a CPU: masks (M), lengths (L), query and key lengths (C), LSH (H),
sliding windows (W), numerics (N), gradients and dropout (G), layout (S), checkpointing and parameters (X), and
measured errors (B5). xformers, FlexAttention and the runner have theirs in their own files.
"""

import dataclasses
import math
from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import effattn
from effattn import Backend, Mask, Request, UnsupportedError, attention, get, pattern, reference
from effattn.masks import Causal, Dense, Documents, Global, Padding, Window

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 4, 37, 16

# As wide as the problem, so that every backend but LSH gives what full attention gives.
EXACT = ["full", "sdpa", "sdpa(kernel='math')", "chunked(query_chunk=8, key_chunk=8)", "sliding_window"]
APPROXIMATE = [
    "sliding_window(left=4, right=4)",
    "sliding_window(left=2, right=2, dilation=2, global_tokens=(0, 20))",
    "lsh(bucket_size=4)",
    "lsh(bucket_size=4, shared_qk=True)",
]
ALL = EXACT + APPROXIMATE

every_backend = pytest.mark.parametrize("spec", ALL)
exact_backends = pytest.mark.parametrize("spec", EXACT)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(length: int = LENGTH, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value; a key is its query over its length, so that shared queries and keys may be asked for."""
    query = draw(BATCH, HEADS, length, HEAD_DIM, seed=1)
    key = F.normalize(query, dim=-1) * HEAD_DIM**0.5
    tensors = (query, key, draw(BATCH, HEADS, length, HEAD_DIM, seed=3))
    return [t.to(dtype).requires_grad_() for t in tensors]


def declaring(specs: Iterable[str], **capabilities: object) -> list[str]:
    """Those whose capabilities have these values."""
    return [spec for spec in specs if all(getattr(get(spec).capabilities, k) == v for k, v in capabilities.items())]


def by_the_pattern(
    spec: str, tensors: list[Tensor], mask: Mask | None = None, scale: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """Dense attention in float64 under what the backend attends to."""
    own = pattern(*tensors[:2], backend=spec, mask=mask)
    return reference.attention(*tensors, mask=own, bias=bias, scale=scale)[0].to(tensors[0].dtype)


# Masks


@every_backend
def test_M1_a_row_that_sees_nothing_gives_zero_and_finite_gradients(spec):
    allowed = draw(BATCH, 1, LENGTH, LENGTH) > -1
    allowed[:, :, [0, 5, 36]] = False
    tensors = inputs()
    output = attention(*tensors, backend=spec, mask=Dense(allowed))
    assert not output[:, :, [0, 5, 36]].any()
    assert output[:, :, 1].any()
    torch.testing.assert_close(output, by_the_pattern(spec, tensors, Dense(allowed)), rtol=1e-4, atol=1e-5)
    grads = torch.autograd.grad(output.square().sum(), tensors)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][:, :, [0, 5, 36]].any()


@pytest.mark.parametrize("spec", declaring(EXACT, bias=True))
def test_M1_a_bias_of_minus_infinity_is_a_row_that_sees_nothing(spec):
    bias = torch.zeros(LENGTH, LENGTH)
    bias[5] = -math.inf
    tensors = inputs()
    output = attention(*tensors, backend=spec, bias=bias)
    assert not output[:, :, 5].any()
    torch.testing.assert_close(output[:, :, 6:], attention(*tensors)[:, :, 6:], rtol=1e-4, atol=1e-5)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.sum(), tensors))


@every_backend
def test_M3_causal_with_left_padding(spec):
    pads = 9
    tensors, mask = inputs(), Causal() & Padding((torch.arange(LENGTH) >= pads)[None])
    output = attention(*tensors, backend=spec, mask=mask)
    assert not output[:, :, :pads].any()
    grads = torch.autograd.grad(output.sum(), tensors)
    assert all(grad.isfinite().all() and not grad[:, :, :pads].any() for grad in grads)
    if spec in EXACT:
        without = attention(*(t[:, :, pads:] for t in tensors), backend=spec, mask=Causal())
        torch.testing.assert_close(output[:, :, pads:], without, rtol=1e-4, atol=1e-5)


@every_backend
def test_M4_two_masks_in_half_precision_do_not_overflow(spec):
    tensors = inputs(dtype=torch.float16)
    mask = Causal() & Padding((torch.arange(LENGTH) % 3 > 0)[None])
    output = attention(*tensors, backend=spec, mask=mask)
    torch.testing.assert_close(output, by_the_pattern(spec, tensors, mask), rtol=1e-2, atol=1e-2)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.float().sum(), tensors))


@pytest.mark.parametrize("spec", declaring(EXACT, bias=True))
def test_M4_two_additive_masks_that_sum_to_minus_infinity(spec):
    lowest = torch.finfo(torch.float16).min
    causal = torch.full((LENGTH, LENGTH), lowest, dtype=torch.float16).triu(1)
    padding = torch.zeros(LENGTH, dtype=torch.float16)
    padding[:4] = lowest
    tensors = inputs(dtype=torch.float16)
    output = attention(*tensors, backend=spec, bias=causal + padding)
    assert output.isfinite().all()
    expected = attention(*tensors, mask=Causal() & Padding((torch.arange(LENGTH) >= 4)[None]))
    torch.testing.assert_close(output[:, :, 4:], expected[:, :, 4:], rtol=1e-2, atol=1e-2)


@every_backend
def test_M6_a_mask_and_causal_are_both_obeyed(spec):
    allowed = draw(LENGTH, LENGTH) > 0
    tensors = inputs()
    joined = attention(*tensors, backend=spec, mask=Causal() & Dense(allowed))
    torch.testing.assert_close(joined, by_the_pattern(spec, tensors, Dense(allowed.tril())), rtol=1e-4, atol=1e-5)
    dense = pattern(*tensors[:2], backend=spec, mask=Causal() & Dense(allowed)).dense(BATCH, HEADS, LENGTH, LENGTH)
    assert not (dense & ~allowed.tril()).any()


@every_backend
def test_M7_true_means_may_attend(spec):
    """Only key 20 may be seen: its value comes out."""
    tensors, only = inputs(), torch.arange(LENGTH) == 20
    for mask in (only.expand(LENGTH, LENGTH), Dense(only), Padding(only[None]), Padding(only[None].long())):
        output = attention(*tensors, backend=spec, mask=mask)
        seen = output.abs().sum(-1) > 0
        assert seen[:, :, 20].all() or "shared_qk" not in spec
        values = tensors[2][:, :, 20:21].expand_as(output)
        torch.testing.assert_close(output[seen], values[seen])


def test_M7_a_mask_that_could_mean_two_things_is_refused():
    tensors = inputs()
    with pytest.raises(ValueError, match=r"mask: a tensor must be bool .* or floating"):
        attention(*tensors, mask=torch.ones(LENGTH, LENGTH, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"bias: must be a floating tensor, got torch\.bool"):
        attention(*tensors, bias=torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"padding: keep must be bool or 0/1 integers, got torch\.float32"):
        Padding(torch.ones(1, LENGTH))
    with pytest.raises(ValueError, match="dense: allowed must be a bool tensor"):
        Dense(torch.zeros(LENGTH, LENGTH))
    # Each dtype has one meaning.
    assert torch.equal(attention(*tensors, mask=torch.zeros(LENGTH)), attention(*tensors, bias=torch.zeros(LENGTH)))
    assert not attention(*tensors, mask=torch.zeros(LENGTH, dtype=torch.bool)).any()


# Lengths


@every_backend
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 9, 63, 64, 65, 129])
def test_L1_L2_any_length_in_training_and_evaluation(spec, length):
    tensors = inputs(length)
    output = attention(*tensors, backend=spec, mask=Causal())
    torch.testing.assert_close(output, by_the_pattern(spec, tensors, Causal()), rtol=1e-4, atol=1e-5)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.sum(), tensors))
    with torch.no_grad():
        assert torch.equal(attention(*tensors, backend=spec, mask=Causal()), output)


@every_backend
def test_L3_one_mask_and_one_backend_serve_every_length(spec):
    backend, mask = get(spec), Causal() & (Window(9, 9) | Global((0,)))
    for length in (40, 7, 129, 40):
        tensors = inputs(length)
        output = attention(*tensors, backend=backend, mask=mask)
        torch.testing.assert_close(output, by_the_pattern(spec, tensors, mask), rtol=1e-4, atol=1e-5)


def test_L3_a_mask_made_for_another_length_is_refused():
    for mask in (
        Dense(torch.ones(30, 30).bool()),
        Padding(torch.ones(1, 30).bool()),
        Documents(torch.ones(1, 30).long()),
        Global(torch.ones(1, 30).bool()),
    ):
        for spec in ALL:
            with pytest.raises(ValueError, match=r"got \[1, (1, 30, )?30\]"):
                attention(*inputs(), backend=spec, mask=mask)


@pytest.mark.parametrize("spec", declaring(ALL, bias=True))
def test_L4_a_bias_of_odd_strides(spec):
    tensors = inputs(dtype=torch.bfloat16)
    for bias in (draw(LENGTH, LENGTH), draw(LENGTH, LENGTH + 1)[:, 1:], draw(HEADS, 1, LENGTH).expand(-1, LENGTH, -1)):
        output = attention(*tensors, backend=spec, bias=bias.bfloat16())
        expected = by_the_pattern(spec, tensors, bias=bias.bfloat16())
        torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)


@every_backend
@pytest.mark.parametrize(("query_len", "key_len"), [(0, 5), (5, 0), (0, 0)])
def test_L5_no_queries_or_no_keys(spec, query_len, key_len):
    query, key = draw(BATCH, HEADS, query_len, HEAD_DIM), draw(BATCH, HEADS, key_len, HEAD_DIM)
    if query_len != key_len and not get(spec).capabilities.cross_length:
        with pytest.raises(UnsupportedError, match=f"query_len {query_len} with key_len {key_len}"):
            attention(query, key, key, backend=spec)
        return
    output = attention(query, key, key, backend=spec)
    assert output.shape == (BATCH, HEADS, query_len, HEAD_DIM)
    assert not output.any()


# Query and key lengths


@pytest.mark.parametrize("spec", declaring(EXACT, cross_length=True))
def test_C3_decoding_with_a_cache_sees_every_key(spec):
    query, key, value = inputs()
    step = attention(query[:, :, -1:], key, value, backend=spec, mask=Causal())
    torch.testing.assert_close(step, attention(query[:, :, -1:], key, value))
    whole = attention(query, key, value, backend=spec, mask=Causal())
    torch.testing.assert_close(step, whole[:, :, -1:])
    some = attention(query[:, :, 30:], key, value, backend=spec, mask=Causal())
    torch.testing.assert_close(some, whole[:, :, 30:])


@pytest.mark.parametrize("spec", declaring(ALL, cross_length=True))
def test_C4_cross_attention_is_causal_only_where_asked(spec):
    query, key, value = (draw(BATCH, HEADS, n, HEAD_DIM, seed=n).requires_grad_() for n in (9, LENGTH, LENGTH))
    dense = pattern(query, key, backend=spec).dense(BATCH, HEADS, 9, LENGTH)
    first_rows_key = LENGTH - 9
    assert dense[:, :, 0, first_rows_key + 1 :].any(), "the first query sees no key past its position"
    output = attention(query, key, value, backend=spec)
    torch.testing.assert_close(output, by_the_pattern(spec, [query, key, value]), rtol=1e-4, atol=1e-5)


# LSH

LSH = ["lsh(bucket_size=4)", "lsh(bucket_size=4, shared_qk=True)", "lsh(bucket_size=4, count='per_round')"]
lsh_backends = pytest.mark.parametrize("spec", LSH)


@lsh_backends
def test_H1_a_seed_makes_calls_equal_and_leaves_the_global_generator_alone(spec):
    state = torch.get_rng_state()
    first, second = (attention(*inputs(), backend=spec) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("scale", [1e6, 1.0, -1.0, -1e6])
def test_H3_a_token_sees_itself_only_where_it_sees_nothing_else(scale):
    """Reformer gives the self-score a fixed -5e4, to which a real score below it loses."""
    tensors, backend = inputs(), get("lsh(bucket_size=4, shared_qk=True)")
    dense = pattern(*tensors[:2], backend=backend, mask=Causal()).dense(BATCH, HEADS, LENGTH, LENGTH)
    others = dense & ~torch.eye(LENGTH, dtype=torch.bool)
    assert torch.equal(dense.diagonal(dim1=2, dim2=3), ~others.any(-1))
    output = attention(*tensors, backend=backend, mask=Causal(), scale=scale)
    expected = by_the_pattern(str(backend), tensors, Causal(), scale)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@lsh_backends
def test_H5_no_gradient_reaches_the_past_from_the_future(spec):
    tensors = inputs()
    output = attention(*tensors, backend=spec, mask=Causal())
    for cut in (1, 13, 36):
        grads = torch.autograd.grad(output[:, :, :cut].sum(), tensors, retain_graph=True)
        assert not any(grad[:, :, cut:].any() for grad in grads)
    assert "later tokens" in type(get(spec)).__doc__, "that the choice of keys depends on later tokens is documented"


@lsh_backends
def test_H6_a_query_without_a_key_gives_zero(spec):
    """One key a window, which under a causal mask may be a later one. A shared query still sees itself."""
    backend = get(spec, bucket_size=1, num_hashes=1, look_back=0)
    query, key, value = inputs()
    if not backend.shared_qk:
        key = draw(*key.shape, seed=2).requires_grad_()
    output, lse = attention(query, key, value, backend=backend, mask=Causal(), return_lse=True)
    seen = pattern(query, key, backend=backend, mask=Causal()).dense(BATCH, HEADS, LENGTH, LENGTH)
    nothing = ~seen.any(-1)
    assert nothing.any() != backend.shared_qk
    assert not output[nothing].any()
    assert (lse[nothing] == -math.inf).all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.sum(), (query, key, value)))


@lsh_backends
def test_H8_a_bucket_longer_than_two_chunks_is_an_approximation_and_no_error(spec):
    """Identical keys all share a bucket; a row meets at most the keys of its window, round by round."""
    x = torch.ones(1, 1, 64, 8)
    output = attention(x, x, draw(1, 1, 64, 8), backend=spec)
    assert output.isfinite().all()
    dense = pattern(x, x, backend=spec).dense(1, 1, 64, 64)
    assert dense.any(-1).all()
    assert dense.sum(-1).max() <= 2 * 4 * get(spec).num_hashes


# Sliding windows


@pytest.mark.parametrize(
    ("left", "right", "count"),
    [(2, 0, 3), (2, 2, 5), (5, 0, 6)],
    ids=["mistral sliding_window=3", "longformer attention_window=4", "flash-attn window_size=(5, 0)"],
)
@exact_backends
def test_W1_counts_of_keys_are_exact(spec, left, right, count):
    tensors = [*inputs()[:2], torch.eye(LENGTH).expand(BATCH, HEADS, -1, -1)]
    for output in (
        attention(*tensors, backend=spec, mask=Window(left, right)),
        attention(*tensors, backend=get("sliding_window", left=left, right=right)),
    ):
        assert ((output[:, :, 10] > 0).sum(-1) == count).all()
        keys = output[0, 0, 10].nonzero()[:, 0]
        assert (keys.min(), keys.max()) == (10 - left, 10 + right)


@pytest.mark.parametrize("name", [name for name in effattn.names() if name != "flex"])  # seconds to compile
def test_W2_a_window_is_applied_or_refused(name):
    request = Request.of(*(t.detach() for t in inputs()), mask=Window(3, 0))
    backend = get(name)
    if backend.reasons(request):
        with pytest.raises(UnsupportedError):
            attention(*inputs(), backend=backend, mask=Window(3, 0))
        return
    value = torch.eye(LENGTH).expand(BATCH, HEADS, -1, -1)
    with torch.no_grad():
        output = attention(*inputs()[:2], value, backend=backend, mask=Window(3, 0))
    band = Window(3, 0).dense(1, 1, LENGTH, LENGTH)
    assert not output.masked_select(~band).any()


@exact_backends
def test_W3_the_band_is_exact_for_every_token(spec):
    """Past every block limit: each row's keys, one by one."""
    tensors = [*inputs(150)[:2], torch.eye(150).expand(BATCH, HEADS, -1, -1)]
    seen = attention(*tensors, backend=spec, mask=Window(7, 3)) > 0
    rows, keys = torch.arange(150)[:, None], torch.arange(150)
    assert torch.equal(seen, ((keys >= rows - 7) & (keys <= rows + 3)).expand_as(seen))


@exact_backends
def test_W6_windows_and_lengths_do_not_mix_up(spec):
    for length, left in ((40, 3), (40, 5), (70, 5), (70, 3), (40, 3)):
        tensors = inputs(length)
        for causal in (True, False):
            mask = Causal() & Window(left, 1) if causal else Window(left, 1)
            output = attention(*tensors, backend=spec, mask=mask)
            expected = reference.attention(*tensors, mask=mask)[0].float()
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("left", [0, 1, 10, 36, 37, 1000])
@pytest.mark.parametrize("dilation", [1, 2, 36, 37, 1000])
def test_W7_any_window_and_dilation(left, dilation):
    spec = f"sliding_window(left={left}, right=3, dilation={dilation})"
    tensors = inputs()
    output = attention(*tensors, backend=spec)
    band = Window(left, 3, dilation)
    torch.testing.assert_close(output, reference.attention(*tensors, mask=band)[0].float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", [spec for spec in ALL if "sliding_window" in spec])
def test_W8_a_window_and_padding_give_no_nan(spec):
    """Some windows hold padding alone."""
    keep = torch.arange(LENGTH)[None] < torch.tensor([[LENGTH], [10]])
    tensors = inputs()
    output = attention(*tensors, backend=spec, mask=Padding(keep))
    torch.testing.assert_close(output, by_the_pattern(spec, tensors, Padding(keep)), rtol=1e-4, atol=1e-5)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.sum(), tensors))


# Numerics


@every_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_N1_masks_work_in_half_precision(spec, dtype):
    tensors, mask = inputs(dtype=dtype), Causal() & Padding((torch.arange(LENGTH) > 5)[None])
    output = attention(*tensors, backend=spec, mask=mask)
    torch.testing.assert_close(output, by_the_pattern(spec, tensors, mask), rtol=2e-2, atol=2e-2)


@every_backend
def test_N4_scores_past_the_range_of_half_precision(spec):
    query, _, value = inputs(dtype=torch.float16)
    large = (query.detach() * 200).requires_grad_()
    assert (large.float() @ large.float().mT).max() > torch.finfo(torch.float16).max
    output = attention(large, large, value, backend=spec)
    torch.testing.assert_close(output, by_the_pattern(spec, [large, large, value]), rtol=1e-2, atol=1e-2)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.float().sum(), (large, value)))


@pytest.mark.parametrize("spec", declaring(ALL, bias=True))
def test_N5_a_float32_bias_with_bfloat16_queries(spec):
    bias = draw(LENGTH, LENGTH)
    tensors = inputs(dtype=torch.bfloat16)
    output = attention(*tensors, backend=spec, bias=bias)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, by_the_pattern(spec, tensors, bias=bias), rtol=2e-2, atol=3e-2)


@every_backend
def test_N5_autocast(spec):
    tensors = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attention(*tensors, backend=spec, mask=Causal())
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, attention(*(t.bfloat16() for t in tensors), backend=spec, mask=Causal()))
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(output.float().sum(), tensors))


# Gradients and dropout


@every_backend
def test_G1_no_dropout_unless_asked_for(spec):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = attention(*inputs(), backend=spec)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(attention(*inputs(), backend=spec, dropout_p=0.0), first)


@every_backend
def test_G2_a_second_derivative_is_right_or_says_that_there_is_none(spec):
    query, key, value = inputs(dtype=torch.float64)

    def slope(query: Tensor, create_graph: bool) -> Tensor:
        output = attention(query, key, value, backend=spec, mask=Window(3, 3))
        return torch.autograd.grad(output.square().sum(), query, create_graph=create_graph)[0]

    first = slope(query, create_graph=True)
    try:
        (second,) = torch.autograd.grad(first.square().sum(), query)
    except RuntimeError as error:
        if any(reason in str(error) for reason in ("is not implemented", "no autograd formula", "differentiate twice")):
            return
        raise
    step = 1e-5 * draw(*query.shape).double()
    change = slope(query + step, False).square().sum() - slope(query - step, False).square().sum()
    torch.testing.assert_close(change, 2 * (second * step).sum(), rtol=1e-3, atol=1e-9)


def test_G3_a_backward_pass_that_does_not_exist_is_refused_with_its_reason():
    flex = get("flex")
    absent = flex.unavailable()
    reasons = flex.reasons(Request.of(*inputs()))
    assert any("requested a backward pass" in reason for reason in reasons) or absent in reasons
    with pytest.raises(UnsupportedError, match="backward" if absent is None else None):
        attention(*inputs(), backend=flex)


@pytest.mark.parametrize("spec", declaring(ALL, bias_grad=True))
def test_G4_a_bias_may_be_all_that_has_a_gradient(spec):
    tensors = [t.detach() for t in inputs()]
    for shape in ((LENGTH,), (LENGTH, LENGTH), (HEADS, 1, 1), (BATCH, 1, LENGTH, LENGTH)):
        bias = draw(*shape).requires_grad_()
        got, want = attention(*tensors, backend=spec, bias=bias), by_the_pattern(spec, tensors, bias=bias)
        weight = draw(*got.shape, seed=5)
        grads = [torch.autograd.grad((t * weight).sum(), bias)[0] for t in (got, want)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
        assert grads[0].any() or shape == (HEADS, 1, 1)  # what shifts whole rows changes nothing


# Layout


@every_backend
def test_S1_strided_and_expanded_inputs(spec):
    query, key, value = (t.detach() for t in inputs())
    layouts = {
        "sequence first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "last dimension strided": lambda t: t.mT.contiguous().mT,
        "every other": lambda t: torch.stack([t, t + 1], dim=-1).flatten(-2)[..., ::2],
        "expanded": lambda t: t[:1, :1].expand_as(t),
    }
    for name, change in layouts.items():
        changed = [change(t) for t in (query, key, value)]
        assert not all(t.is_contiguous() for t in changed), name
        output = attention(*changed, backend=spec, mask=Causal())
        expected = attention(*(t.contiguous() for t in changed), backend=spec, mask=Causal())
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", declaring(ALL, grouped_heads=True))
def test_S2_query_heads_share_key_heads_in_groups(spec):
    query = draw(BATCH, 6, LENGTH, HEAD_DIM, seed=1)
    key, value = (draw(BATCH, 2, LENGTH, HEAD_DIM, seed=s) for s in (2, 3))
    repeated = [t.repeat_interleave(3, dim=1) for t in (key, value)]
    tiled = [t.repeat(1, 3, 1, 1) for t in (key, value)]
    output = attention(query, key, value, backend=spec)
    torch.testing.assert_close(output, attention(query, *repeated, backend=spec), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(output, attention(query, *tiled, backend=spec), atol=1e-2)


def test_S2_heads_that_do_not_divide_are_refused():
    query, key = draw(BATCH, 6, LENGTH, HEAD_DIM), draw(BATCH, 4, LENGTH, HEAD_DIM)
    for spec in ALL:
        with pytest.raises(ValueError, match="query: heads must be a multiple of the keys' heads 4, got 6"):
            attention(query, key, key, backend=spec)
    with pytest.raises(UnsupportedError, match="requested 6 query heads on 2 key heads; supported equal numbers"):
        attention(query, key[:, :2], key[:, :2], backend="lsh(shared_qk=True)")


def test_S3_another_layout_is_told_by_its_axes():
    query = draw(2, 10, 4, 16)  # batch, seq, heads, head_dim
    with pytest.raises(ValueError, match=r"heads must be .* got 10; the layout is \[batch, heads, seq, head_dim\]"):
        attention(query, query[:, :4], query[:, :4])
    with pytest.raises(ValueError, match=r"query: must have shape \[batch, heads, seq, head_dim\], got \[10, 4, 16\]"):
        attention(query[0], query, query)


@pytest.mark.parametrize("spec", declaring(ALL, max_head_dim=None, value_head_dim=True))
@pytest.mark.parametrize(("head_dim", "value_dim"), [(300, 300), (8, 24), (24, 8), (1, 1)])
def test_S4_head_dimensions(spec, head_dim, value_dim):
    query = draw(1, 2, 20, head_dim)
    tensors = [query, F.normalize(query, dim=-1), draw(1, 2, 20, value_dim)]
    output = attention(*tensors, backend=spec)
    assert output.shape == (1, 2, 20, value_dim)
    torch.testing.assert_close(output, by_the_pattern(spec, tensors), rtol=1e-4, atol=1e-5)


# Checkpointing and parameters


@pytest.mark.parametrize("spec", [*ALL, "lsh(bucket_size=4, seed=None)"])
def test_X2_checkpointing_recomputes_what_was_computed(spec):
    tensors = inputs()

    def call(*tensors: Tensor) -> Tensor:
        return attention(*tensors, backend=spec, mask=Causal(), dropout_p=0.3)

    grads = []
    for run in (call, lambda *t: checkpoint(call, *t, use_reentrant=False)):
        torch.manual_seed(0)
        grads.append(torch.autograd.grad(run(*tensors).square().sum(), tensors))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", effattn.names())
def test_X3_a_backend_has_no_parameters_and_no_state(name):
    backend = get(name)
    assert isinstance(backend, Backend)
    assert not isinstance(backend, torch.nn.Module)
    assert vars(backend) == {field.name: getattr(backend, field.name) for field in dataclasses.fields(backend)}
    assert not any(isinstance(value, Tensor) for value in vars(backend).values())


# Measuring


@every_backend
def test_B5_the_error_of_bfloat16_is_seen_against_float64(spec):
    """The reference takes what the backend took and computes in float64: rounding shows, at bfloat16's size."""
    tensors = [t.detach() for t in inputs(dtype=torch.bfloat16)]
    output = attention(*tensors, backend=spec)
    truth, _ = reference.attention(*tensors, mask=pattern(*tensors[:2], backend=spec))
    assert truth.dtype == torch.float64
    error = ((output.double() - truth).norm() / truth.norm()).item()
    eps = torch.finfo(torch.bfloat16).eps
    assert eps / 10 < error < eps
    assert torch.equal(
        truth, reference.attention(*(t.double() for t in tensors), mask=pattern(*tensors[:2], backend=spec))[0]
    )
