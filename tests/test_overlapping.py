"""Overlapping windows: views in one direction, sums in the other."""

import pytest
import torch

from effattn.kernels.overlapping import add_to_windows, windows


def test_windows_are_views_a_step_apart():
    keys = torch.arange(14.0).view(7, 2)
    seen = windows(keys[1:], count=3, width=2, step=2)
    assert seen[:, :, 0].tolist() == [[2, 4], [6, 8], [10, 12]]
    keys[3] = -1
    assert seen[1, 0].tolist() == [-1, -1]


@pytest.mark.parametrize("narrow", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("width", "step"), [(6, 2), (5, 2), (2, 2), (1, 3), (7, 3)])
def test_what_windows_share_is_summed(width, step, narrow):
    generator = torch.Generator().manual_seed(0)
    count, height, dim = 4, 3, 5
    target = torch.randn((count - 1) * step + width, dim, generator=generator, dtype=torch.float64)
    weights, rows = (
        torch.randint(-4, 5, (count, height, n), generator=generator).to(narrow) for n in (width, dim)
    )  # small integers: exact in bfloat16 too
    expected = target.clone()
    for tile in range(count):
        expected[tile * step : tile * step + width] += 0.5 * (weights[tile].mT @ rows[tile]).double()
    add_to_windows(target, weights, rows, step, alpha=0.5)
    torch.testing.assert_close(target, expected)
