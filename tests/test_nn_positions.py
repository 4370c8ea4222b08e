"""Positions: tables, rotary and ALiBi, against what their papers say and what others compute."""

import math

import pytest
import torch

import effattn
from effattn import Causal, Everything, Window
from effattn.nn import ALiBi, LearnedPositions, MultiheadAttention, Rotary, SinusoidalPositions
from effattn.nn.positions import positions_of


def test_sinusoidal_is_the_papers_formula_at_any_position():
    table = SinusoidalPositions(6)(torch.tensor([[0, 3, 100000]]))
    assert table.shape == (1, 3, 6)
    for row, position in enumerate((0, 3, 100000)):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            assert table[0, row, 2 * i].item() == pytest.approx(math.sin(angle), abs=5e-3)
            assert table[0, row, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=5e-3)
    torch.testing.assert_close(table[0, 1, :2], torch.tensor([math.sin(3), math.cos(3)]))


def test_learned_gives_its_rows():
    positions = LearnedPositions(4, 3)
    assert torch.equal(positions(torch.tensor([[3, 0]])), positions.weight[[3, 0]][None])
    assert positions(torch.zeros(0, 5, dtype=torch.int64)).shape == (0, 5, 3)
    assert positions.max_len == 4


@pytest.mark.parametrize("position", [4, 1000, -1])
def test_a_position_off_the_learned_table_is_an_error_that_says_what_to_do(position):
    with pytest.raises(ValueError, match=rf"rows for 0..3, got position {position}; .*extend_positions"):
        LearnedPositions(4, 3)(torch.tensor([[0, position]]))


def test_rotary_turns_the_stated_pairs():
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    half, interleaved = (Rotary(4, interleaved=how)(x, offset=5).flatten() for how in (False, True))
    torch.testing.assert_close(half, torch.tensor([math.cos(5), 0.0, math.sin(5), 0.0]))
    torch.testing.assert_close(interleaved, torch.tensor([math.cos(5), math.sin(5), 0.0, 0.0]))
    second = torch.tensor([0.0, 1.0, 0.0, 0.0]).view(1, 1, 1, 4)
    slow = Rotary(4)(second, offset=5).flatten()
    torch.testing.assert_close(slow, torch.tensor([0.0, math.cos(0.05), 0.0, math.sin(0.05)]))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_scores_depend_on_the_distance_alone_and_lengths_stay(interleaved):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, 7, 8, generator=generator)
    rotary = Rotary(8, interleaved=interleaved)
    scores = [rotary(q, at) @ rotary(k, at).mT for at in (0, 12)]
    torch.testing.assert_close(*scores, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotary(q, 3).norm(dim=-1), q.norm(dim=-1))
    torch.testing.assert_close(rotary(q)[:, :, 3:], rotary(q[:, :, 3:], 3))


def test_rotary_is_llamas():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    q, k = torch.randn(2, 1, 2, 9, 16, generator=torch.Generator().manual_seed(0))
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    )
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(4, 13)[None])
    rotary = Rotary(16, base=500.0)
    for ours, theirs in zip((rotary(q, 4), rotary(k, 4)), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_rotary_keeps_the_dtype_and_turns_in_single_precision():
    x = torch.randn(1, 1, 50, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    turned = Rotary(8)(x, 3000)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, Rotary(8)(x.float(), 3000).bfloat16())


def test_alibi_slopes_are_the_papers():
    assert ALiBi(8).slopes == tuple(2.0**-i for i in range(1, 9))
    assert ALiBi(1).slopes == (2.0**-8,)
    twelve = ALiBi(12).slopes
    assert twelve[:8] == ALiBi(8).slopes
    assert twelve[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
    assert len(ALiBi(3).slopes) == len(set(ALiBi(3).slopes)) == 3


@pytest.mark.parametrize("num_heads", [4, 6])
@pytest.mark.parametrize("mask", [Causal(), Window(5, 0), Everything(), Window(4, 4)])
@pytest.mark.parametrize("query_len", [11, 3])
def test_alibi_penalises_the_distance(num_heads, mask, query_len):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, num_heads, query_len, 8, generator=generator)
    k, v = torch.randn(2, 1, num_heads, 11, 8, generator=generator)
    offset = 11 - query_len
    alibi = ALiBi(num_heads)
    bias = alibi(mask, query_len, 11, offset)
    is_causal = mask in (Causal(), Window(5, 0))
    assert bias.shape == (1, num_heads, 1 if is_causal else query_len, 11)
    distance = (torch.arange(query_len)[:, None] + offset - torch.arange(11)).abs()
    spelled_out = -torch.tensor(alibi.slopes)[:, None, None] * distance
    outputs = [effattn.attention(q, k, v, mask=mask, bias=b) for b in (bias, spelled_out)]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", ["full", "sdpa", "chunked", "sliding_window(left=None, right=None)"])
def test_alibi_survives_half_precision(spec):
    """In bfloat16 the slope times position 3000 would be a multiple of 1, too coarse to tell near keys apart."""
    torch.manual_seed(0)
    module = MultiheadAttention(16, 2, backend=spec, positions=ALiBi(2))
    x = torch.randn(1, 3000, 16)
    exact = module(x, mask=Causal())
    half = module.bfloat16()(x.bfloat16(), mask=Causal())
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).norm() / exact.norm() < 0.02
    with torch.autocast("cpu", torch.bfloat16):
        cast = module.float()(x, mask=Causal())
    assert (cast.float() - exact).norm() / exact.norm() < 0.02


def test_positions_are_counted_from_the_first_real_token():
    keep = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    assert positions_of(keep, 5, 5, keep.device).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]
    assert positions_of(keep, 2, 5, keep.device).tolist() == [[1, 2], [3, 4], [0, 0]]
    assert positions_of(None, 2, 5, keep.device).tolist() == [[3, 4]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SinusoidalPositions(7), "sinusoidal: d_model must be even.*got 7"),
        (lambda: LearnedPositions(0, 3), "learned positions: max_len must be an integer >= 1, got 0"),
        (lambda: Rotary(5), "rotary: head_dim must be even.*got 5"),
        (lambda: Rotary(4)(torch.zeros(1, 1, 1, 6)), "rotary: head_dim must be 4, got 6"),
        (lambda: ALiBi(0), "alibi: num_heads must be an integer >= 1, got 0"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
