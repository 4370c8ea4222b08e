"""BERT- and GPT-style models: padding and packing change nothing, and what they refuse."""

import dataclasses

import pytest
import torch

from effattn import Documents, Window
from effattn.nn import (
    Bert,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    Cache,
    GPTConfig,
    GPTForCausalLM,
    GPTForSequenceClassification,
    set_backend,
)

POSITIONS = ("learned", "sinusoidal", "rotary", "alibi")
SIZES = {"vocab_size": 50, "d_model": 32, "num_layers": 2, "num_heads": 4, "max_len": 30, "num_labels": 3}
BERTS, GPTS = (BertForMaskedLM, BertForSequenceClassification), (GPTForCausalLM, GPTForSequenceClassification)
IDS = torch.randint(50, (2, 15), generator=torch.Generator().manual_seed(0))


def build(kind, **options):
    torch.manual_seed(0)
    config = BertConfig if kind in (Bert, *BERTS) else GPTConfig
    model = kind(config(**{"backend": "full", **SIZES, **options})).eval()
    for parameter in model.parameters():  # larger than at the start, so that a mistake shows
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("kind", [*BERTS, *GPTS])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(kind, positions, side):
    model = build(kind, positions=positions)
    whole = model(IDS[1:])
    junk = torch.full((2, 6), 7)
    ids = torch.cat([junk, IDS] if side == "left" else [IDS, junk], dim=1)
    keep = torch.cat([junk * 0, IDS * 0 + 1] if side == "left" else [IDS * 0 + 1, junk * 0], dim=1)
    keep[0] = 1  # beside a row of other length
    padded = model(ids, keep)[1:]
    if kind in (BertForMaskedLM, GPTForCausalLM):
        padded = padded[:, 6:] if side == "left" else padded[:, :15]
    assert whole.std() > 0.1
    torch.testing.assert_close(padded, whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("positions", POSITIONS)
def test_positions_matter(positions):
    """Without them a bidirectional model sees a bag of tokens: the same states, permuted."""
    model = build(Bert, positions=positions)
    order = torch.randperm(15, generator=torch.Generator().manual_seed(1))
    assert (model(IDS[:, order]) - model(IDS)[:, order]).abs().max() > 0.1


def test_gpt_never_looks_ahead_and_bert_does():
    changed = IDS.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 50
    gpt, bert = build(GPTForCausalLM), build(BertForMaskedLM)
    torch.testing.assert_close(gpt(IDS)[:, :10], gpt(changed)[:, :10])
    assert (bert(IDS)[:, 0] - bert(changed)[:, 0]).abs().max() > 1e-3


def test_a_mask_narrows_what_is_seen():
    near = (torch.arange(15)[:, None] - torch.arange(15)).abs() <= 2
    keep = torch.arange(15) >= torch.tensor([[0], [5]])
    for kind in (BertForMaskedLM, GPTForCausalLM):
        got = [build(kind)(IDS, keep, mask=mask) for mask in (Window(2, 2), near)]
        got.append(build(kind, backend="sliding_window(left=2, right=2)")(IDS, keep))
        for other in got[1:]:
            torch.testing.assert_close(got[0], other, atol=2e-5, rtol=1e-4)


def test_packed_documents_equal_each_alone():
    model = build(GPTForCausalLM)
    ids, position_ids = torch.tensor([[0] * 6 + [1] * 9]), torch.cat([torch.arange(6), torch.arange(9)])[None]
    packed = model(IDS[:1], mask=Documents(ids), position_ids=position_ids)
    torch.testing.assert_close(packed[:, 6:], model(IDS[:1, 6:]), atol=2e-5, rtol=1e-4)


def test_segments_are_0_unless_given():
    model = build(Bert)
    segments = torch.zeros_like(IDS)
    assert torch.equal(model(IDS), model(IDS, None, segments))
    segments[0, 3] = 1
    assert not torch.equal(model(IDS)[0], model(IDS, None, segments)[0])


@pytest.mark.parametrize("backend", ["sdpa", "chunked", "sliding_window(left=20, right=20)"])
@pytest.mark.parametrize("kind", [BertForMaskedLM, GPTForCausalLM])
def test_exact_backends_agree(kind, backend):
    keep = torch.arange(15) >= torch.tensor([[0], [5]])
    model = build(kind)
    expected = model(IDS, keep)
    set_backend(model, backend)
    torch.testing.assert_close(model(IDS, keep), expected, atol=2e-5, rtol=1e-4)
    set_backend(model, "sliding_window(left=2, right=2)")
    assert (model(IDS, keep) - expected).abs().max() > 1e-2


def test_grouped_heads_have_fewer_weights():
    few, many = (sum(p.numel() for p in build(GPTForCausalLM, num_kv_heads=n).parameters()) for n in (1, 4))
    assert many - few == 2 * 2 * (32 * 24 + 24)


def test_the_first_layers_state_is_of_the_size_that_gpt2_begins_with():
    torch.manual_seed(0)
    model = GPTForCausalLM(GPTConfig(**SIZES | {"d_model": 128}))
    layer = model.gpt.layers[0]
    assert layer.attention.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.feed_forward.down.weight.std().item() == pytest.approx(0.01, rel=0.05)  # 0.02 / sqrt(2 * 2)
    assert (layer.attention.q_proj.bias == 0).all()


def test_lengths_and_batches_that_are_empty():
    for kind in (BertForMaskedLM, GPTForCausalLM):
        model = build(kind)
        assert model(IDS[:0]).shape == (0, 15, 50)
        assert model(IDS[:, :0]).shape == (2, 0, 50)
        assert model(IDS[:, :1]).shape == (2, 1, 50)


def test_rows_of_nothing_but_padding_are_finite():
    keep = torch.ones_like(IDS)
    keep[1] = 0
    for kind in (*BERTS, *GPTS):
        model = build(kind)
        output = model(IDS, keep)
        assert output.isfinite().all()
        output.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_only_the_learned_table_has_an_end():
    ids = IDS.repeat(1, 3)
    for positions in POSITIONS[1:]:
        assert build(GPTForCausalLM, positions=positions)(ids).isfinite().all()
    with pytest.raises(ValueError, match=r"the table has rows for 0..29, got position 44"):
        build(GPTForCausalLM)(ids)
    keep = torch.arange(45) >= 20  # 25 real tokens
    assert build(GPTForCausalLM)(ids, keep.expand(2, -1)).isfinite().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GPTConfig(num_layers=0), "num_layers must be an integer >= 1, got 0"),
        (lambda: GPTConfig(dropout=2), r"dropout must lie in 0..1, got 2"),
        (lambda: BertConfig(positions="none"), "positions must be one of learned, .* got 'none'"),
        (lambda: BertConfig(activation="tanh"), "activation must be one of gelu, .* got 'tanh'"),
        (lambda: BertConfig(d_ff=0), "d_ff must be an integer >= 1, got 0"),
        (lambda: build(GPTForCausalLM, d_model=30), "d_model must be a multiple of num_heads = 4, got 30"),
        (lambda: build(GPTForCausalLM, positions="rotary", d_model=36), "head_dim must be even.* got 9"),
        (lambda: build(BertForMaskedLM)(IDS + 1), r"bert: input_ids must lie in 0..49, got 50"),
        (lambda: build(GPTForCausalLM)(IDS - 50), r"gpt: input_ids must lie in 0..49, got -"),
        (
            lambda: build(GPTForCausalLM)(IDS[0]),
            r"gpt: input_ids must be integers \[batch, seq\], got torch.int64\[15\]",
        ),
        (lambda: build(GPTForCausalLM)(IDS.float()), r"input_ids must be integers \[batch, seq\], got torch.float32"),
        (lambda: build(BertForMaskedLM)(IDS, None, IDS), r"token_type_ids must lie in 0..1, got"),
        (lambda: build(BertForMaskedLM)(IDS, IDS), "padding: keep must hold only 0 and 1"),
        (
            lambda: build(BertForMaskedLM)(IDS, torch.ones(2, 9) > 0),
            r"padding: keep must have shape \[batch, key_len\] = \[2, 15\], got \[2, 9\]",
        ),
        (
            lambda: build(GPTForCausalLM)(IDS, position_ids=IDS[:, :3]),
            r"position_ids must have the shape of input_ids \[2, 15\], got \[2, 3\]",
        ),
        (lambda: build(GPTForCausalLM)(IDS, mask=IDS), r"mask must be a Mask, .* got torch.int64"),
        (lambda: build(GPTForCausalLM)(IDS, cache=Cache(3)), "the cache must be of 2 layers, got 3"),
        (lambda: BertConfig(backend="nothing"), "unknown name 'nothing'"),
        (lambda: build(Bert).pool(torch.zeros(2, 3, 32)), r"no pooler; build it with BertConfig\(pooler=True\)"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_config_is_plain_data():
    config = GPTConfig(backend="lsh(num_hashes=2)")
    assert GPTConfig(**dataclasses.asdict(config)) == config
    assert (GPTConfig().inner, GPTConfig(d_ff=5).inner) == (3072, 5)
