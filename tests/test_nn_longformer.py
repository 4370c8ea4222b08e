"""Longformer's attention against Hugging Face's weights and against dense attention, spelled out."""

import pytest
import torch
import torch.nn.functional as F

from effattn.nn import EncoderLayer, LongformerAttention, from_huggingface

D, H, W, L = 24, 4, 3, 24
KEEP = torch.arange(L) < torch.tensor([[L], [17]])
GLOBAL = torch.zeros(2, L, dtype=torch.int64)
GLOBAL[0, [0, 9]] = 1
GLOBAL[1, [0, 5, 16]] = 1


def states(length=L, seed=0):
    return torch.randn(2, length, D, generator=torch.Generator().manual_seed(seed))


def hugging_face(kind="LongformerSelfAttention"):
    from transformers import LongformerConfig
    from transformers.models.longformer import modeling_longformer

    torch.manual_seed(0)
    config = LongformerConfig(
        hidden_size=D, num_attention_heads=H, attention_window=[2 * W], num_hidden_layers=1, intermediate_size=40
    )
    theirs = getattr(modeling_longformer, kind)(config, 0).eval()
    theirs.config = config
    for name, parameter in theirs.named_parameters():
        if "LayerNorm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return theirs


def their_masks(keep, is_global):
    """-1 for padding, 1 for global tokens and 0 for others stand for what the model makes of both masks."""
    level = is_global.clone()
    level[~keep] = -1
    is_global = level > 0
    return {
        "attention_mask": level.float(),
        "is_index_masked": level < 0,
        "is_index_global_attn": is_global,
        "is_global_attn": bool(is_global.any()),
    }


@pytest.mark.parametrize("keep", [torch.ones(2, L) > 0, KEEP], ids=["whole", "padded"])
@pytest.mark.parametrize("is_global", [0 * GLOBAL, GLOBAL, 0 * GLOBAL + 1], ids=["none", "some", "all"])
def test_equals_hugging_face_with_its_weights(keep, is_global):
    theirs = hugging_face()
    ours = from_huggingface(theirs)
    assert (ours.window, ours.training) == (W, False)
    x = states()
    (expected,) = theirs(x, **their_masks(keep, is_global))
    got = ours(x, attention_mask=keep, global_attention_mask=is_global)
    assert expected[keep].abs().mean() > 0.1
    # It leaves global rows of padding alone: no key of theirs is seen, and what they give is nobody's.
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_whole_layer_equals_hugging_face():
    theirs = hugging_face("LongformerLayer")
    ours = from_huggingface(theirs)
    assert isinstance(ours, EncoderLayer)
    (expected,) = theirs(states(), **their_masks(KEEP, GLOBAL))
    got = ours(states(), attention_mask=KEEP, global_attention_mask=GLOBAL)
    torch.testing.assert_close(got[KEEP], expected[KEEP], atol=1e-5, rtol=1e-5)


def test_gradients_equal_hugging_face():
    theirs = hugging_face()
    ours = from_huggingface(theirs)
    weight = states(seed=1)
    theirs_x, ours_x = states().requires_grad_(), states().requires_grad_()
    (expected,) = theirs(theirs_x, **their_masks(KEEP, GLOBAL))
    (expected * weight).sum().backward()
    (ours(ours_x, attention_mask=KEEP, global_attention_mask=GLOBAL) * weight).sum().backward()
    torch.testing.assert_close(ours_x.grad, theirs_x.grad, atol=1e-4, rtol=1e-4)
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, atol=1e-4, rtol=1e-4, msg=name)


def dense(ours, x, keep, is_global):
    """One softmax a row over the band and the global keys; global rows by the other projections over everything."""
    heads = [p(x).unflatten(2, (H, -1)).transpose(1, 2) for p in (ours.query, ours.key, ours.value)]
    others = [
        p(x).unflatten(2, (H, -1)).transpose(1, 2) for p in (ours.query_global, ours.key_global, ours.value_global)
    ]
    length = x.shape[1]
    near = (torch.arange(length)[:, None] - torch.arange(length)).abs() <= ours.window
    seen = (near | is_global[:, None]) & keep[:, None]
    local = F.scaled_dot_product_attention(*heads, attn_mask=seen[:, None])
    whole = F.scaled_dot_product_attention(*others, attn_mask=keep[:, None, None])
    joined = torch.where(is_global[:, None, :, None], whole, local).transpose(1, 2).flatten(2)
    return ours.out_proj(joined.masked_fill(~keep[..., None], 0.0))


@pytest.mark.parametrize("length", [1, 2, 7, 31])
@pytest.mark.parametrize("window", [1, 4, 100])
def test_any_length_and_window_equals_dense_attention(length, window):
    torch.manual_seed(0)
    ours = LongformerAttention(D, H, window=window)
    x = states(length)
    keep = torch.arange(length) >= torch.tensor([[0], [length // 3]])  # padding on the left
    is_global = (torch.rand(2, length) < 0.2) & keep
    got = ours(x, attention_mask=keep, global_attention_mask=is_global)
    torch.testing.assert_close(got, dense(ours, x, keep, is_global), atol=1e-5, rtol=1e-5)


def test_padding_has_no_influence_and_is_never_global():
    torch.manual_seed(0)
    ours = LongformerAttention(D, H, window=W)
    everywhere = GLOBAL.clone()
    everywhere[1, 20] = 1  # padding
    x = states()
    changed = x.masked_fill(~KEEP[..., None], 7.0)
    expected = ours(x, attention_mask=KEEP.long(), global_attention_mask=GLOBAL)
    assert torch.equal(ours(changed, attention_mask=KEEP.long(), global_attention_mask=everywhere), expected)
    assert torch.equal(expected[1, 17:], ours.out_proj.bias.expand(7, D))


def test_every_weight_has_a_gradient_also_without_global_tokens():
    torch.manual_seed(0)
    ours = LongformerAttention(D, H, window=W)
    ours(states()).sum().backward()
    assert all(p.grad is not None for p in ours.parameters())
    assert ours.key_global.weight.grad.abs().max() == 0
    assert ours(states()[:0]).shape == (0, L, D)
    assert ours(states()[:, :0]).shape == (2, 0, D)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LongformerAttention(10, 4), "d_model must be a multiple of num_heads = 4, got 10"),
        (lambda: LongformerAttention(8, 4, window=0), "window must be an integer >= 1, got 0"),
        (
            lambda: LongformerAttention(D, H)(states(), attention_mask=KEEP[:, :-1]),
            r"attention_mask must have shape \[batch, seq\] = \[2, 24\], got \[2, 23\]",
        ),
        (
            lambda: LongformerAttention(D, H)(states(), global_attention_mask=2 * GLOBAL),
            "global_attention_mask must be bool or hold only 0 and 1",
        ),
        (
            lambda: LongformerAttention(D, H)(states(), attention_mask=KEEP.float()),
            "attention_mask must be bool or hold only 0 and 1 as integers, got torch.float32",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
