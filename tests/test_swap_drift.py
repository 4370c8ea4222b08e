"""What a swap changes, measured: zero where nothing changes, and what was put in where something does."""

import pytest
import torch
import transformers
from torch import nn

import effattn
import effattn.swap

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}


def make(kind="BertForMaskedLM", config="BertConfig", **sizes):
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**{**SIZES, **sizes})).eval()


def inputs():
    ids = torch.randint(3, 99, (2, 20), generator=torch.Generator().manual_seed(0))
    keep = torch.ones_like(ids)
    keep[0, 12:] = 0
    return {"input_ids": ids, "attention_mask": keep}


def test_it_reports_what_the_two_runs_differ_by():
    model, given = make(), inputs()
    backend = "sliding_window(left=2, right=2)"
    comparison = effattn.swap.compare(model, given, backend)
    keep = given["attention_mask"].bool()
    with torch.no_grad():
        want = model(**given, output_hidden_states=True)
        with effattn.swap(model, backend):
            got = model(**given, output_hidden_states=True)
    assert [drift.path for drift in comparison.layers] == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    pairs = [*zip(got.hidden_states[1:], want.hidden_states[1:], strict=True), (got.logits, want.logits)]
    for drift, (ours, theirs) in zip((*comparison.layers, comparison.output), pairs, strict=True):
        ours, theirs = ours[keep].double().flatten(), theirs[keep].double().flatten()
        assert drift.rel_l2 == pytest.approx(float((ours - theirs).norm() / theirs.norm()))
        assert drift.cosine == pytest.approx(float(ours @ theirs / ours.norm() / theirs.norm()))
        assert drift.rel_l2 > 1e-4
    same = got.logits.argmax(-1) == want.logits.argmax(-1)
    assert comparison.top_token_agreement == pytest.approx(float(same[keep].double().mean()))
    assert comparison.swap.sites[0].calls == 1
    assert comparison.output.path == "logits"


def test_an_exact_backend_does_not_drift():
    comparison = effattn.swap.compare(make(), inputs(), "chunked")
    assert all(drift.rel_l2 < 1e-6 and drift.cosine > 1 - 1e-9 for drift in (*comparison.layers, comparison.output))
    assert comparison.top_token_agreement == 1.0


def test_drift_begins_at_the_layer_that_was_swapped():
    comparison = effattn.swap.compare(make(), inputs(), "sliding_window(left=1, right=1)", layers=[1])
    assert comparison.layers[0].rel_l2 == 0.0
    assert comparison.layers[1].rel_l2 > 1e-4


def test_tensors_tuples_and_models_without_logits():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(2, 9, 32)
    for given in (x, (x, None)):
        comparison = effattn.swap.compare(encoder, given, "sliding_window(left=1, right=1)")
        assert comparison.output.rel_l2 > 1e-3
        assert 0 < comparison.top_token_agreement < 1
        assert str(comparison).splitlines()[-1].startswith("largest entry unchanged: ")
    model = make("BertModel")
    comparison = effattn.swap.compare(model, inputs(), "sliding_window(left=1, right=1)")
    assert comparison.top_token_agreement is None
    assert comparison.output.path == "output"


def test_encoder_and_decoder_are_each_read_with_their_own_mask():
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    given = inputs()
    given |= {"decoder_input_ids": given["input_ids"], "decoder_attention_mask": given["attention_mask"].flip(0)}
    comparison = effattn.swap.compare(model, given, "chunked")
    assert [drift.path for drift in comparison.layers] == ["encoder.block.0", "decoder.block.0"]
    assert all(drift.rel_l2 < 1e-6 for drift in comparison.layers)


def test_it_prints_as_a_table():
    lines = str(effattn.swap.compare(make(), inputs(), "full")).splitlines()
    assert lines[0].split() == ["rel_l2", "cosine"]
    assert lines[1].split()[0] == "bert.encoder.layer.0"
    assert lines[-2].split()[0] == "logits"
    assert lines[-1] == "top token unchanged: 100.00%"


def test_a_model_in_training_is_refused_and_the_model_is_left_as_it_was():
    model = make()
    with pytest.raises(ValueError, match="model must be in evaluation mode"):
        effattn.swap.compare(model.train(), inputs(), "full")
    effattn.swap.compare(model.eval(), inputs(), "full")
    assert not any(module._forward_hooks for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
