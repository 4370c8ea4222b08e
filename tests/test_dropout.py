"""Dropout as a function of the pair: its statistics, and the same weights dropped by every backend."""

import pytest
import torch
from torch import Tensor

import effattn
from effattn import reference
from effattn.dropout import draw_seed, keep_scale
from effattn.masks import Causal, Padding

SIZES = (3, 4, 60, 80)


def grid(sizes: tuple[int, int, int, int] = SIZES) -> tuple[Tensor, ...]:
    b, h, i, j = (torch.arange(n) for n in sizes)
    return b[:, None, None, None], h[:, None, None], i[:, None], j


def kept(dropout_p: float, seed: int = 0) -> Tensor:
    return keep_scale(dropout_p, seed, *grid()) > 0


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_the_rate_is_right_everywhere(dropout_p):
    """On the whole and along every batch row, head, query and key: within 5 standard deviations."""
    dropped = (~kept(dropout_p)).double()
    for dims in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        rate = dropped.mean(dims)
        count = dropped.numel() / rate.numel()
        assert (rate - dropout_p).abs().max() < 5 * (dropout_p * (1 - dropout_p) / count) ** 0.5


@pytest.mark.parametrize("dropout_p", [0.0, 0.25, 0.5, 1.0])
def test_what_is_kept_makes_up_for_what_is_dropped(dropout_p):
    factors = keep_scale(dropout_p, 1, *grid())
    assert factors.dtype == torch.float32
    assert factors.shape == SIZES
    expected = {0.0: {1.0}, 0.25: {0.0, torch.tensor(1 / 0.75).item()}, 0.5: {0.0, 2.0}, 1.0: {0.0}}[dropout_p]
    assert set(factors.unique().tolist()) == expected


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("step", [1, 2])
def test_neighbours_are_independent(dim, step):
    drawn = kept(0.5).double() - 0.5
    here = drawn.narrow(dim, 0, drawn.shape[dim] - step)
    there = drawn.narrow(dim, step, drawn.shape[dim] - step)
    correlation = 4 * (here * there).mean()
    assert abs(correlation) < 5 / here.numel() ** 0.5


@pytest.mark.parametrize("seeds", [(0, 1), (0, 2**31 - 2), (7, 1007)])
def test_seeds_are_independent(seeds):
    here, there = (kept(0.5, seed).double() - 0.5 for seed in seeds)
    assert abs(4 * (here * there).mean()) < 5 / here.numel() ** 0.5


def test_rows_and_keys_are_not_interchangeable():
    square = keep_scale(0.5, 0, *grid((1, 1, 80, 80))) > 0
    agree = (square == square.mT).double().mean()
    assert abs(agree - 0.5) < 0.05


def test_a_part_drops_what_the_whole_drops():
    whole = keep_scale(0.3, 5, *grid())
    rows, keys = torch.tensor([59, 3, 3, 0]), torch.tensor([[7], [70]])
    part = keep_scale(0.3, 5, torch.tensor(2), torch.tensor(1), rows, keys)
    assert torch.equal(part, whole[2, 1][rows, keys])


def test_seeds_follow_the_global_generator():
    torch.manual_seed(0)
    first = [int(draw_seed()) for _ in range(4)]
    torch.manual_seed(0)
    assert [int(draw_seed()) for _ in range(4)] == first
    assert len(set(first)) == 4
    assert all(0 <= seed < 2**31 for seed in first)


BACKENDS = [
    "full",
    "chunked(query_chunk=7, key_chunk=9)",
    "sliding_window(left=4, right=3)",
    "sliding_window(left=4, right=3, dilation=3)",
    "sliding_window(left=4, right=3, global_tokens=(0, 17))",
    "sliding_window(left=4, right=3, dilation=2, global_tokens=((0, 17), (40,)))",
    "lsh(bucket_size=4)",
    "lsh(bucket_size=4, count='per_round')",
    "lsh(bucket_size=4, shared_qk=True)",
]
MASKS = {
    "none": None,
    "causal and padding": Causal() & Padding(torch.arange(41)[None] > 3),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("spec", BACKENDS)
def test_every_backend_drops_the_same_weights(spec, mask):
    """Output and gradients are those of the reference under the seed that the backend draws."""
    backend = effattn.get(spec)
    generator = torch.Generator().manual_seed(1)
    shared = getattr(backend, "shared_qk", False)
    query = torch.randn(2, 4, 41, 8, generator=generator, dtype=torch.float64)
    key = query * 0.5 if shared else torch.randn(2, 2, 41, 8, generator=generator, dtype=torch.float64)
    value = torch.randn(2, key.shape[1], 41, 6, generator=generator, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (query, key.detach(), value)]

    torch.manual_seed(0)
    seed = draw_seed()
    torch.manual_seed(0)
    output = effattn.attention(*inputs, backend=backend, mask=mask, dropout_p=0.3)
    expected, _ = reference.attention(
        *inputs,
        mask=effattn.pattern(query, key, backend=backend, mask=mask),
        bias=backend.reference_bias(query, key, mask=mask or effattn.Everything(), query_offset=0),
        dropout_p=0.3,
        dropout_seed=seed,
    )
    torch.testing.assert_close(output, expected)
    weight = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    got, want = (torch.autograd.grad((t * weight).sum(), inputs) for t in (output, expected))
    torch.testing.assert_close(got, want)
    # Some weight was dropped indeed.
    plain = effattn.attention(*inputs, backend=backend, mask=mask)
    assert not torch.allclose(output, plain, atol=1e-3)
