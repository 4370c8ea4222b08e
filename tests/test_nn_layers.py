"""Encoder and decoder layers against PyTorch's, and cross-attention only where there is an encoder."""

import pytest
import torch
from torch import nn

from effattn import Causal, Padding
from effattn.nn import DecoderLayer, EncoderLayer, FeedForward, LayerCache, LongformerAttention, MultiheadAttention

D, H, FF, L = 24, 4, 40, 11


def states(length=L, seed=0):
    return torch.randn(2, length, D, generator=torch.Generator().manual_seed(seed))


def copy_attention(theirs, ours):
    for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
        getattr(ours, name).weight.data = theirs.in_proj_weight.data.chunk(3)[index]
        getattr(ours, name).bias.data = theirs.in_proj_bias.data.chunk(3)[index]
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())


def scramble(module):
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return module.eval()


def attention():
    return MultiheadAttention(D, H, backend="full")


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_an_encoder_layer_equals_torchs(norm_first, activation):
    options = {"norm_first": norm_first, "activation": activation}
    theirs = scramble(nn.TransformerEncoderLayer(D, H, FF, batch_first=True, **options))
    ours = EncoderLayer(attention(), FF, **options).eval()
    copy_attention(theirs.self_attn, ours.attention)
    pairs = ("norm1", "attention_norm"), ("norm2", "feed_forward_norm")
    for name, own in pairs:
        getattr(ours, own).load_state_dict(getattr(theirs, name).state_dict())
    ours.feed_forward.up.load_state_dict(theirs.linear1.state_dict())
    ours.feed_forward.down.load_state_dict(theirs.linear2.state_dict())
    keep = torch.arange(L) < torch.tensor([[L], [6]])
    with torch.enable_grad():  # without gradients torch takes its fast path, which zeroes padding
        expected = theirs(states().requires_grad_(), src_key_padding_mask=~keep)
    torch.testing.assert_close(ours(states(), mask=Padding(keep)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_decoder_layer_equals_torchs(norm_first):
    theirs = scramble(nn.TransformerDecoderLayer(D, H, FF, batch_first=True, norm_first=norm_first))
    ours = DecoderLayer(attention(), FF, cross_attention=attention(), activation="relu", norm_first=norm_first).eval()
    copy_attention(theirs.self_attn, ours.attention)
    copy_attention(theirs.multihead_attn, ours.cross_attention)
    pairs = ("norm1", "attention_norm"), ("norm2", "cross_attention_norm"), ("norm3", "feed_forward_norm")
    for name, own in pairs:
        getattr(ours, own).load_state_dict(getattr(theirs, name).state_dict())
    ours.feed_forward.up.load_state_dict(theirs.linear1.state_dict())
    ours.feed_forward.down.load_state_dict(theirs.linear2.state_dict())
    encoded, keep = states(7, seed=1), torch.arange(7) < torch.tensor([[7], [3]])
    expected = theirs(
        states(), encoded, tgt_mask=torch.ones(L, L).triu(1).bool(), memory_key_padding_mask=~keep, tgt_is_causal=True
    )
    got = ours(states(), encoded, encoded_mask=Padding(keep))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    cache = LayerCache()
    pieces = [ours(x, encoded, encoded_mask=Padding(keep), cache=cache) for x in states().split((4, 1, 6), dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=1e-5, rtol=1e-5)
    assert (cache.attention.length, cache.cross_attention.length) == (L, 7)


def test_a_decoder_layer_is_causal_whatever_the_mask():
    layer = DecoderLayer(attention(), FF)
    x, keep = states(), torch.arange(L) >= torch.tensor([[0], [2]])
    changed = x.clone()
    changed[:, 6:] += 1
    for mask in (None, Padding(keep), Causal(), torch.ones(L, L) > 0):
        torch.testing.assert_close(layer(x, mask=mask)[:, :6], layer(changed, mask=mask)[:, :6])


def test_cross_attention_only_where_there_is_an_encoder():
    alone = DecoderLayer(attention(), FF)
    crossed = DecoderLayer(attention(), FF, cross_attention=attention())
    assert not [name for name, _ in alone.named_parameters() if "cross" in name]
    with pytest.raises(ValueError, match=r"it has no cross_attention, .* got some"):
        alone(states(), states())
    with pytest.raises(ValueError, match=r"it has a cross_attention, .* got none"):
        crossed(states())


def test_an_encoder_layer_takes_any_attention():
    layer = EncoderLayer(LongformerAttention(D, H, window=2), FF)
    assert layer(states(), global_attention_mask=torch.ones(2, L) > 0).shape == (2, L, D)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EncoderLayer(attention(), FF, activation="tanh"), "activation must be one of gelu, .* got 'tanh'"),
        (lambda: EncoderLayer(attention(), 0), "d_ff must be an integer >= 1, got 0"),
        (lambda: EncoderLayer(attention(), FF, dropout=-0.1), r"dropout must lie in 0..1, got -0.1"),
        (lambda: EncoderLayer(nn.Linear(2, 2), FF), "attention must be a module with a d_model, got Linear"),
        (
            lambda: DecoderLayer(attention(), FF, cross_attention=MultiheadAttention(8, 2)),
            "cross_attention must have d_model 24, got 8",
        ),
        (
            lambda: DecoderLayer(attention(), FF)(states(), mask=torch.zeros(L, L)),
            r"mask must be a Mask, a bool tensor .* got torch.float32",
        ),
        (lambda: FeedForward(0, 1), "d_model must be an integer >= 1, got 0"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
