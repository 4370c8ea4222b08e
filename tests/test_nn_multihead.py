"""Multi-head attention against PyTorch's, decoding against the prefill, and what it refuses."""

import copy
import pickle

import pytest
import torch
from torch import nn

import effattn
from effattn import Causal, Documents, Padding, UnsupportedError, Window
from effattn.nn import ALiBi, KVCache, MultiheadAttention, Rotary, set_backend

EXACT = ("full", "sdpa", "chunked", "sliding_window(left=None, right=None)")
D, H, L = 24, 4, 13


def states(batch_size=2, length=L, seed=0):
    return torch.randn(batch_size, length, D, generator=torch.Generator().manual_seed(seed))


def module(seed=0, **options):
    torch.manual_seed(seed)
    return MultiheadAttention(D, H, **{"backend": "full", **options})


def copied_from_torch(**options):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(D, H, batch_first=True)
    nn.init.normal_(theirs.in_proj_bias)
    nn.init.normal_(theirs.out_proj.bias)
    ours = module(**options)
    with torch.no_grad():
        for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
            getattr(ours, name).weight.copy_(theirs.in_proj_weight.chunk(3)[index])
            getattr(ours, name).bias.copy_(theirs.in_proj_bias.chunk(3)[index])
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    return theirs, ours


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("case", ["plain", "causal", "padded", "cross"])
def test_equals_torchs_module(backend, case):
    theirs, ours = copied_from_torch(backend=backend)
    x, context, mask, options = states(), None, None, {}
    if case == "causal":
        mask, options = Causal(), {"attn_mask": torch.ones(L, L).triu(1).bool()}
    keep = torch.arange(L) >= torch.tensor([[0], [4]])
    if case == "padded":
        mask, options = Padding(keep), {"key_padding_mask": ~keep}
    if case == "cross":
        context, mask = states(length=7, seed=1), Padding(torch.arange(7) < torch.tensor([[7], [3]]))
        options = {"key_padding_mask": ~mask.keep}
    keys = x if context is None else context
    expected, weights = theirs(x, keys, keys, average_attn_weights=False, **options)
    torch.testing.assert_close(ours(x, context, mask=mask), expected)
    torch.testing.assert_close(ours.weights(x, context, mask=mask), weights)


def test_a_bool_tensor_masks_and_a_floating_one_biases():
    allowed = torch.rand(L, L, generator=torch.Generator().manual_seed(2)) < 0.7
    bias = torch.zeros(L, L).masked_fill(~allowed, -torch.inf)
    attention = module()
    x = states()
    outputs = [attention(x, mask=allowed), attention(x, mask=bias), attention(x, bias=bias)]
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[2])
    kinds = [attention.weights(x, mask=allowed), attention.weights(x, mask=bias), attention.weights(x, bias=bias)]
    torch.testing.assert_close(kinds[0], kinds[1])
    torch.testing.assert_close(kinds[0], kinds[2])


def test_a_bias_joins_that_of_alibi():
    attention = module(positions=ALiBi(H))
    bias = torch.randn(L, L, generator=torch.Generator().manual_seed(2))
    plain = module()
    both = bias + attention.positions(Causal(), L, L, 0)
    for given in (
        {"bias": bias, "mask": Causal()},
        {"mask": bias.masked_fill(torch.ones(L, L).triu(1) > 0, -torch.inf)},
    ):
        torch.testing.assert_close(attention(states(), **given), plain(states(), mask=Causal(), bias=both))


def test_weights_under_autocast_are_in_single_precision():
    attention = module(positions=Rotary(D // H))
    with torch.autocast("cpu", torch.bfloat16):
        weights = attention.weights(states())
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, H, L), atol=1e-5, rtol=0)
    torch.testing.assert_close(weights, attention.weights(states()), atol=0.02, rtol=0)


def test_grouped_heads_equal_repeated_ones():
    grouped, whole = module(num_kv_heads=2), module()
    assert grouped.k_proj.weight.shape == (2 * D // H, D)
    with torch.no_grad():
        for name in ("q_proj", "out_proj"):
            getattr(whole, name).load_state_dict(getattr(grouped, name).state_dict())
        for name in ("k_proj", "v_proj"):
            narrow, wide = getattr(grouped, name), getattr(whole, name)
            wide.weight.copy_(narrow.weight.view(2, -1, D).repeat_interleave(2, dim=0).reshape(D, D))
            wide.bias.copy_(narrow.bias.view(2, -1).repeat_interleave(2, dim=0).reshape(D))
    torch.testing.assert_close(grouped(states(), mask=Causal()), whole(states(), mask=Causal()))


@pytest.mark.parametrize("backend", [*EXACT, "sliding_window(left=4, right=0)"])
@pytest.mark.parametrize("positions", [None, Rotary(D // H), ALiBi(H)], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("pieces", [(1,) * L, (5, 1, 7), (L - 1, 1)], ids=str)
def test_pieces_with_a_cache_equal_the_whole(backend, positions, pieces):
    attention = module(backend=backend, positions=positions, num_kv_heads=2)
    x = states()
    keep = torch.arange(L) >= torch.tensor([[0], [3]])
    whole = attention(x, mask=Causal() & Padding(keep))
    cache, outputs = KVCache(), []
    for piece in x.split(pieces, dim=1):
        seen = cache.length + piece.shape[1]
        outputs.append(attention(piece, mask=Causal() & Padding(keep[:, :seen]), cache=cache))
    assert cache.length == L
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, atol=2e-6, rtol=1e-5)


def test_a_context_is_projected_once():
    attention = module()
    context = states(length=5, seed=3)
    cache = KVCache()
    first = attention(states(), context, cache=cache)
    torch.testing.assert_close(first, attention(states(), context))
    attention.k_proj = None  # is not asked again
    torch.testing.assert_close(attention(states()[:, :1], context, cache=cache), first[:, :1])
    with pytest.raises(ValueError, match=r"the cache holds a context of \[batch, seq\] = \[2, 5\], got \[2, 4\]"):
        attention(states(), context[:, :4], cache=cache)


@pytest.mark.parametrize(
    "backend",
    ["sliding_window(left=3, right=2, global_tokens=(0,))", "lsh(bucket_size=4, num_hashes=2)", "sdpa"],
)
def test_weights_are_those_of_the_backends_own_pattern(backend):
    attention = module(backend=backend, positions=Rotary(D // H))
    x, mask = states(length=30), Padding(torch.arange(30) < torch.tensor([[30], [21]]))
    weights = attention.weights(x, mask=mask)
    value = attention.v_proj(x).unflatten(2, (H, -1)).transpose(1, 2)
    output = attention.out_proj((weights @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(output, attention(x, mask=mask), atol=1e-5, rtol=1e-5)
    if backend != "sdpa":
        assert (weights == 0).double().mean() > 0.3
    assert weights.requires_grad is False


def test_weights_that_count_a_key_more_than_once():
    attention = module(backend="lsh(bucket_size=4, num_hashes=3, count='per_round')")
    x = states(length=30)
    value = attention.v_proj(x).unflatten(2, (H, -1)).transpose(1, 2)
    output = attention.out_proj((attention.weights(x) @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(output, attention(x), atol=1e-5, rtol=1e-5)


def test_weights_of_what_has_none_are_refused():
    with pytest.raises(UnsupportedError, match="draws anew at each call; set its seed"):
        module(backend="lsh(seed=None)").weights(states())
    with pytest.raises(UnsupportedError, match="requested a bias; supported none"):
        module(backend="lsh").weights(states(), bias=torch.zeros(L, L))


def test_dropout_acts_in_training_alone_and_follows_the_seed():
    attention = module(dropout=0.5)
    x = states()
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(attention(x))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    attention.eval()
    assert torch.equal(attention(x), attention(x))
    torch.testing.assert_close(attention(x), module()(x))


def test_rows_that_see_nothing_and_empty_inputs():
    attention = module(bias=False)
    keep = torch.ones(2, L, dtype=torch.bool)
    keep[1] = False
    x = states().requires_grad_()
    output = attention(x, mask=Padding(keep))
    assert (output[1] == 0).all()
    output.sum().backward()
    assert x.grad.isfinite().all()
    assert attention(states(batch_size=0)).shape == (0, L, D)
    assert attention(states(length=0)).shape == (2, 0, D)
    assert attention.weights(states(length=0)).shape == (2, H, 0, 0)


def test_documents_do_not_see_each_other():
    attention = module(positions=Rotary(D // H))
    x = states()
    packed = attention(x, mask=Causal() & Documents(torch.tensor([[0] * 6 + [1] * 7])))
    torch.testing.assert_close(packed[:, 6:], attention(x[:, 6:], mask=Causal()), atol=1e-6, rtol=1e-5)


def test_the_backend_is_an_attribute():
    attention = module(backend="sdpa")
    assert attention.backend == effattn.get("sdpa")
    attention.backend = "sliding_window(left=2, right=2)"
    torch.testing.assert_close(attention(states()), module()(states(), mask=Window(2, 2)))
    assert "backend='sliding_window(left=2, right=2)'" in repr(attention)
    with pytest.raises(ValueError, match="backend: unknown name 'nothing'"):
        attention.backend = "nothing"
    assert attention.backend == effattn.get("sliding_window(left=2, right=2)")


def test_set_backend_reaches_every_module_or_says_that_there_is_none():
    model = nn.Sequential(module(), nn.ModuleList([module()]))
    set_backend(model, "chunked")
    assert {str(m.backend) for m in model.modules() if isinstance(m, MultiheadAttention)} == {"chunked"}
    with pytest.raises(ValueError, match=r"no effattn.nn.MultiheadAttention in Linear"):
        set_backend(nn.Linear(1, 1), "full")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_compute_the_same(duplicate):
    attention = module(backend="sliding_window(left=2, right=2)", positions=ALiBi(H))
    twin = duplicate(attention)
    assert torch.equal(twin(states()), attention(states()))
    twin.backend = "full"
    assert attention.backend.name == "sliding_window"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MultiheadAttention(10, 4), "d_model must be a multiple of num_heads = 4, got 10"),
        (lambda: MultiheadAttention(D, 4, 3), "num_kv_heads must divide num_heads = 4, got 3"),
        (lambda: MultiheadAttention(D, 0), "num_heads must be an integer >= 1, got 0"),
        (lambda: MultiheadAttention(D, 4, dropout=1.5), r"dropout must lie in 0..1, got 1.5"),
        (lambda: MultiheadAttention(D, 4, positions=Rotary(4)), "positions must be rotary for head_dim 6, got 4"),
        (lambda: MultiheadAttention(D, 4, positions=ALiBi(3)), "positions must be ALiBi for 4 heads, got 3"),
        (lambda: MultiheadAttention(D, 4, backend="ful"), "did you mean 'full'"),
        (lambda: module()(torch.zeros(2, D)), r"x must have shape \[batch, seq, d_model = 24\], got \[2, 24\]"),
        (lambda: module()(torch.zeros(2, 3, 4)), r"x must have shape .* got \[2, 3, 4\]"),
        (lambda: module()(states(), torch.zeros(2, 3)), r"context must have shape .* got \[2, 3\]"),
        (lambda: module(positions=ALiBi(H))(states(), states()), "ALiBi is for self-attention"),
        (lambda: module()(states(), cache=KVCache()), r"a cache needs a causal mask.*got Everything\(\)"),
        (lambda: module()(states(), mask=Window(2, 2), cache=KVCache()), r"got Window\(left=2, right=2"),
        (lambda: module()(states(), mask=torch.ones(L, L) > 0, cache=KVCache()), r"got Dense\(bool\[1, 1, 13, 13\]\)"),
        (lambda: module()(states(), mask=torch.ones(L, L).long()), r"mask must be a Mask, .* got torch.int64"),
        (lambda: module()(states(), mask=torch.ones(L, L), bias=torch.ones(L, L)), "a floating mask is a bias"),
        (lambda: module()(states(), mask=Padding(torch.ones(2, 5) > 0)), r"padding: keep must have shape .* \[2, 13\]"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_cache_of_another_batch_is_refused():
    attention, cache = module(), KVCache()
    attention(states(), mask=Causal(), cache=cache)
    with pytest.raises(ValueError, match="cache: holds a batch of 2, got one of 3"):
        attention(states(batch_size=3), mask=Causal(), cache=cache)
    with pytest.raises(ValueError, match=r"cache: holds torch.float32, got torch.float64"):
        attention.double()(states().double(), mask=Causal(), cache=cache)


def test_a_backend_without_decoding_says_so():
    attention, cache = module(backend="lsh(shared_qk=True)"), KVCache()
    attention(states(), mask=Causal(), cache=cache)
    with pytest.raises(UnsupportedError, match="query_len 1 with key_len 14; supported equal lengths"):
        attention(states(length=1), mask=Causal(), cache=cache)
