"""The reference itself, against a plain loop over heads, rows and keys."""

import math

import pytest
import torch
from torch import Tensor

from effattn import reference
from effattn.dropout import keep_scale
from effattn.masks import Causal, Dense, Documents, Global, Mask, Padding, Window

BATCH, HEADS, KV_HEADS, QUERY_LEN, KEY_LEN, HEAD_DIM, VALUE_DIM = 2, 4, 2, 5, 7, 3, 2


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def query() -> Tensor:
    return draw(BATCH, HEADS, QUERY_LEN, HEAD_DIM, seed=1)


@pytest.fixture
def key() -> Tensor:
    return draw(BATCH, KV_HEADS, KEY_LEN, HEAD_DIM, seed=2)


@pytest.fixture
def value() -> Tensor:
    return draw(BATCH, KV_HEADS, KEY_LEN, VALUE_DIM, seed=3)


def by_hand(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, bias: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention as its definition reads, one score at a time."""
    output = torch.zeros(BATCH, HEADS, QUERY_LEN, VALUE_DIM, dtype=torch.float64)
    lse = torch.full((BATCH, HEADS, QUERY_LEN), -math.inf, dtype=torch.float64)
    scale = 1 / math.sqrt(HEAD_DIM) if scale is None else scale
    bias = torch.zeros(()) if bias is None else bias
    bias = bias.expand(BATCH, HEADS, QUERY_LEN, KEY_LEN)
    for b in range(BATCH):
        for h in range(HEADS):
            kv_head = h // (HEADS // KV_HEADS)
            for i in range(QUERY_LEN):
                powers = {}
                for j in range(KEY_LEN):
                    if allowed[b, h, i, j]:
                        dot = sum(query[b, h, i, d].item() * key[b, kv_head, j, d].item() for d in range(HEAD_DIM))
                        powers[j] = math.exp(scale * dot + bias[b, h, i, j].item())
                total = sum(powers.values())
                if total:
                    lse[b, h, i] = math.log(total)
                for j, power in powers.items():
                    output[b, h, i] += power / total * value[b, kv_head, j] if total else 0
    return output, lse


MASKS: dict[str, Mask] = {
    "causal": Causal(),
    "dilated window": Window(2, 1, dilation=2),
    "padding": Padding(torch.tensor([[1, 0, 1, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0, 0]])),
    "documents": Documents(torch.tensor([[1, 1, 1, 2, 2, 2, 2]])),
    "window or global": Window(1, 0) | Global((0,)),
    "dense": Dense(draw(BATCH, HEADS, QUERY_LEN, KEY_LEN) > 0.3),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_is_the_definition(query, key, value, mask):
    output, lse = reference.attention(query, key, value, mask=mask)
    expected, expected_lse = by_hand(query, key, value, mask.dense(BATCH, HEADS, QUERY_LEN, KEY_LEN))
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_without_a_mask_everything_is_seen(query, key, value):
    output, lse = reference.attention(query, key, value)
    expected, expected_lse = by_hand(query, key, value, torch.ones(BATCH, HEADS, QUERY_LEN, KEY_LEN))
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("shape", [(KEY_LEN,), (QUERY_LEN, 1), (HEADS, 1, KEY_LEN), (BATCH, 1, QUERY_LEN, KEY_LEN)])
def test_bias_scale_and_offset(query, key, value, shape):
    bias, mask = draw(*shape, seed=4), Causal()
    output, lse = reference.attention(query, key, value, mask=mask, bias=bias, scale=-0.7, query_offset=1)
    allowed = mask.dense(BATCH, HEADS, QUERY_LEN, KEY_LEN, 1)
    expected, expected_lse = by_hand(query, key, value, allowed, bias, -0.7)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_a_bias_may_be_a_function_of_the_indices(query, key, value):
    table = draw(BATCH, HEADS, QUERY_LEN, KEY_LEN)
    by_function = reference.attention(query, key, value, bias=lambda b, h, i, j: table[b, h, i, j])
    by_tensor = reference.attention(query, key, value, bias=table)
    torch.testing.assert_close(by_function, by_tensor)


def test_sampled_rows_are_rows_of_the_whole(query, key, value):
    bias, rows = draw(QUERY_LEN, KEY_LEN), torch.tensor([4, 0, 2])
    for mask in MASKS.values():
        whole, whole_lse = reference.attention(query, key, value, mask=mask, bias=bias)
        some, some_lse = reference.attention(query, key, value, mask=mask, bias=bias, rows=rows)
        torch.testing.assert_close(some, whole[:, :, rows])
        torch.testing.assert_close(some_lse, whole_lse[:, :, rows])


def test_blocks_of_rows_make_no_difference(query, key, value, monkeypatch):
    def compute() -> tuple[Tensor, ...]:
        grads = reference.gradients(query, key, value, draw(BATCH, HEADS, QUERY_LEN, VALUE_DIM), mask=Causal())
        return *reference.attention(query, key, value, mask=Causal(), dropout_p=0.5, dropout_seed=3), *grads

    at_once = compute()
    monkeypatch.setattr(reference, "_BLOCK_BYTES", 1)  # one row a block
    assert len(list(reference.score_rows(query, key))) == QUERY_LEN
    torch.testing.assert_close(compute(), at_once)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_gradients_are_those_of_autograd(query, key, value, mask):
    grad_output, bias = draw(BATCH, HEADS, QUERY_LEN, VALUE_DIM, seed=5), draw(KEY_LEN)
    inputs = [t.requires_grad_() for t in (query, key, value)]
    output, _ = reference.attention(*inputs, mask=mask, bias=bias, scale=0.4)
    expected = torch.autograd.grad(output, inputs, grad_output)
    got = reference.gradients(query, key, value, grad_output, mask=mask, bias=bias, scale=0.4)
    torch.testing.assert_close(got, expected)
    assert not any(grad.requires_grad for grad in got)


def test_gradients_pass_gradcheck(query, key, value):
    bias = draw(HEADS, 1, KEY_LEN).requires_grad_()

    def call(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return reference.attention(*inputs[:3], bias=inputs[3], mask=Causal())

    inputs = [t[:1].requires_grad_() for t in (query, key, value)]
    assert torch.autograd.gradcheck(call, (*inputs, bias))


def test_a_row_that_sees_nothing_gives_zero_and_no_gradient(query, key, value):
    allowed = torch.ones(QUERY_LEN, KEY_LEN, dtype=torch.bool)
    allowed[1] = False
    bias = torch.zeros(QUERY_LEN, KEY_LEN, dtype=torch.float64)
    bias[3] = -math.inf
    inputs = [t.requires_grad_() for t in (query, key, value, bias)]
    output, lse = reference.attention(*inputs[:3], mask=Dense(allowed), bias=bias)
    assert not output[:, :, [1, 3]].any()
    assert (lse[:, :, [1, 3]] == -math.inf).all()
    assert lse[:, :, [0, 2, 4]].isfinite().all()
    grads = torch.autograd.grad(output.sum(), inputs)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][:, :, [1, 3]].any()
    assert not grads[3][[1, 3]].any()


def test_what_padding_hides_has_no_influence(query, key, value):
    mask = MASKS["padding"]
    expected, _ = reference.attention(query, key, value, mask=mask)
    for tensor in (key, value):
        tensor.masked_fill_(~mask.keep[:, None, :, None], math.nan)
    output, _ = reference.attention(query, key, value, mask=mask)
    assert torch.equal(output, expected)


def test_scores_and_weights_of_rows(query, key):
    rows = torch.tensor([3, 1])
    (block,) = reference.score_rows(query, key, mask=Causal(), query_offset=0, rows=rows)
    assert block.index.tolist() == [3, 1]
    assert block.scores.shape == block.weights.shape == (BATCH, HEADS, 2, KEY_LEN)
    seen = torch.arange(KEY_LEN) <= rows[:, None]
    assert torch.equal(block.allowed.expand_as(block.scores), seen.expand_as(block.scores))
    assert torch.equal(block.scores != -math.inf, seen.expand_as(block.scores))
    torch.testing.assert_close(block.weights.sum(-1), torch.ones_like(block.lse))
    torch.testing.assert_close((block.scores - block.lse[..., None]).exp(), block.weights)


def test_dropout_multiplies_the_weights(query, key, value):
    b, h, i, j = (torch.arange(n) for n in (BATCH, HEADS, QUERY_LEN, KEY_LEN))
    factors = keep_scale(0.4, 11, b[:, None, None, None], h[:, None, None], i[:, None], j)
    (block,) = reference.score_rows(query, key, mask=Causal())
    expected = (block.weights * factors) @ value.repeat_interleave(HEADS // KV_HEADS, dim=1)
    output, lse = reference.attention(query, key, value, mask=Causal(), dropout_p=0.4, dropout_seed=11)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(lse, block.lse)


def test_computes_in_the_dtype_asked_for(query, key, value):
    halves = [t.to(torch.bfloat16) for t in (query, key, value)]
    exact, _ = reference.attention(*halves)
    assert exact.dtype == torch.float64
    single, _ = reference.attention(*halves, dtype=torch.float32)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(exact, reference.attention(*(t.double() for t in halves))[0])


def test_empty_lengths(query, key, value):
    output, lse = reference.attention(query, key[:, :, :0], value[:, :, :0])
    assert output.shape == (BATCH, HEADS, QUERY_LEN, VALUE_DIM)
    assert not output.any()
    assert (lse == -math.inf).all()
    output, lse = reference.attention(query[:, :, :0], key, value)
    assert output.shape == (BATCH, HEADS, 0, VALUE_DIM)
    assert lse.shape == (BATCH, HEADS, 0)


def test_a_mask_that_does_not_fit_is_refused(query, key, value):
    with pytest.raises(ValueError, match=r"dense: allowed must be broadcastable to .* = \[2, 4, 5, 7\]"):
        reference.attention(query, key, value, mask=Dense(torch.ones(QUERY_LEN, KEY_LEN + 1).bool()))
    with pytest.raises(ValueError, match=r"padding: keep must have shape .* = \[2, 7\], got \[2, 8\]"):
        reference.attention(query, key, value, mask=Padding(torch.ones(BATCH, KEY_LEN + 1).bool()))


def test_gradients_of_some_rows_are_those_of_a_loss_that_reads_them_alone():
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(2, heads, 9, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2, 4)
    )
    rows = torch.tensor([1, 5, 8])
    others = torch.ones(9, dtype=torch.bool).index_fill(0, rows, False)
    expected = reference.gradients(query, key, value, grad * ~others[:, None], mask=Causal())
    with torch.no_grad():
        got = reference.gradients(query, key, value, grad[:, :, rows], mask=Causal(), rows=rows)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
