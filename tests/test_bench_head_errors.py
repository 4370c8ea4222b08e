"""Errors of each head against full attention, here computed again the textbook way; and on a real model."""

import pytest
import torch

import effattn
from effattn.bench import capture
from effattn.bench.capture import CaptureSource, LayerInputs
from effattn.bench.errors import sample_rows
from effattn.bench.head_errors import POSITION_BINS, FullRows

WINDOW = "sliding_window(left=5, right=0)"


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 40, 8, generator=generator) for heads in (4, 2, 2))
    return LayerInputs(layer=3, query=2 * query, key=key, value=value, scale=0.4)


def textbook(inputs, left=None):
    """Weights and output of causal attention, to ``left`` keys before at most, in float64."""
    query, key, value = (x.double() for x in (inputs.query, inputs.key, inputs.value))
    distance = torch.arange(40)[:, None] - torch.arange(40)
    hidden = (distance < 0) | (distance > (40 if left is None else left))
    scores = (inputs.scale * query @ key.repeat_interleave(2, 1).mT).masked_fill(hidden, -torch.inf)
    weights = scores.softmax(-1)
    return weights, weights @ value.repeat_interleave(2, 1), ~hidden


def test_every_measure_of_a_window(inputs):
    full = FullRows.of(inputs, 16, seed=0, gradients=False)
    found = full.errors_of(effattn.get(WINDOW))
    rows = sample_rows(40, 16, 0)
    (weights, want, causal), (_, got, seen) = textbook(inputs), textbook(inputs, left=5)
    off, want, got = (x[0, :, rows] for x in (got - want, want, got))
    squared, norm = off.square().sum(-1), want.square().sum(-1)
    close = {"rel": 1e-4}
    assert found["rel_l2"] == pytest.approx(float((squared.sum() / norm.sum()).sqrt()), **close)
    assert found["rel_l2_by_head"] == pytest.approx((squared.sum(1) / norm.sum(1)).sqrt().tolist(), **close)
    assert found["approximation_rel_l2"] == pytest.approx(found["rel_l2"], **close)
    assert found["implementation_rel_l2"] < 1e-5
    assert found["rel_l1"] == pytest.approx(float(off.abs().sum() / want.abs().sum()), **close)
    assert found["rmse_by_head"] == pytest.approx(off.square().mean((1, 2)).sqrt().tolist(), **close)
    cosine = (got * want).sum((1, 2)) / (got.square().sum((1, 2)) * want.square().sum((1, 2))).sqrt()
    assert found["cosine_by_head"] == pytest.approx(cosine.tolist(), **close)
    assert found["worst_row_rel_l2"] == pytest.approx(float((squared / norm).max().sqrt()), **close)
    assert found["rel_l2_low"] < found["rel_l2"] < found["rel_l2_high"]
    recall = (weights * seen)[0, :, rows].sum(-1).mean(-1)
    assert found["recall_by_head"] == pytest.approx(recall.tolist(), **close)
    assert found["density"] == pytest.approx(float((seen & causal)[rows].sum() / causal[rows].sum()))


def test_the_oracle_keeps_the_largest_weights(inputs):
    found = FullRows.of(inputs, 40, seed=0, gradients=False).errors_of(effattn.get(WINDOW))
    weights, want, _ = textbook(inputs)
    count = torch.arange(1, 41).clamp(max=6)
    rank = weights.argsort(-1, descending=True).argsort(-1)
    best = weights * (rank < count[:, None])
    output = best / best.sum(-1, keepdim=True) @ inputs.value.double().repeat_interleave(2, 1)
    assert found["oracle_rel_l2"] == pytest.approx(float((output - want).norm() / want.norm()), rel=1e-6)
    assert 0 < found["oracle_rel_l2"] < found["approximation_rel_l2"]


def test_gradients_are_those_of_a_loss_of_the_sampled_rows(inputs):
    full = FullRows.of(inputs, 16, seed=0, gradients=True)
    found = full.errors_of(effattn.get(WINDOW))

    def grads(left):
        leaves = [x.double().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
        _, output, _ = textbook(LayerInputs(0, *leaves, inputs.scale), left)
        return torch.autograd.grad(output[:, :, full.rows], leaves, full.grad_output.double())

    for name, got, want in zip(("query", "key", "value"), grads(5), grads(None), strict=True):
        assert found[f"grad_{name}_rel_l2"] == pytest.approx(float((got - want).norm() / want.norm()), rel=1e-4)
        by_head = (got - want).square().sum((0, 2, 3)) / want.square().sum((0, 2, 3))
        assert found[f"grad_{name}_rel_l2_by_head"] == pytest.approx(by_head.sqrt().tolist(), rel=1e-4)


@pytest.mark.parametrize("spec", ["sdpa", "chunked"])
def test_exact_backends_err_by_rounding(inputs, spec):
    found = FullRows.of(inputs, 16, seed=0, gradients=True).errors_of(effattn.get(spec))
    assert 0 < found["rel_l2"] < 1e-5
    assert found["density"] == 1
    assert found["recall_by_head"] == [1.0] * 4
    assert found["approximation_rel_l2"] == found["oracle_rel_l2"] == 0
    assert max(found["grad_query_rel_l2"], found["grad_key_rel_l2"], found["grad_value_rel_l2"]) < 1e-5


def test_error_by_position(inputs):
    found = FullRows.of(inputs, 40, seed=0, gradients=False).errors_of(effattn.get(WINDOW))
    by_position = found["rel_l2_by_position"]
    assert len(by_position) == POSITION_BINS
    assert by_position[0] < 1e-5  # six rows are whole, and two and a half make a bin
    assert min(by_position[3:]) > 1e-3
    few = FullRows.of(inputs, 8, seed=0, gradients=False).errors_of(effattn.get(WINDOW))
    assert few["rel_l2_by_position"].count(None) >= 8


def test_duplicates_that_count_are_part_of_the_reference(inputs):
    shared = LayerInputs(0, inputs.query[:, ::2], inputs.query[:, ::2] / 3, inputs.value, inputs.scale)
    backend = effattn.get("lsh(bucket_size=4, shared_qk=True, count='per_round')")
    found = FullRows.of(shared, 40, seed=0, gradients=False).errors_of(backend)
    assert found["implementation_rel_l2"] < 1e-5 < found["rel_l2"]


def test_a_broken_output_is_an_error(inputs):
    broken = LayerInputs(0, inputs.query, inputs.key, inputs.value.clone(), inputs.scale)
    full = FullRows.of(broken, 40, seed=0, gradients=False)
    broken.value[0, 1, 7] = torch.nan
    with pytest.raises(ArithmeticError, match="of 1280 sampled values of the output are NaN or infinite"):
        full.errors_of(effattn.get("sdpa"))


def test_sampled_errors_agree_with_exact_ones_on_a_real_model(smollm2):
    """SmolLM2, 2048 tokens: the interval of 128 rows holds the error of all rows for most heads and samples."""
    backends = [effattn.get(s) for s in ("sliding_window", "lsh(num_hashes=3, hashing='anchors', local=True, sinks=4)")]
    held: list[bool] = []

    def visit(layer):
        some = (layer.query[:, :3], layer.key[:, :1], layer.value[:, :1])  # a group of heads is enough
        inputs = LayerInputs(layer.layer, *some, layer.scale)
        everything = FullRows.of(inputs, 2048, seed=0, gradients=False)
        exact = [everything.errors_of(backend) for backend in backends]
        for seed in range(8):
            sample = FullRows.of(inputs, 128, seed=seed, gradients=False)
            for backend, of_all in zip(backends, exact, strict=True):
                found = sample.errors_of(backend)
                assert of_all["rel_l2_low"] == of_all["rel_l2"] == of_all["rel_l2_high"]
                triples = zip(
                    found["rel_l2_low_by_head"], of_all["rel_l2_by_head"], found["rel_l2_high_by_head"], strict=True
                )
                held.extend(low <= error <= high for low, error, high in triples)

    capture.stream(CaptureSource(), 2048, visit, layers=(15,), loaded=smollm2[:2])
    assert len(held) == 8 * 2 * 3
    assert sum(held) / len(held) >= 0.88
