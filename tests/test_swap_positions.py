"""Longer position tables and slower rotary angles: the old positions stay, the new ones are there."""

import copy

import pytest
import torch
import transformers

import effattn
import effattn.swap
from effattn.swap import extend_positions

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
BART_SIZES = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
LEARNED = {  # all read 64 tokens
    "bert": ("BertForMaskedLM", "BertConfig", {**SIZES, "max_position_embeddings": 64}),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**SIZES, "max_position_embeddings": 66, "pad_token_id": 1}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": 2},
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**SIZES, "ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART_SIZES),
}
ROTARY = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "max_position_embeddings": 64}),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**SIZES, "max_position_embeddings": 64}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**SIZES, "num_hidden_layers": 6, "max_position_embeddings": 64, "head_dim": 8, "num_key_value_heads": 2},
    ),
}


def make(name):
    model_class, config_class, sizes = {**LEARNED, **ROTARY}[name]
    torch.manual_seed(0)
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes)).eval()


def tokens(count):
    return torch.randint(3, 99, (1, count), generator=torch.Generator().manual_seed(0))


def read(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("name", LEARNED)
def test_tiling_keeps_what_the_model_did_and_lets_it_read_on(name):
    model, short = make(name), tokens(64)
    want = read(model, short)
    assert extend_positions(model, 200, "tile") is model
    assert torch.equal(read(model, short), want)
    with effattn.swap(model, "sliding_window(left=8, right=8)"):
        assert read(model, tokens(200)).isfinite().all()
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        read(model, tokens(201))


@pytest.mark.parametrize("name", LEARNED)
def test_every_other_weight_stays_and_the_model_can_be_saved(name, tmp_path):
    model = make(name)
    before = copy.deepcopy(model.state_dict())
    extend_positions(model, 200)
    changed = [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]
    tables = [key for key in changed if any(part in key for part in ("position_embeddings", "wpe", "embed_positions"))]
    assert changed == tables
    assert 1 <= len(changed) <= 2
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(read(again, tokens(200)), read(model, tokens(200)))


def test_rows_that_stand_for_no_position_stay_where_they_are():
    model = make("roberta")
    table = model.roberta.embeddings.position_embeddings
    old = table.weight.detach().clone()
    extend_positions(model, 150)
    assert table.weight.shape == (152, 32)
    assert table.num_embeddings == model.config.max_position_embeddings == 152
    assert torch.equal(table.weight[:66], old)
    assert torch.equal(table.weight[66:130], old[2:])


def test_interpolation_stretches_between_the_first_and_the_last_row():
    model = make("bert")
    old = model.bert.embeddings.position_embeddings.weight.detach().clone()
    extend_positions(model, 127, "interpolate")  # every second row is an old one
    new = model.bert.embeddings.position_embeddings.weight
    torch.testing.assert_close(new[::2], old)
    torch.testing.assert_close(new[1], (old[0] + old[1]) / 2)


def test_dtype_and_what_is_trained_are_kept():
    model = make("bert").bfloat16()
    model.bert.embeddings.position_embeddings.requires_grad_(False)
    extend_positions(model, 100, "interpolate")
    weight = model.bert.embeddings.position_embeddings.weight
    assert weight.dtype == torch.bfloat16
    assert not weight.requires_grad
    assert model.bert.embeddings.token_type_ids.shape == model.bert.embeddings.position_ids.shape == (1, 100)


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_positions_are_scaled_with_yarn(name, tmp_path):
    model = make(name)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    short = read(model, tokens(20))
    extend_positions(model, 256, "rope_scaling")
    parameters = model.config.rope_parameters
    parameters = parameters.get("full_attention", parameters)
    assert model.config.max_position_embeddings == 256
    assert (parameters["rope_type"], parameters["factor"]) == ("yarn", 4.0)
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert not torch.equal(read(model, tokens(20)), short)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(read(again, tokens(200)), read(model, tokens(200)))


def test_as_many_positions_as_before_change_nothing():
    for name, method in (("bert", "tile"), ("llama", "rope_scaling")):
        model = make(name)
        want = read(model, tokens(30))
        extend_positions(model, 64, method)
        assert torch.equal(read(model, tokens(30)), want)


@pytest.mark.parametrize(
    ("name", "max_len", "method", "message"),
    [
        ("bert", 63, "tile", "max_len must be at least the 64 that BertForMaskedLM has, got 63"),
        ("llama", 63, "rope_scaling", "max_len must be at least the 64 that LlamaForCausalLM has, got 63"),
        (
            "bert",
            128,
            "rope_scaling",
            "'rope_scaling' does not fit BertForMaskedLM, which has a learned table; use tile",
        ),
        ("llama", 128, "tile", "'tile' does not fit LlamaForCausalLM, which has rotary positions; use rope_scaling"),
        ("bert", 128, "stretch", "method must be one of tile, interpolate, rope_scaling, got 'stretch'"),
        ("bert", 12.5, "tile", "max_len must be an integer >= 1, got 12.5"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(name, max_len, method, message):
    model = make(name)
    want = read(model, tokens(30))
    with pytest.raises(ValueError, match=message):
        extend_positions(model, max_len, method)
    assert torch.equal(read(model, tokens(30)), want)


def test_models_without_an_end_and_models_scaled_already_are_named():
    t5 = transformers.T5Model(
        transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    )
    with pytest.raises(ValueError, match="T5Model has neither a learned table of positions nor rotary ones"):
        extend_positions(t5, 128)
    model = extend_positions(make("llama"), 128, "rope_scaling")
    with pytest.raises(ValueError, match="scaled already, rope_type 'yarn'"):
        extend_positions(model, 256, "rope_scaling")
