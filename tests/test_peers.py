"""The peers run their packages' own code, and compute what they say; a package that is missing is a reason."""

import functools
import sys
from pathlib import Path

import pytest
import torch

import effattn
from effattn import Causal, UnsupportedError, Window, backend
from effattn.bench.errors import output_errors
from effattn.bench.inputs import make_inputs
from effattn.bench.workers import load_plugin
from effattn.testing import contract_cases

PLUGIN = str(Path(__file__).parents[1] / "experiments" / "peers.py")
NAMES = (
    "peer_flex_band",
    "peer_hf_longformer",
    "peer_hf_reformer",
    "peer_local_attention",
    "peer_nystrom",
    "peer_performer",
    "peer_reformer_pytorch",
    "peer_sdpa_dense",
)
BANDS = ("peer_local_attention(window=16)", "peer_hf_longformer(window=16)", "peer_flex_band(window=16)")
HASHED = (
    "peer_reformer_pytorch(bucket_size=8)",
    "peer_reformer_pytorch(bucket_size=8, order_seed=3)",
    "peer_hf_reformer(bucket_size=8, num_hashes=2)",
)


@pytest.fixture(scope="module", autouse=True)
def peers():
    effattn.names()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_registry", dict(backend._registry))
        patch.setattr(backend, "_parsed", {})
        yield load_plugin(PLUGIN)
    sys.modules.pop("effattn_plugin_peers")


def needs(spec):
    """Skip where the package is missing, with its reason."""
    missing = effattn.get(spec).unavailable()
    if missing:
        pytest.skip(missing)
    return spec


@functools.cache
def inputs(dtype=torch.float32, seq_len=128):
    """Query and key shared, the key normalised, as both Reformers have it."""
    shape = {"batch_size": 2, "num_heads": 3, "num_kv_heads": 3, "seq_len": seq_len, "head_dim": 16}
    return make_inputs("clustered", **shape, dtype=dtype, device="cpu", seed=0)


def implementation_error(spec, mask, dtype=torch.float32, scale=0.25):
    given = inputs(dtype)
    tensors = given.query, given.key, given.value
    torch.manual_seed(0)
    output = effattn.attention(*tensors, backend=spec, mask=mask, scale=scale)
    torch.manual_seed(0)
    pattern = effattn.pattern(*tensors[:2], backend=spec, mask=mask)
    torch.manual_seed(0)
    weights = effattn.get(spec).reference_bias(*tensors[:2], mask=mask, query_offset=0)
    errors = output_errors(
        output, *tensors, mask=mask, pattern=pattern, weights=weights, scale=scale, rows=torch.arange(128)
    )
    return errors["implementation_rel_l2"]


def test_all_are_registered():
    assert tuple(name for name in effattn.names() if name.startswith("peer_")) == NAMES


@pytest.mark.parametrize("spec", [*BANDS, *HASHED, "peer_sdpa_dense"])
def test_each_computes_its_pattern(spec):
    spec = needs(spec)
    assert implementation_error(spec, effattn.Everything()) < 2e-6
    assert implementation_error(spec, effattn.Everything(), scale=0.1) < 2e-6
    assert implementation_error(spec, effattn.Everything(), torch.bfloat16) < 0.05


@pytest.mark.parametrize("spec", ["peer_local_attention(window=16)", "peer_flex_band(window=16)", "peer_sdpa_dense"])
def test_what_takes_a_causal_mask_keeps_it(spec):
    assert implementation_error(needs(spec), Causal()) < 2e-6


@pytest.mark.parametrize("spec", BANDS)
def test_bands_agree_with_sliding_window_also_in_their_gradients(spec):
    spec = needs(spec)
    given = inputs()
    trains = effattn.get(spec).reasons(request(backward=True)) == []
    results = []
    for one in (spec, "sliding_window(left=16, right=16)"):
        tensors = [t.clone().requires_grad_(trains) for t in (given.query, given.key, given.value)]
        output = effattn.attention(*tensors, backend=one)
        grads = torch.autograd.grad(output.square().sum(), tensors) if trains else ()
        results.append((output, *grads))
    for peer, ours in zip(*results, strict=True):
        torch.testing.assert_close(peer, ours, atol=1e-4, rtol=1e-4)
    assert trains == (spec != "peer_flex_band(window=16)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reformer_with_our_order_is_our_lsh_except_in_first_chunks(dtype):
    spec = needs("peer_reformer_pytorch(bucket_size=8, order_seed=3)")
    given = inputs(dtype)
    tensors = given.query, given.key, given.value
    ours = "lsh(bucket_size=8, shared_qk=True, count='per_round', seed=3)"
    outputs = [effattn.attention(*tensors, backend=one) for one in (spec, ours)]
    patterns = [effattn.pattern(*tensors[:2], backend=one).dense(2, 3, 128, 128) for one in (spec, ours)]
    alike = (patterns[0] == patterns[1]).all(-1)
    assert 0.6 < alike.double().mean() < 1  # 4 of 4 x 16 chunks are first ones
    difference = (outputs[0] - outputs[1])[alike].norm() / outputs[1][alike].norm()
    assert difference < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("spec", HASHED)
def test_hashing_peers_refuse_the_gradient_of_two_and_give_that_of_one(spec):
    spec = needs(spec)
    assert "a backward pass" in effattn.get(spec).reasons(request(backward=True))[0]
    given = inputs()
    query, key, value = (t.clone().requires_grad_() for t in (given.query, given.key, given.value))
    output = effattn.attention(query, key, value, backend=effattn.get(spec, joint_gradient=True))
    grads = torch.autograd.grad(output.sum(), (query, key, value))
    assert grads[0].norm() > 0
    assert grads[1].norm() == 0
    # Weights sum to 1 in each row, so that every value's gradient does over all rows.
    torch.testing.assert_close(grads[2].sum((2, 3)), torch.full((2, 3), 128.0 * 16), rtol=1e-4, atol=0)


@pytest.mark.parametrize("spec", ["peer_performer", "peer_nystrom(num_landmarks=32)"])
def test_what_has_no_pattern_says_so_and_comes_near_full_attention_on_flat_scores(spec):
    peer = effattn.get(needs(spec))
    assert not peer.capabilities.pattern
    given = inputs()
    tensors = 0.05 * given.query, given.key, given.value
    full = effattn.attention(*tensors)
    assert (effattn.attention(*tensors, backend=peer) - full).norm() / full.norm() < 0.35


@pytest.mark.parametrize(
    ("spec", "seq_len", "multiple"),
    [(BANDS[0], 24, 16), (BANDS[1], 48, 32), (HASHED[0], 24, 16), (HASHED[2], 24, 16), ("peer_nystrom", 128, 256)],
)
def test_lengths_that_do_not_fit_are_refused(spec, seq_len, multiple):
    given = inputs(seq_len=seq_len)
    with pytest.raises(UnsupportedError, match=f"requested seq_len {seq_len}; supported multiples of {multiple}"):
        effattn.attention(given.query, given.key, given.value, backend=needs(spec))


def test_masks_that_a_package_does_not_know_are_refused():
    reasons = effattn.get("peer_local_attention").reasons(request(mask=Window(3, 3)))
    assert any("requested a mask of Window; supported Causal" in reason for reason in reasons)


def test_a_missing_package_is_a_reason(peers):
    reason = peers._why_missing("no-such-attention", "no_such_attention")
    assert reason == "requires no-such-attention, which cannot be imported here: No module named 'no_such_attention'"


@pytest.mark.parametrize("spec", ["peer_local_attention(window=8)", "peer_sdpa_dense", "peer_hf_longformer(window=4)"])
def test_the_contract_holds(spec):
    outcomes = [case.check() for case in contract_cases(needs(spec))]
    assert len(outcomes) > 100


def request(**fields):
    return effattn.Request(1, 2, 2, 512, 512, 16, 16, **fields)
