"""Hugging Face models of random small weights: what they ask for reaches the backend, and nothing else does."""

import copy

import pytest
import torch
import transformers
from transformers import masking_utils

import effattn
import effattn.swap
from effattn import Capabilities, Causal, Dense, Documents, Padding, UnsupportedError, Window
from effattn.backends.full import Full
from effattn.swap import hugging_face

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
T5_SIZES = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
GPT2_SIZES = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = {
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2_SIZES),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "num_key_value_heads": 2}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SIZES, "num_key_value_heads": 2, "sliding_window": 7}),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**SIZES, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5_SIZES),
    "chunked": (  # Llama 4 alternates chunks of positions with plain causal attention
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **SIZES,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "attention_chunk_size": 6,
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            "num_hidden_layers": 4,
        },
    ),
    "hybrid": (  # Gemma 3 alternates windows with plain causal attention, each with a cache of its own kind
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5, "num_hidden_layers": 6},
    ),
}
DECODERS = ["gpt2", "llama", "mistral", "chunked", "hybrid", "t5"]
WHOLE = "sliding_window(left=64, right=64)"  # a window as long as any text here
EXACT = ["full", "sdpa", "chunked", WHOLE]


def make(name, implementation="sdpa", **changes):
    model_class, config_class, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**sizes, **changes})
    config._attn_implementation = implementation
    return getattr(transformers, model_class)(config).eval()


def inputs(name, batch_size=3, seq_len=23):
    """Unpadded, padded on the left, padded on the right."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 99, (batch_size, seq_len), generator=generator)
    keep = torch.ones_like(ids)
    keep[1:2, :5] = 0
    keep[2:3, 17:] = 0
    given = {"input_ids": ids, "attention_mask": keep}
    if name == "t5":
        given["decoder_input_ids"] = ids[:, :9]
    return given


def logits(model, given):
    """Of the real tokens only."""
    with torch.no_grad():
        got = model(**given).logits
    keep = given.get("attention_mask")
    return got[keep.bool()] if keep is not None and keep.shape == got.shape[:2] else got


def state_of(model):
    """All that a swap may touch: attributes of modules, and configurations."""
    modules = {path: dict(vars(module)) for path, module in model.named_modules()}
    configs = {path: dict(vars(m.config)) for path, m in model.named_modules() if hasattr(m, "config")}
    return modules, configs


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_exact_backends_leave_the_logits_and_the_way_back_is_exact(name, implementation):
    model, given = make(name, implementation), inputs(name)
    before, want = state_of(model), logits(model, given)
    for backend in EXACT:
        with effattn.swap(model, backend) as swapped:
            torch.testing.assert_close(logits(model, given), want, atol=1e-5, rtol=1e-5)
        assert all(site.calls == 1 and str(site.backend) == str(effattn.get(backend)) for site in swapped.sites)
    assert state_of(model) == before
    assert torch.equal(logits(model, given), want)


@pytest.mark.parametrize("backend", EXACT)
def test_gradients_are_those_of_the_model_as_it_was(backend):
    model, given = make("llama"), inputs("llama")
    keep = given["attention_mask"].bool()

    def gradients():
        model.zero_grad()
        model(**given).logits[keep].square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    want = gradients()
    with effattn.swap(model, backend):
        got = gradients()
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_generate_gives_the_same_tokens_however_it_caches(name):
    model, given = make(name), inputs(name)
    ways = [{}, {"use_cache": False}, {"cache_implementation": "static"}]
    if name == "t5":
        given.pop("decoder_input_ids")
    else:
        given = {key: value[:2] for key, value in given.items()}  # generation continues on the right
        ways.append({"prefill_chunk_size": 5})
    options = {**given, "max_new_tokens": 9, "do_sample": False}
    want = model.generate(**options)
    for way in ways:
        with effattn.swap(model, WHOLE):
            assert torch.equal(model.generate(**options, **way), want), way


def test_a_window_decodes_as_it_prefills():
    model, given = make("llama"), inputs("llama", batch_size=2)
    options = {**given, "max_new_tokens": 9, "do_sample": False}
    with effattn.swap(model, "sliding_window(left=4, right=0)"):
        want = model.generate(**options, use_cache=False)
        for way in [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 5}]:
            assert torch.equal(model.generate(**options, **way), want), way
    assert not torch.equal(model.generate(**options), want)


def test_packed_documents_do_not_see_each_other():
    model = make("llama")
    ids = torch.randint(3, 99, (1, 20), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    with torch.no_grad(), effattn.swap(model, "chunked"):
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        apart = torch.cat([model(input_ids=part).logits for part in ids.split([12, 8], dim=1)], dim=1)
    torch.testing.assert_close(packed, apart)


def test_a_bool_mask_of_ones_own_and_a_floating_one_are_served():
    model, given = make("llama"), inputs("llama", batch_size=1)
    allowed = torch.rand(1, 1, 23, 23, generator=torch.Generator().manual_seed(3)) < 0.5
    allowed |= torch.eye(23, dtype=torch.bool)
    for mask in (allowed, torch.zeros(1, 1, 23, 23).masked_fill(~allowed, -1e9)):
        own = {"input_ids": given["input_ids"], "attention_mask": mask}
        with torch.no_grad():
            want = model(**own).logits
            with effattn.swap(model, "chunked"):
                torch.testing.assert_close(model(**own).logits, want, atol=1e-5, rtol=1e-5)


# What transformers asks for, as a mask ----------------------------------------------------------------------


def test_every_mask_function_is_read_as_what_it_is():
    """Against the dense mask that transformers itself makes of it, with offsets of queries and keys."""
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(2, 14, generator=generator) < 0.7
    padding = torch.tensor([0, 3])
    blocks = torch.randint(-1, 3, (2, 20), generator=generator)
    packed = torch.randint(0, 3, (2, 20), generator=generator).sort(-1).values
    positions = torch.arange(20).expand(2, -1)
    restarts = torch.stack([positions[0] // 7, positions[0] // 4])  # documents of 7 and of 4 tokens
    restarting = torch.stack([positions[0] % 7, positions[0] % 4])
    utils = masking_utils
    functions = {
        "causal": utils.causal_mask_function,
        "bidirectional": utils.bidirectional_mask_function,
        "window": utils.sliding_window_causal_mask_function(4),
        "window on both sides": utils.sliding_window_bidirectional_mask_function(3),
        "chunks": utils.chunked_causal_mask_function(5, padding),
        "blocks": utils.or_masks(utils.causal_mask_function, utils.blockwise_overlay(blocks)),
        "packed": utils.and_masks(
            utils.remap_positions_for_packed_sequence(utils.causal_mask_function, positions),
            utils.packed_sequence_mask_function(packed),
        ),
        "packed chunks": utils.and_masks(
            utils.remap_positions_for_packed_sequence(
                utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long)), restarting
            ),
            utils.packed_sequence_mask_function(restarts),
        ),
        "padded": utils.and_masks(utils.causal_mask_function, utils.padding_mask_function(keep)),
    }
    for name, function in functions.items():
        for q_length, kv_length, q_offset, kv_offset in [(6, 6, 0, 0), (4, 9, 5, 0), (1, 7, 9, 3), (3, 14, 4, 0)]:
            for attention_mask in (None, keep):
                request = {
                    "batch_size": 2,
                    "q_length": q_length,
                    "kv_length": kv_length,
                    "q_offset": q_offset,
                    "kv_offset": kv_offset,
                    "mask_function": function,
                    "attention_mask": attention_mask,
                    "allow_is_causal_skip": False,
                    "device": "cpu",
                }
                made = hugging_face.make_mask(**request)
                want = utils.sdpa_mask(**request)
                got = made.mask.dense(2, 1, q_length, kv_length, made.query_offset)
                assert torch.equal(got, want.expand_as(got)), (name, request)
                assert all(tensor.numel() <= 2 * kv_length for tensor in made.mask.tensors), (name, made)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert", {"Padding(bool[3, 23])"}),
        ("llama", {"Causal() & Padding(bool[3, 23])"}),
        ("mistral", {"Window(left=6, right=None, dilation=1) & Causal() & Padding(bool[3, 23])"}),
        ("modernbert", {"Padding(bool[3, 23])", "Window(left=4, right=4, dilation=1) & Padding(bool[3, 23])"}),
    ],
)
def test_the_mask_that_reaches_a_layer_is_linear_in_the_length(name, expected, monkeypatch):
    seen = set()
    monkeypatch.setattr(Full, "attend", record(seen))
    model = make(name)
    with torch.no_grad(), effattn.swap(model, "full"):
        model(**inputs(name))
    assert seen == expected


def record(seen):
    attend = Full.attend

    def recorded(self, *args, mask, **options):
        seen.add(repr(mask))
        return attend(self, *args, mask=mask, **options)

    return recorded


def test_a_mask_that_cannot_be_expressed_is_named_unless_it_is_one_row():
    def odd_keys_only(batch_idx, head_idx, q_idx, kv_idx):
        return kv_idx % 2 == 1

    function = masking_utils.and_masks(masking_utils.causal_mask_function, odd_keys_only)
    request = {"batch_size": 1, "kv_length": 6, "q_offset": 5, "mask_function": function, "device": "cpu"}
    with pytest.raises(ValueError, match=r"the mask test_swap_hugging_face\..*odd_keys_only, which effattn cannot"):
        hugging_face.make_mask(q_length=2, **request)
    row = hugging_face.make_mask(q_length=1, **request).mask
    assert isinstance(row, Dense)
    assert row.allowed.tolist() == [[[[False, True, False, True, False, True]]]]


def test_a_model_that_cuts_its_mask_is_told_so():
    made = hugging_face.make_mask(batch_size=1, q_length=4, kv_length=4)
    with pytest.raises(ValueError, match="a model takes a part of its mask"):
        made[:, :, :, :2]
    with pytest.raises(AttributeError, match="asks its mask for 'dtype'"):
        _ = made.dtype


def test_a_mask_moves_between_devices():
    keep = torch.tensor([[True, True, False, True]])
    made = copy.copy(hugging_face.make_mask(1, 4, 4, attention_mask=keep, allow_is_causal_skip=False))
    moved = made.to("meta", non_blocking=True)
    assert [tensor.device.type for tensor in moved.mask.tensors] == ["meta"]
    assert repr(moved) == repr(made) == "ModelMask(Causal() & Padding(bool[1, 4]), query_offset=0, shape=(1, 1, 4, 4))"
    assert moved.made_by("sdpa").device.type == "meta"


def test_what_is_read_is_built_from_the_algebra():
    request = {"batch_size": 1, "q_length": 5, "kv_length": 5, "device": "cpu"}
    function = masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1, 1]]))
    made = hugging_face.make_mask(mask_function=function, **request)
    assert isinstance(made.mask, Documents)
    made = hugging_face.make_mask(attention_mask=torch.tensor([[1, 1, 1, 1, 0]]).bool(), **request)
    assert [type(part) for part in made.mask.parts] == [Causal, Padding]
    made = hugging_face.make_mask(mask_function=masking_utils.sliding_window_overlay(3), **request)
    assert made.mask == Window(2, None)


# Choosing layers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_layers_that_are_not_selected_run_bit_for_bit_as_they_did(implementation):
    model, given = make("t5", implementation), inputs("t5")
    with torch.no_grad():
        want = model(**given, output_hidden_states=True)
        with effattn.swap(model, "chunked", layers="decoder") as swapped:
            got = model(**given, output_hidden_states=True)
    assert torch.equal(got.encoder_last_hidden_state, want.encoder_last_hidden_state)
    torch.testing.assert_close(got.logits, want.logits)
    assert [site.calls for site in swapped.sites] == [0, 0, 1, 1, 1, 1]


def test_a_part_of_a_composite_model_is_swapped_alone():
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES),
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=32, patch_size=8),
        image_token_index=98,
        image_seq_length=16,
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.cat([torch.full((1, 16), 98), torch.arange(3, 12)[None]], dim=1)
    given = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 32, 32), "attention_mask": torch.ones_like(ids)}
    options = {**given, "max_new_tokens": 4, "do_sample": False}
    want, tokens = logits(model, given), model.generate(**options)
    for part in ("model.language_model", "model.vision_tower"):
        with effattn.swap(model, "chunked", layers=part) as swapped:
            torch.testing.assert_close(logits(model, given), want, atol=1e-5, rtol=1e-5)
            assert torch.equal(model.generate(**options), tokens)
        assert all((site.calls > 0) == site.path.startswith(part) for site in swapped.sites)


def test_a_mapping_gives_each_layer_its_backend_and_the_last_entry_wins():
    model, given = make("llama", num_hidden_layers=3), inputs("llama")
    with effattn.swap(model, {"*": "full", 1: "chunked", "model.layers.2": "sdpa"}) as swapped:
        logits(model, given)
    assert [str(site.backend) for site in swapped.sites] == ["full", "chunked", "sdpa"]
    assert swapped["model.layers.1.self_attn"].calls == 1


def test_swaps_nest_and_undo_themselves_after_errors():
    model, given = make("llama"), inputs("llama")
    before, want = state_of(model), logits(model, given)
    outer = effattn.swap(model, "chunked")
    in_outer = state_of(model)
    inner = effattn.swap(model, "full", layers=[0])
    with pytest.raises(ValueError, match="a later swap of LlamaForCausalLM is still in place"):
        outer.undo()
    with pytest.raises(IndexError), inner:
        model(input_ids=torch.tensor([[99]]))  # a token that the vocabulary does not have
    inner = effattn.swap(model, "full", layers=[0])
    logits(model, given)
    inner.undo()
    assert [site.calls for site in inner.sites] == [1, 0]
    assert [site.calls for site in outer.sites] == [0, 1]
    assert state_of(model) == in_outer
    logits(model, given)
    assert [site.calls for site in outer.sites] == [1, 2]
    outer.undo()
    outer.undo()
    assert state_of(model) == before
    assert torch.equal(logits(model, given), want)


def test_a_copy_of_a_swapped_model_is_served_on_its_own():
    model, given = make("llama"), inputs("llama")
    with effattn.swap(model, "chunked") as swapped:
        twin = copy.deepcopy(model)
        logits(twin, given)
    assert [site.calls for site in swapped.sites] == [0, 0]
    assert [layer.self_attn._effattn_site.calls for layer in twin.model.layers] == [1, 1]


def test_the_report_prints_as_a_table():
    model = make("gpt2")
    with effattn.swap(model, "sliding_window(left=3, right=0)", layers=[1]) as swapped:
        logits(model, inputs("gpt2"))
    assert str(swapped).splitlines() == [
        "GPT2LMHeadModel: 1 of 2 attention sites served",
        "site                  kind          backend                          calls  note",
        "--------------------  ------------  -------------------------------  -----  -----------------------",
        "transformer.h.0.attn  transformers  -                                0      not selected: as it was",
        "transformer.h.1.attn  transformers  sliding_window(left=3, right=0)  1",
    ]


# Refused, when swapping -------------------------------------------------------------------------------------


def own_attention(name):
    if name == "longformer":
        return transformers.LongformerModel(
            transformers.LongformerConfig(**{**SIZES, "attention_window": [4, 4], "max_position_embeddings": 64})
        )
    if name == "reformer":
        return transformers.ReformerModel(
            transformers.ReformerConfig(
                vocab_size=99,
                hidden_size=32,
                num_attention_heads=2,
                attention_head_size=16,
                attn_layers=["local", "lsh"],
                feed_forward_size=64,
                axial_pos_shape=[4, 8],
                axial_pos_embds_dim=[16, 16],
                num_buckets=4,
                is_decoder=True,
            )
        )
    return transformers.BigBirdModel(
        transformers.BigBirdConfig(**{**SIZES, "attention_type": "block_sparse", "block_size": 2})
    )


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("longformer", "LongformerSelfAttention"),
        ("reformer", "LSHSelfAttention"),
        ("bigbird", "BigBirdBlockSparseAttention"),
    ],
)
def test_models_with_an_attention_of_their_own_say_so(name, module):
    model = own_attention(name).eval()
    before = state_of(model)
    with pytest.raises(ValueError, match=rf"(?s)2 of 2 attention sites cannot.*{module} computes an attention"):
        effattn.swap(model, "full")
    with effattn.swap(model, "full", strict=False) as swapped:
        assert all(site.backend is None and "an attention of its own" in site.note for site in swapped.sites)
    assert state_of(model) == before


def test_what_goes_beyond_softmax_is_refused():
    config = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
    gemma = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**config))
    with pytest.raises(ValueError, match="Gemma2Attention cannot be served: it passes softcap, which is beyond"):
        effattn.swap(gemma, "full")
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    sinks = transformers.GptOssForCausalLM(transformers.GptOssConfig(**config, **experts))
    with pytest.raises(ValueError, match="GptOssAttention cannot be served: it passes s_aux"):
        effattn.swap(sinks, "full")


class Limited(Full):
    """A backend that can do less, for the errors."""

    name = "limited"

    def __init__(self, **limits):
        object.__setattr__(self, "limits", limits)

    @property
    def capabilities(self):
        return Capabilities(**self.limits)

    def __str__(self):
        return "limited"


@pytest.mark.parametrize(
    ("name", "limits", "training", "reason"),
    [
        ("llama", {"masks": (Padding,)}, False, "requested a mask of Causal; supported Padding"),
        ("llama", {"cross_length": False}, False, "requested query_len 1 with key_len 16; supported equal lengths"),
        ("llama", {"grouped_heads": False}, False, "requested 4 query heads on 2 key heads; supported equal numbers"),
        ("gpt2", {"dropout": False}, True, "requested dropout_p 0.1; supported 0"),
        ("bert", {"backward": False}, True, "requested a backward pass; supported forward only"),
        ("bert", {"devices": ("cuda",)}, False, "requested device cpu; supported cuda"),
        ("t5", {"bias": False}, False, "requested a bias; supported none"),
    ],
)
def test_a_backend_that_cannot_do_what_the_model_needs_is_refused_at_once(name, limits, training, reason):
    model = make(name).train(training)
    before = state_of(model)
    with pytest.raises(UnsupportedError, match=reason) as caught:
        effattn.swap(model, Limited(**limits))
    assert "limited: requested" in caught.value.reasons[0]
    assert state_of(model) == before
    with effattn.swap(model, Limited(**limits), strict=False) as swapped:
        assert any(reason in site.note for site in swapped.sites)


def test_a_decoder_without_a_cache_needs_no_equal_lengths():
    model = make("llama", use_cache=False)
    with effattn.swap(model, Limited(cross_length=False)):
        assert logits(model, inputs("llama")).isfinite().all()


@pytest.mark.parametrize(
    ("backend", "layers", "message"),
    [
        ("full", [2], r"layers names 2, which no site has; numbers 0 to 1, paths model.layers.0.self_attn, model.l"),
        ("full", "encoder.*", r"layers names 'encoder.\*', which no site has"),
        ("full", [], "layers must name at least one layer"),
        ("full", [0.5], "layers must be numbers or patterns of paths, got 0.5"),
        ({0: "full"}, [0], "layers must be None"),
        ({}, None, "at least one layer, got an empty mapping"),
        ("ful", None, "did you mean 'full'"),
    ],
)
def test_bad_arguments_are_named(backend, layers, message):
    with pytest.raises(ValueError, match=message):
        effattn.swap(make("llama"), backend, layers=layers)


def test_a_model_without_attention_is_named():
    mamba = transformers.MambaModel(
        transformers.MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, state_size=4)
    )
    with pytest.raises(ValueError, match="MambaModel has no attention that effattn can find"):
        effattn.swap(mamba, "full")
    with pytest.raises(ValueError, match=r"model must be an nn\.Module, got str"):
        effattn.swap("bert", "full")


def test_a_layer_outside_of_the_swapped_part_is_told_why_it_fails():
    model = make("llama")
    with (
        effattn.swap(model.model.layers[0], "full"),
        pytest.raises(ValueError, match="LlamaAttention that is no site of the swapped model"),
    ):
        logits(model, inputs("llama"))


# Around the call --------------------------------------------------------------------------------------------


def test_attention_weights_are_those_of_the_pattern():
    model, given = make("bert", "eager"), inputs("bert")
    with torch.no_grad():
        want = model(**given, output_attentions=True).attentions
        with effattn.swap(model, "full"):
            got = model(**given, output_attentions=True).attentions
        with effattn.swap(model, "sliding_window(left=2, right=2)"):
            local = model(**given, output_attentions=True).attentions
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    distance = (torch.arange(23)[:, None] - torch.arange(23)).abs()
    assert (local[0][..., distance > 2] == 0).all()
    torch.testing.assert_close(local[0][0].sum(-1), torch.ones(4, 23))


def test_attention_weights_with_a_position_bias_and_a_scale_of_its_own():
    model, given = make("t5", "eager"), inputs("t5")
    with torch.no_grad():
        want = model(**given, output_attentions=True)
        with effattn.swap(model, "full"):
            got = model(**given, output_attentions=True)
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        for one, other in zip(got[name], want[name], strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_autocast_runs_the_backend_in_its_dtype(monkeypatch):
    dtypes = set()
    attend = Full.attend
    monkeypatch.setattr(Full, "attend", lambda self, q, *a, **o: (dtypes.add(q.dtype), attend(self, q, *a, **o))[1])
    model, given = make("llama"), inputs("llama")
    with torch.autocast("cpu", torch.bfloat16):
        want = logits(model, given)
        with effattn.swap(model, "full"):
            got = logits(model, given)
    assert dtypes == {torch.bfloat16}
    torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_recomputes_through_the_backend(use_reentrant):
    model, given = make("llama"), inputs("llama")
    model.train()

    def gradients():
        model.zero_grad()
        model(**given, use_cache=False).logits.square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    with effattn.swap(model, "sliding_window(left=3, right=0)") as swapped:
        want = gradients()
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        got = gradients()
    assert [site.calls for site in swapped.sites] == [3, 3]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_compiled_model_equals_the_eager_one_and_counts_its_calls(name):
    model, given = make(name, num_hidden_layers=1), inputs(name)
    torch._dynamo.reset()
    # A mask that transformers joins from closures is read outside of the graph.
    compiled = torch.compile(model, backend="aot_eager", fullgraph=name == "llama")
    with effattn.swap(model, "sliding_window(left=3, right=0)") as swapped:
        want = logits(model, given)
        for _ in range(3):
            torch.testing.assert_close(logits(compiled, given), want)
    assert [site.calls for site in swapped.sites] == [4]
    torch.testing.assert_close(logits(compiled, given), logits(model, given))
