import pytest
import torch
import torch.nn.functional as F

import effattn
from effattn import Causal, Everything, Global, Window
from effattn.bench.errors import gradient_errors, output_errors, rel_l2, relative_interval, sample_rows, work
from effattn.bench.inputs import make_inputs

SCALE = 0.3


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)

    def draw(heads):
        return torch.randn(2, heads, 13, 8, generator=generator, dtype=torch.float64)

    return draw(4), draw(2), draw(2)


def weights(query, key, allowed):
    """Dense attention weights, the textbook way."""
    scores = (SCALE * query @ key.repeat_interleave(2, dim=1).mT).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0)


def outputs(query, key, value, mask):
    return weights(query, key, mask.dense(2, 4, 13, 13)) @ value.repeat_interleave(2, dim=1)


def errors(output, tensors, mask, pattern, rows=None):
    rows = torch.arange(13) if rows is None else rows
    return output_errors(output, *tensors, mask=mask, pattern=pattern, scale=SCALE, rows=rows)


def test_the_three_errors_are_told_apart(tensors):
    mask, pattern = Causal(), Causal() & Window(3, 0)
    full, kept = outputs(*tensors, mask), outputs(*tensors, pattern)
    ours = kept + 0.01 * torch.randn(kept.shape, generator=torch.Generator().manual_seed(1), dtype=kept.dtype)
    found = errors(ours, tensors, mask, pattern)
    assert found["implementation_rel_l2"] == pytest.approx(rel_l2(ours, kept))
    assert found["approximation_rel_l2"] == pytest.approx(rel_l2(kept, full))
    assert found["total_rel_l2"] == pytest.approx(rel_l2(ours, full))
    assert found["total_max_abs"] == pytest.approx(float((ours - full).abs().max()))
    cosine = (ours * full).sum() / (ours.norm() * full.norm())
    assert found["total_cosine"] == pytest.approx(float(cosine))
    assert len({round(found[f"{kind}_rel_l2"], 6) for kind in ("implementation", "approximation", "total")}) == 3


def test_recall_is_the_weight_that_the_pattern_keeps(tensors):
    mask, pattern = Causal(), Causal() & Window(3, 0)
    query, key, _ = tensors
    kept = weights(query, key, mask.dense(2, 4, 13, 13)) * pattern.dense(2, 4, 13, 13)
    found = errors(outputs(*tensors, pattern), tensors, mask, pattern)
    assert found["recall"] == pytest.approx(float(kept.sum(-1).mean()))


def test_rows_that_see_nothing_are_no_part_of_recall(tensors):
    mask = Causal() & Window(4, 0) & effattn.Padding(torch.arange(13)[None] >= 6)
    pattern = mask & Window(2, 0)
    query, key, _ = tensors
    kept = weights(query, key, mask.dense(2, 4, 13, 13)) * pattern.dense(2, 4, 13, 13)
    found = errors(outputs(*tensors, pattern), tensors, mask, pattern)
    assert found["recall"] == pytest.approx(float(kept[:, :, 6:].sum(-1).mean()))
    assert found["approximation_rel_l2"] < 1


def test_the_oracle_keeps_as_many_keys_as_the_pattern_those_with_the_largest_weights(tensors):
    mask, pattern = Causal(), (Causal() & Window(1, 0)) | Global((5,)) & Causal()
    query, key, value = tensors
    full = weights(query, key, mask.dense(2, 4, 13, 13))
    budget = pattern.dense(2, 4, 13, 13).sum(-1)
    best = torch.zeros_like(full)
    for where in torch.cartesian_prod(*(torch.arange(n) for n in (2, 4, 13))).tolist():
        b, h, r = where
        largest = full[b, h, r].argsort(descending=True)[: budget[b, h, r]]
        best[b, h, r, largest] = full[b, h, r, largest] / full[b, h, r, largest].sum()
    value = value.repeat_interleave(2, dim=1)
    found = errors(outputs(*tensors, pattern), tensors, mask, pattern)
    assert found["oracle_rel_l2"] == pytest.approx(rel_l2(best @ value, full @ value))
    assert 0 < found["oracle_rel_l2"] < found["approximation_rel_l2"]


@pytest.mark.parametrize("mask", [Causal(), Everything()])
def test_an_exact_pattern_approximates_nothing(tensors, mask):
    found = errors(outputs(*tensors, mask), tensors, mask, mask)
    assert found["approximation_rel_l2"] == found["oracle_rel_l2"] == 0.0
    assert found["recall"] == 1.0
    assert found["implementation_rel_l2"] == found["total_rel_l2"] < 1e-14
    assert work(tensors[0], 13, mask=mask, pattern=mask, rows=torch.arange(13)).density == 1.0


def test_a_pattern_that_only_happens_to_keep_everything_has_no_error_either(tensors):
    found = errors(outputs(*tensors, Causal()), tensors, Causal(), Causal() & Window(99, 0))
    assert found["approximation_rel_l2"] < 1e-15
    assert found["oracle_rel_l2"] < 1e-15
    assert found["recall"] == pytest.approx(1.0)


def test_a_pattern_that_keeps_nothing_has_all_of_the_error(tensors):
    nothing = Causal() & Window(None, None) & effattn.Dense(torch.zeros(1, 1, 13, 13, dtype=torch.bool))
    found = errors(torch.zeros(2, 4, 13, 8), tensors, Causal(), nothing)
    assert found["approximation_rel_l2"] == found["oracle_rel_l2"] == found["total_rel_l2"] == 1.0
    assert found["implementation_rel_l2"] == 0.0
    assert found["recall"] == 0.0


def test_sampled_rows_give_the_errors_of_those_rows(tensors):
    rows, pattern = torch.tensor([2, 7, 12]), Causal() & Window(3, 0)
    full, kept = outputs(*tensors, Causal()), outputs(*tensors, pattern)
    found = errors(kept, tensors, Causal(), pattern, rows)
    assert found["approximation_rel_l2"] == pytest.approx(rel_l2(kept[:, :, rows], full[:, :, rows]))


@pytest.mark.parametrize("kind", ["gaussian", "clustered", "heavy_tailed"])
@pytest.mark.parametrize("left", [4, 32, 128])
def test_the_oracle_is_never_worse_than_a_window(kind, left):
    inputs = make_inputs(
        kind,
        batch_size=1,
        num_heads=2,
        num_kv_heads=1,
        seq_len=512,
        head_dim=16,
        dtype=torch.float32,
        device="cpu",
        seed=0,
    )
    tensors = inputs.query, inputs.key, inputs.value
    backend = effattn.get("sliding_window", left=left)
    pattern = effattn.pattern(*tensors[:2], backend=backend, mask=Causal())
    found = output_errors(
        effattn.attention(*tensors, backend=backend, mask=Causal(), scale=inputs.scale),
        *tensors,
        mask=Causal(),
        pattern=pattern,
        scale=inputs.scale,
        rows=sample_rows(512, 64, 0),
    )
    assert found["oracle_rel_l2"] <= found["approximation_rel_l2"]
    assert found["implementation_rel_l2"] < 1e-6


def test_an_output_that_is_not_finite_is_no_measurement(tensors):
    output = outputs(*tensors, Causal())
    output[0, 0, 12, :3] = torch.nan
    with pytest.raises(ArithmeticError, match="3 of 832 sampled values of the output are NaN or infinite"):
        errors(output, tensors, Causal(), Causal())
    errors(output, tensors, Causal(), Causal(), rows=torch.arange(12))


def gradients(tensors, grad_output, mask):
    leaves = [t.clone().requires_grad_() for t in tensors]
    q, k, v = leaves
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense(2, 4, 13, 13), scale=SCALE, enable_gqa=True)
    return torch.autograd.grad(out, leaves, grad_output)


def test_gradient_errors_are_told_apart_too(tensors):
    mask, pattern = Causal(), Causal() & Window(3, 0)
    grad_output = torch.randn(2, 4, 13, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    full, kept = gradients(tensors, grad_output, mask), gradients(tensors, grad_output, pattern)
    ours = tuple(grad * 1.01 for grad in kept)
    found = gradient_errors(ours, *tensors, grad_output, mask=mask, pattern=pattern, scale=SCALE)

    def flat(grads):
        return torch.cat([grad.flatten() for grad in grads])

    assert found["grad_implementation_rel_l2"] == pytest.approx(0.01)
    assert found["grad_approximation_rel_l2"] == pytest.approx(rel_l2(flat(kept), flat(full)))
    assert found["grad_total_rel_l2"] == pytest.approx(rel_l2(flat(ours), flat(full)))
    exact = gradient_errors(full, *tensors, grad_output, mask=mask, pattern=mask, scale=SCALE)
    assert exact["grad_approximation_rel_l2"] == 0.0
    assert exact["grad_total_rel_l2"] < 1e-14


def test_gradients_that_are_not_finite_are_no_measurement(tensors):
    grads = tuple(torch.full_like(t, torch.inf) for t in tensors)
    with pytest.raises(ArithmeticError, match="gradients are NaN or infinite"):
        gradient_errors(grads, *tensors, tensors[0], mask=Causal(), pattern=Causal(), scale=SCALE)


@pytest.mark.parametrize(("query_len", "num_rows"), [(1, 4), (7, 7), (100, 8), (1000, 256), (257, 256)])
def test_rows_are_spread_and_the_last_is_among_them(query_len, num_rows):
    rows = sample_rows(query_len, num_rows, seed=3)
    assert len(rows) == min(query_len, num_rows)
    assert rows.unique().equal(rows)
    assert int(rows[-1]) == query_len - 1
    assert int(rows[0]) >= 0
    assert int(rows.diff().max() if len(rows) > 1 else 1) < 2 * -(-query_len // num_rows)


def test_rows_follow_the_seed():
    assert sample_rows(1000, 8, 0).equal(sample_rows(1000, 8, 0))
    assert not sample_rows(1000, 8, 0).equal(sample_rows(1000, 8, 1))


def test_work_is_counted_from_the_pattern(tensors):
    mask, pattern = Causal(), Causal() & Window(3, 0)
    found = work(tensors[0], 13, mask=mask, pattern=pattern, rows=torch.arange(13))
    kept, allowed = (int(m.dense(2, 4, 13, 13).sum()) for m in (pattern, mask))
    assert found.density == kept / allowed
    assert found.pairs == pytest.approx(kept)
    assert found.keys_per_query == pytest.approx(kept / (2 * 4 * 13))


def test_the_error_of_nothing_against_nothing_is_zero():
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert rel_l2(zeros, zeros) == 0.0
    assert rel_l2(ones, zeros) == float("inf")
    assert rel_l2(zeros, ones) == 1.0


def test_without_a_pattern_only_the_total_error_is_known(tensors):
    full = outputs(*tensors, Causal())
    found = errors(full + 0.1, tensors, Causal(), None)
    assert found.keys() == {"total_rel_l2", "total_rel_l2_low", "total_rel_l2_high", "total_cosine", "total_max_abs"}
    assert found["total_rel_l2"] == pytest.approx(rel_l2(full + 0.1, full))
    assert found["total_max_abs"] == pytest.approx(0.1)
    grads = tuple(torch.zeros_like(tensor) for tensor in tensors)
    grad_output = torch.ones_like(full)
    found = gradient_errors(grads, *tensors, grad_output, mask=Causal(), pattern=None, scale=SCALE)
    assert found == {"grad_total_rel_l2": pytest.approx(1.0)}


def test_the_interval_holds_as_often_as_it_says():
    """Of a ratio whose rows differ by orders of magnitude, as those of hashed attention do."""
    generator = torch.Generator().manual_seed(0)
    norms = 1 + torch.rand(2000, dtype=torch.float64, generator=generator)
    position = torch.linspace(0, 2, 2000, dtype=torch.float64)
    squares = norms * (1.2 * torch.randn(2000, dtype=torch.float64, generator=generator) + position).exp()
    exact = (squares.sum() / norms.sum()).sqrt()
    held = 0
    for seed in range(400):
        rows = sample_rows(2000, 128, seed)
        low, high = relative_interval(squares[rows], norms[rows], 2000)
        held += bool(low <= exact <= high)
    assert 0.88 <= held / 400 <= 0.98  # of the 95%, heavy tails cost some


def test_the_interval_is_exact_where_all_rows_are_known_and_unknown_for_two():
    squares, norms = torch.rand(2, 3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    low, high = relative_interval(squares, norms, 10)
    assert torch.equal(low, high)
    torch.testing.assert_close(low, (squares.sum(-1) / norms.sum(-1)).sqrt())
    low, high = relative_interval(squares[:, :2], norms[:, :2], 10)
    assert low.isnan().all()
    assert high.isnan().all()
    low, high = relative_interval(torch.zeros(3, 5), norms[:, :5], 10)
    assert not low.any()
    assert not high.any()


def test_the_interval_stands_in_the_record(tensors):
    mask, pattern = Causal(), Causal() & Window(3, 0)
    ours, rows = outputs(*tensors, pattern), torch.tensor([0, 4, 6, 9, 12])
    found = errors(ours, tensors, mask, pattern, rows)
    for kind in ("approximation", "total"):
        assert found[f"{kind}_rel_l2_low"] < found[f"{kind}_rel_l2"] < found[f"{kind}_rel_l2_high"]
    assert errors(ours, tensors, mask, pattern, rows[:2])["total_rel_l2_low"] is None
    assert errors(outputs(*tensors, mask), tensors, mask, mask, rows)["approximation_rel_l2_high"] == 0
