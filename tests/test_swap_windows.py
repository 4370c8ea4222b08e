"""Other libraries' windows against the libraries themselves: which keys reach which query, by its gradient."""

import importlib.util

import pytest
import torch
import transformers

import effattn
from effattn import Window
from effattn.swap import windows

SEQ_LEN = 24


def seen_by(forward, width=8):
    """Which keys move which rows of ``forward(x)``, ``[1, seq, width]`` to the same."""
    x = torch.randn(1, SEQ_LEN, width, generator=torch.Generator().manual_seed(0))
    jacobian = torch.autograd.functional.jacobian(forward, x)
    return jacobian.abs().sum((0, 2, 3, 5)) > 0


def keys_of(window):
    return window.dense(1, 1, SEQ_LEN, SEQ_LEN)[0, 0]


def one_layer(model_class, config_class, **sizes):
    torch.manual_seed(0)
    config = {
        "vocab_size": 9,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**config, **sizes)).eval()


@pytest.mark.parametrize("sliding_window", [1, 2, 5])
def test_mistral(sliding_window):
    model = one_layer("MistralModel", "MistralConfig", num_key_value_heads=2, sliding_window=sliding_window)
    seen = seen_by(lambda x: model(inputs_embeds=x, use_cache=False).last_hidden_state)
    assert torch.equal(seen, keys_of(windows.mistral(sliding_window)))


@pytest.mark.parametrize("local_attention", [2, 6])
def test_modernbert(local_attention):
    special = {"cls_token_id": 1, "sep_token_id": 2, "layer_types": ["sliding_attention"]}
    model = one_layer("ModernBertModel", "ModernBertConfig", local_attention=local_attention, **special)
    seen = seen_by(lambda x: model(inputs_embeds=x).last_hidden_state)
    assert torch.equal(seen, keys_of(windows.modernbert(local_attention)))


@pytest.mark.parametrize("attention_window", [4, 8, 12])
def test_longformer(attention_window):
    sizes = {"attention_window": [attention_window], "max_position_embeddings": 64}
    model = one_layer("LongformerModel", "LongformerConfig", **sizes)
    attention = model.encoder.layer[0].attention.self
    nothing = torch.zeros(1, SEQ_LEN)
    none = nothing.bool()

    def forward(x):
        return attention(x, nothing, is_index_masked=none, is_index_global_attn=none, is_global_attn=False)[0]

    assert torch.equal(seen_by(forward), keys_of(windows.longformer(attention_window)))


@pytest.mark.skipif(importlib.util.find_spec("local_attention") is None, reason="local-attention is not installed")
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": False},
        {"causal": True, "look_backward": 2},
        {"causal": False, "look_backward": 2, "look_forward": 0},
    ],
)
def test_local_attention(options):
    from local_attention import LocalAttention

    options = {"window_size": 4, "exact_windowsize": True, **options}
    module = LocalAttention(**options)
    assert torch.equal(seen_by(lambda x: module(x, x, x)), keys_of(windows.local_attention(**options)))


def test_local_attention_in_blocks_is_no_window():
    with pytest.raises(
        ValueError, match="exact_windowsize must be True, got False: then it attends by whole blocks of 4"
    ):
        windows.local_attention(4)


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_size", [(-1, -1), (3, 0), (2, 5), (0, -1)])
def test_flash_attn(window_size, causal):
    from flash_attn import flash_attn_func

    tensors = [torch.randn(1, SEQ_LEN, 1, 32, device="cuda", dtype=torch.float16) for _ in range(3)]
    want = flash_attn_func(*tensors, window_size=window_size, causal=causal)
    query, key, value = (t.transpose(1, 2) for t in tensors)
    got = effattn.attention(query, key, value, mask=windows.flash_attn(window_size, causal))
    torch.testing.assert_close(got.transpose(1, 2), want, atol=1e-3, rtol=1e-2)


def test_flash_attn_by_its_documentation():
    """Query i sees the keys from i - left to i + right, -1 is no limit, and causal sees none after it."""
    for left in (-1, 0, 3):
        for right in (-1, 0, 2):
            back = torch.arange(SEQ_LEN)[:, None] - torch.arange(SEQ_LEN)
            want = ((back <= left) | (left == -1)) & ((-back <= right) | (right == -1))
            assert torch.equal(keys_of(windows.flash_attn((left, right))), want)
            assert torch.equal(keys_of(windows.flash_attn((left, right), causal=True)), want & (back >= 0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: windows.mistral(0), "mistral: sliding_window must be >= 1, got 0"),
        (lambda: windows.longformer(5), "longformer: attention_window must be even and >= 2, got 5"),
        (lambda: windows.flash_attn((-2, 0)), r"flash_attn: window_size must be two integers >= -1, got \(-2, 0\)"),
        (lambda: windows.modernbert(-1), "modernbert: local_attention must be >= 0, got -1"),
        (lambda: windows.local_attention(0), "local_attention: window_size must be >= 1, got 0"),
    ],
)
def test_bad_windows_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_same_number_means_different_windows():
    assert windows.mistral(8) == Window(7, 0)
    assert windows.longformer(8) == Window(4, 4)
    assert windows.flash_attn((8, 8)) == Window(8, 8)
    assert windows.local_attention(8, causal=True, exact_windowsize=True) == Window(8, 0)
