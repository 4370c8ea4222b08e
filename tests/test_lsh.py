"""LSH attention: what it attends to, how often it counts it, and what its draws depend on."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import effattn
from effattn import Backend, Mask, attention, attention_weights, get, pattern, reference
from effattn.bench.inputs import make_inputs
from effattn.bench.memory import peak_memory
from effattn.kernels import hashing
from effattn.kernels.sorted_chunks import ChunkPlan
from effattn.masks import Causal, Dense, Everything, Padding

BATCH, HEADS = 2, 2


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(length: int = 50, shared: bool = False) -> list[Tensor]:
    query = draw(BATCH, HEADS, length, 8, seed=1)
    key = F.normalize(query, dim=-1) if shared else draw(BATCH, HEADS, length, 8, seed=2)
    return [t.requires_grad_() for t in (query, key, draw(BATCH, HEADS, length, 5, seed=3))]


def seen(backend: Backend | str, query: Tensor, key: Tensor, mask: Mask | None = None) -> Tensor:
    """The pattern as bool ``[batch, heads, query_len, key_len]``."""
    sizes = (*query.shape[:3], key.shape[2])
    return pattern(query, key, backend=backend, mask=mask).dense(*sizes)


def counts(backend: Backend, query: Tensor, key: Tensor, mask: Mask | None = None) -> Tensor:
    """How often ``count="per_round"`` counts each pair, ``[batch, heads, query_len, key_len]``."""
    log_count = backend.reference_bias(query, key, mask=mask or Everything(), query_offset=0)
    b, h, i, j = (torch.arange(n) for n in (*query.shape[:3], key.shape[2]))
    often = log_count(b[:, None, None, None], h[:, None, None], i[:, None], j).exp().round().long()
    return often * seen(backend, query, key, mask)


def assert_is_its_pattern(backend: Backend, tensors: list[Tensor], mask: Mask | None = None, **options: float) -> None:
    """Output, log-sum-exp and gradients against the dense reference of the backend's own pattern."""
    query, key, _ = tensors
    got = attention(*tensors, backend=backend, mask=mask, return_lse=True, **options)
    offset = key.shape[2] - query.shape[2]
    bias = backend.reference_bias(query, key, mask=mask or Everything(), query_offset=offset)
    own = pattern(query, key, backend=backend, mask=mask)
    want = reference.attention(*tensors, mask=own, bias=bias, **options)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(out.sin().sum() + lse.clamp(min=-99).sin().sum(), tensors) for out, lse in (got, want)]
    torch.testing.assert_close(*grads)


# Draws


def test_one_seed_gives_equal_bits_and_leaves_the_global_generator_alone():
    tensors = inputs()
    state = torch.get_rng_state()
    first, second = (attention(*tensors, backend="lsh(bucket_size=8, seed=3)") for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(attention(*tensors, backend="lsh(bucket_size=8, seed=3)"), first)


def test_seeds_differ():
    query, key, _ = inputs()
    first, second = (seen(f"lsh(bucket_size=8, num_hashes=1, seed={seed})", query, key) for seed in (0, 1))
    assert not torch.equal(first, second)


def test_without_a_seed_the_global_generator_decides():
    tensors, backend = inputs(), get("lsh(bucket_size=8, num_hashes=1, seed=None)")
    assert not backend.capabilities.deterministic
    torch.manual_seed(0)
    first, second = (attention(*tensors, backend=backend) for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(attention(*tensors, backend=backend), first)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    own = pattern(*tensors[:2], backend=backend)
    torch.testing.assert_close(first, reference.attention(*tensors, mask=own)[0])


# Counting


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("mask", [None, Causal()], ids=["none", "causal"])
def test_each_key_counts_once(shared, mask):
    """With all scores 0, the log-sum-exp counts keys; so it is told whether any was counted twice."""
    tensors = inputs(shared=shared)
    once = get("lsh(bucket_size=4, num_hashes=5)", shared_qk=shared)
    per_round = get(once, count="per_round")
    union, often = seen(once, *tensors[:2], mask), counts(per_round, *tensors[:2], mask)
    assert torch.equal(union, often > 0)
    assert often.max() > 1, "no pair was found twice: this example shows nothing"
    assert often.max() <= 5
    for backend, expected in ((once, union.sum(-1)), (per_round, often.sum(-1))):
        _, lse = attention(*tensors, backend=backend, mask=mask, scale=0.0, return_lse=True)
        torch.testing.assert_close(lse.exp(), expected.double())
        assert_is_its_pattern(backend, tensors, mask)


def test_counts_are_as_exact_as_the_scores():
    tensors, backend = inputs(), get("lsh(bucket_size=4, num_hashes=5, count='per_round')")
    own = pattern(*tensors[:2], backend=backend)
    weights = backend.reference_bias(*tensors[:2], mask=Everything(), query_offset=0)
    expected, _ = reference.attention(*tensors, mask=own, bias=weights)
    torch.testing.assert_close(attention(*tensors, backend=backend), expected, rtol=1e-12, atol=1e-12)


def test_one_round_meets_at_most_its_window():
    query, key, _ = inputs()
    for look_back, look_ahead in ((0, 0), (1, 0), (1, 1), (2, 1)):
        backend = get("lsh(bucket_size=6, num_hashes=1)", look_back=look_back, look_ahead=look_ahead)
        dense = seen(backend, query, key)
        assert (dense.sum(-1) == 6 * (1 + look_back + look_ahead)).all()


def test_more_rounds_only_add():
    query, key, _ = inputs()
    found = [seen(f"lsh(bucket_size=6, num_hashes={n})", query, key).sum() for n in (1, 2, 4, 8)]
    assert found == sorted(found)
    assert found[0] < found[-1]


# What hashing is for


def clusters(count: int, size: int) -> Tensor:
    """``count * size`` tokens in random order, in ``count`` far apart directions."""
    centres = F.normalize(draw(count, 32), dim=-1) * 10
    order = torch.randperm(count * size, generator=torch.Generator().manual_seed(4))
    return (centres.repeat_interleave(size, 0)[order] + 0.001 * draw(count * size, 32, seed=5))[None, None]


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
def test_tokens_that_are_alike_find_each_other(shared):
    """They share a bucket in every round, and a chunk with its neighbours holds them, unless clusters crowd it."""
    x = clusters(count=32, size=8)
    alike = torch.cdist(x[0, 0], x[0, 0]) < 1
    backend = get("lsh(bucket_size=16, num_hashes=2, look_ahead=1)", shared_qk=shared)
    dense = seen(backend, x, x)[0, 0]
    others = alike & ~torch.eye(256, dtype=torch.bool)
    assert (dense & others).sum() >= 0.95 * others.sum()
    assert dense.double().mean() < 0.5


@pytest.mark.parametrize("mask", [None, Causal()], ids=["none", "causal"])
def test_recall_rises_with_rounds(mask):
    """Recall: the share of full attention's weight that falls on pairs of the pattern."""
    query, key = draw(1, 1, 256, 8, seed=1), draw(1, 1, 256, 8, seed=2)
    (rows,) = reference.score_rows(query, key, mask=mask, scale=1.0)

    def recall(num_hashes: int) -> float:
        specs = (f"lsh(bucket_size=16, num_hashes={num_hashes}, seed={seed})" for seed in range(4))
        kept = [rows.weights[seen(spec, query, key, mask)].sum() / 256 for spec in specs]
        return torch.stack(kept).mean().item()

    recalls = [recall(n) for n in (1, 2, 4, 8)]
    assert recalls == sorted(recalls)
    assert recalls[-1] > recalls[0] + 0.2


# Lengths, padding, causality


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 53, 97])
def test_any_length(length, shared):
    for mask in (None, Causal()):
        assert_is_its_pattern(get("lsh(bucket_size=8, num_hashes=2)", shared_qk=shared), inputs(length, shared), mask)


@pytest.mark.parametrize("bucket_size", [1, 50, 1000])
def test_any_bucket_size(bucket_size):
    tensors = inputs()
    assert_is_its_pattern(get("lsh", bucket_size=bucket_size), tensors, Causal())
    if bucket_size >= 50:
        torch.testing.assert_close(
            attention(*tensors, backend=get("lsh", bucket_size=bucket_size)), attention(*tensors, backend="full")
        )


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
def test_padded_keys_are_never_attended_and_take_no_ones_place(shared):
    tensors, keep = inputs(shared=shared), torch.ones(BATCH, 50, dtype=torch.bool)
    keep[0, 20:] = False
    keep[1, ::3] = False
    backend = get("lsh(bucket_size=4, num_hashes=3, count='per_round')", shared_qk=shared)
    often = counts(backend, *tensors[:2], Padding(keep))
    assert not often.transpose(2, 3)[~keep.unsqueeze(1).expand(-1, HEADS, -1)].any()
    if not shared:  # every window is full of real keys
        assert (often.sum(-1) == 3 * 8).all()
    assert_is_its_pattern(backend, tensors, Padding(keep))


def test_a_batch_row_that_is_all_padding():
    keep = torch.ones(BATCH, 50, dtype=torch.bool)
    keep[0] = False
    for shared in (False, True):
        backend = get("lsh(bucket_size=4)", shared_qk=shared)
        output = attention(*inputs(shared=shared), backend=backend, mask=Padding(keep))
        assert not output[0].any()
        assert output[1].any(-1).all()
        assert_is_its_pattern(backend, inputs(shared=shared), Padding(keep))


def test_grouped_heads_share_keys_and_are_hashed_apart():
    query, key, value = draw(2, 6, 30, 8, seed=1), draw(2, 2, 30, 8, seed=2), draw(2, 2, 30, 5, seed=3)
    tensors = [t.requires_grad_() for t in (query, key, value)]
    backend = get("lsh(bucket_size=4, num_hashes=2)")
    assert_is_its_pattern(backend, tensors, Causal())
    repeated = [query, *(t.repeat_interleave(3, dim=1) for t in (key, value))]
    torch.testing.assert_close(attention(*tensors, backend=backend), attention(*repeated, backend=backend))


@pytest.mark.parametrize(("query_len", "key_len"), [(1, 50), (9, 50), (50, 9)])
def test_queries_and_keys_of_different_lengths(query_len, key_len):
    tensors = [draw(2, 2, n, 8, seed=n).requires_grad_() for n in (query_len, key_len, key_len)]
    backend = get("lsh(bucket_size=4, num_hashes=2)")
    got = attention(*tensors, backend=backend, mask=Causal())
    own = pattern(*tensors[:2], backend=backend, mask=Causal())
    torch.testing.assert_close(got, reference.attention(*tensors, mask=own)[0])


# Shared queries and keys


@pytest.mark.parametrize("scale", [None, 1e6, -1e6, 0.0])
@pytest.mark.parametrize("mask", [None, Causal()], ids=["none", "causal"])
def test_a_token_sees_itself_only_where_it_sees_nothing_else(scale, mask):
    """Whatever its score: it is the rule, not a large negative number, that keeps it out."""
    tensors, backend = inputs(shared=True), get("lsh(bucket_size=4, num_hashes=2, shared_qk=True)")
    dense = seen(backend, *tensors[:2], mask)
    itself = dense.diagonal(dim1=2, dim2=3)
    others = dense & ~torch.eye(50, dtype=torch.bool)
    assert torch.equal(itself, ~others.any(-1))
    if mask is not None:
        assert itself[:, :, 0].all()
    assert_is_its_pattern(backend, tensors, mask, **({} if scale is None else {"scale": scale}))


def test_a_token_that_sees_only_itself_gives_its_value():
    tensors = inputs(shared=True)
    output, lse = attention(*tensors, backend="lsh(bucket_size=4, shared_qk=True)", mask=Causal(), return_lse=True)
    query, key, value = tensors
    assert torch.equal(output[:, :, 0], value[:, :, 0])
    torch.testing.assert_close(lse[:, :, 0], (query[:, :, 0] * key[:, :, 0]).sum(-1) * 8**-0.5)


def test_a_token_that_may_not_see_itself_gives_zero():
    others = Dense(~torch.eye(50, dtype=torch.bool))
    tensors = inputs(shared=True)
    output, lse = attention(
        *tensors, backend="lsh(bucket_size=4, shared_qk=True)", mask=Causal() & others, return_lse=True
    )
    assert not output[:, :, 0].any()
    assert (lse[:, :, 0] == -math.inf).all()


def test_shared_queries_and_keys_need_one_length_and_as_many_heads():
    query, key = draw(1, 4, 9, 8), draw(1, 2, 8, 8)
    with pytest.raises(effattn.UnsupportedError) as refusal:
        attention(query, key, key, backend="lsh(shared_qk=True)", query_offset=3)
    assert refusal.value.reasons == (
        "requested 4 query heads on 2 key heads; supported equal numbers",
        "requested query_len 9 with key_len 8; supported equal lengths",
        "requested query_offset 3; supported key_len - query_len = -1",
    )


# Anchors


@pytest.mark.parametrize(
    ("length", "bucket_size", "share"), [(1024, 32, 0.6), (2048, 16, 0.35)], ids=["one level", "two levels"]
)
def test_anchors_find_what_rotations_miss(length, bucket_size, share):
    """On clusters, with fewer pairs: errors of 0.71 and 1.28 by rotations here, 0.33 and 0.39 by anchors."""
    sizes = {"batch_size": 1, "num_heads": 1, "num_kv_heads": 1, "seq_len": length, "head_dim": 64}
    drawn = make_inputs("clustered", **sizes, dtype=torch.float32, device="cpu", seed=0)
    tensors = (drawn.query, drawn.key, drawn.value)
    full = attention(*tensors, backend="full", mask=Dense(~torch.eye(length, dtype=torch.bool)))
    errors, pairs = [], []
    for directions in ("rotation", "anchors"):
        backend = get("lsh(shared_qk=True)", bucket_size=bucket_size, hashing=directions)
        errors.append(((attention(*tensors, backend=backend) - full).norm() / full.norm()).item())
        pairs.append(seen(backend, *tensors[:2]).sum())
    assert errors[1] < share * errors[0]
    assert pairs[1] < pairs[0]


def test_neighbouring_anchors_lie_in_order_along_the_line():
    sample, line = F.normalize(draw(3, 320, 8).float(), dim=-1), draw(3, 8, 1, seed=1).float()
    for anchors in hashing._anchors(sample, [20, 4], line):
        torch.testing.assert_close(anchors.norm(dim=-1), torch.ones(anchors.shape[:2]))
        assert (torch.bmm(anchors, line).diff(dim=1) >= 0).all()


OPTIONS = [
    {"hashing": "anchors"},
    {"hashing": "anchors", "shared_qk": True},
    {"local": True},
    {"local": True, "shared_qk": True, "hashing": "anchors"},
    {"sinks": 3},
    {"hashing": "anchors", "local": True, "sinks": 3},
    {"hashing": "anchors", "local": True, "sinks": 3, "count": "per_round"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 7, 50])
def test_every_option_is_its_pattern(options, length):
    keep = torch.ones(BATCH, length, dtype=torch.bool)
    keep[0, : length // 3] = False
    for mask in (None, Causal(), Causal() & Padding(keep)):
        backend = get("lsh(bucket_size=4, num_hashes=2)", **options)
        assert_is_its_pattern(backend, inputs(length, options.get("shared_qk", False)), mask)


@pytest.mark.parametrize(("query_len", "key_len"), [(1, 50), (9, 50), (50, 9)])
def test_options_with_grouped_heads_and_different_lengths(query_len, key_len):
    tensors = [draw(2, h, n, 8, seed=h + n).requires_grad_() for h, n in ((6, query_len), (2, key_len), (2, key_len))]
    for options in OPTIONS:
        if not options.get("shared_qk"):
            assert_is_its_pattern(get("lsh(bucket_size=4, num_hashes=2)", **options), tensors, Causal())


def test_many_anchors_come_in_two_levels():
    """Past 64 buckets; what lies together still finds together: each key's cluster is 8 of 2048 keys."""
    x = clusters(count=256, size=8)
    alike = torch.cdist(x[0, 0], x[0, 0]) < 1
    dense = seen("lsh(bucket_size=16, num_hashes=2, hashing='anchors', look_ahead=1)", x, x)[0, 0]
    assert (dense & alike).sum() >= 0.95 * alike.sum()
    assert dense.double().mean() < 0.06
    tensors = [draw(1, 1, 600, 8, seed=s).requires_grad_() for s in (1, 2, 3)]
    assert_is_its_pattern(get("lsh(bucket_size=2, num_hashes=2, hashing='anchors')"), tensors, Causal())


@pytest.mark.parametrize("options", [{"hashing": "anchors"}, {"hashing": "anchors", "shared_qk": True}], ids=str)
def test_draws_of_anchors_are_the_seeds_alone(options):
    tensors, state = inputs(shared=options.get("shared_qk", False)), torch.get_rng_state()
    backends = [get("lsh(bucket_size=4, num_hashes=1)", seed=seed, **options) for seed in (3, 3, 4)]
    first, again, other = (attention(*tensors, backend=backend) for backend in backends)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    alone = attention(*(t[1:] for t in tensors), backend=backends[0])
    assert torch.equal(first[1:], alone), "another batch row had a say"


def plan_of(query: Tensor, key: Tensor, keep: Tensor | None = None) -> ChunkPlan:
    """A plan by anchors."""
    sizes = {"query_offset": 0, "chunk_size": 4, "num_hashes": 3, "look_back": 1, "look_ahead": 0, "sinks": 2}
    return hashing.plan_chunks(query, key, keep, shared=False, seed=0, hashing="anchors", **sizes)


@pytest.mark.parametrize("hidden", [1e30, math.nan, math.inf])
def test_padded_keys_have_no_say_in_the_anchors(hidden):
    keep = torch.ones(BATCH, 50, dtype=torch.bool)
    keep[0, 30:], keep[1, ::3] = False, False
    query, key, _ = (t.detach() for t in inputs())
    other = key.masked_fill(~keep[:, None, :, None], hidden)
    plans = (plan_of(query, k, keep).tensors for k in (key, other))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*plans, strict=True))


def test_sinks_and_queries_have_no_say_in_the_anchors():
    query, key, _ = (t.detach() for t in inputs())
    other = key.clone()
    other[:, :, :2] = 1e3 * draw(BATCH, HEADS, 2, 8, seed=9)
    orders = [plan_of(q, k).key_order for q, k in ((query, key), (-query, key), (query, other))]
    assert torch.equal(orders[0], orders[1])
    assert torch.equal(orders[0], orders[2])


@pytest.mark.parametrize("directions", ["rotation", "anchors"])
def test_no_gradient_and_no_value_comes_from_the_future(directions):
    query, key, value = inputs()
    backend = get("lsh(bucket_size=4, local=True, sinks=2)", hashing=directions)
    output = attention(query, key, value, backend=backend, mask=Causal())
    grads = torch.autograd.grad(output[:, :, :30].sum(), (query, key, value))
    assert not any(grad[:, :, 30:].any() for grad in grads)
    later = value.detach().clone()
    later[:, :, 30:] = 1e6
    assert torch.equal(attention(query, key, later, backend=backend, mask=Causal())[:, :, :30], output[:, :, :30])


def test_a_key_that_is_not_finite_breaks_no_order():
    query, key, value = (t.detach() for t in inputs(300))
    key[0, 0, 7] = math.nan
    dense = seen("lsh(bucket_size=2, num_hashes=2, hashing='anchors')", query, key)
    assert (dense.sum(-1) >= 4).all()
    assert attention(query, key, value, backend="lsh(bucket_size=2, hashing='anchors')")[1].isfinite().all()


# The local round and the sinks


def test_the_local_round_meets_what_stands_near():
    query, key, _ = inputs()
    near = (torch.arange(50)[:, None] - torch.arange(50)).abs() < 4
    before = near & Causal().dense(1, 1, 50, 50)[0, 0]
    for shared in (False, True):
        backend = get("lsh(bucket_size=8, num_hashes=1, local=True)", shared_qk=shared)
        dense = seen(backend, query, F.normalize(query, dim=-1) if shared else key, Causal())
        own = torch.eye(50, dtype=torch.bool)
        assert (dense | own)[..., before | own].all()
        without = seen(get(backend, local=False), query, F.normalize(query, dim=-1) if shared else key, Causal())
        assert not (without | own)[..., before].all()


def test_sinks_are_the_first_real_keys_and_stay_out_of_the_hashing():
    query, key, _ = inputs()
    keep = torch.ones(BATCH, 50, dtype=torch.bool)
    keep[0, :20] = False
    dense = seen("lsh(bucket_size=4, num_hashes=1, sinks=3)", query, key, Padding(keep))
    assert dense[0, :, :, 20:23].all()
    assert dense[1, :, :, :3].all()
    assert (dense.sum(-1) == 3 + 8).all(), "a sink took another key's place"


@pytest.mark.parametrize("sinks", [50, 1000])
def test_where_all_keys_are_sinks_attention_is_full(sinks):
    tensors = inputs()
    got = attention(*tensors, backend=get("lsh(bucket_size=4)", sinks=sinks), mask=Causal())
    torch.testing.assert_close(got, attention(*tensors, backend="full", mask=Causal()))


# Edges of the approximation


@pytest.mark.parametrize("count", ["once", "per_round"])
def test_rows_whose_bucket_holds_only_the_future_give_zero(count):
    """One key a window: under a causal mask, about half of the rows meet a later key, and so none."""
    tensors, backend = inputs(), get("lsh(bucket_size=1, num_hashes=1, look_back=0)", count=count)
    output, lse = attention(*tensors, backend=backend, mask=Causal(), return_lse=True)
    nothing = ~seen(backend, *tensors[:2], Causal()).any(-1)
    assert 0 < nothing.sum() < nothing.numel()
    assert torch.equal(lse == -math.inf, nothing)
    assert not output[nothing].any()
    grads = torch.autograd.grad(output.sum() + lse[~nothing].sum(), tensors)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][nothing].any()


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
def test_a_bucket_longer_than_two_chunks_is_cut_and_nothing_breaks(shared):
    """Identical keys share one bucket in every round: a row meets those that the sort puts near it, by position."""
    x = torch.ones(1, 1, 64, 8, dtype=torch.float64).requires_grad_()
    backend = get("lsh(bucket_size=8, num_hashes=3)", shared_qk=shared)
    value = torch.eye(64, dtype=torch.float64)[None, None].requires_grad_()
    dense = seen(backend, x, x)[0, 0]
    near = (torch.arange(64)[:, None] - torch.arange(64)).abs() < 16
    assert not (dense & ~near).any()
    assert (dense.sum(-1) >= 8).all()
    assert not dense.all()
    output = attention(x, x, value, backend=backend)[0, 0]
    torch.testing.assert_close(output, dense / dense.sum(-1, keepdim=True).double())
    assert torch.autograd.grad(output.sum(), x)[0].isfinite().all()


def test_many_buckets_are_made_of_two_rotations():
    """Past 128 buckets the hash is factored; the pattern stays as wide and the computation exact."""
    query, key, value = (draw(1, 1, 600, 8, seed=s).requires_grad_() for s in (1, 2, 3))
    backend = get("lsh(bucket_size=2, num_hashes=2)")
    assert seen(backend, query, key).sum(-1).max() <= 8
    assert_is_its_pattern(backend, [query, key, value], Causal())


@pytest.mark.parametrize("spec", ["lsh", "lsh(hashing='anchors', local=True, sinks=4)"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_memory_grows_with_the_length(backward, spec):
    """Also while the number of buckets in one rotation grows, up to 128 of them."""

    def peak(length: int) -> int:
        tensors = [draw(1, 2, length, 16).float().requires_grad_() for _ in range(3)]

        def call() -> object:
            output = attention(*tensors, backend=spec, mask=Causal())
            return torch.autograd.grad(output.sum(), tensors) if backward else output

        return peak_memory(call, "cpu")

    peaks = [peak(length) for length in (1024, 2048, 4096, 8192)]
    assert all(after <= 2.2 * before for before, after in itertools.pairwise(peaks))


@pytest.mark.parametrize("spec", ["lsh(count='per_round')", "lsh(shared_qk=True)", "lsh(hashing='anchors', sinks=2)"])
@pytest.mark.parametrize(
    ("batch", "heads", "query_len", "key_len"), [(1, 0, 5, 5), (0, 2, 5, 5), (1, 2, 0, 0), (1, 2, 5, 0)]
)
def test_the_pattern_of_nothing(spec, batch, heads, query_len, key_len):
    query, key = torch.zeros(batch, heads, query_len, 8), torch.zeros(batch, heads, key_len, 8)
    assert seen(spec, query, key).shape == (batch, heads, query_len, key_len)
    assert attention_weights(query, key, backend=spec).shape == (batch, heads, query_len, key_len)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bucket_size": 0}, "bucket_size must be an integer >= 1, got 0"),
        ({"num_hashes": 0}, "num_hashes must be an integer >= 1, got 0"),
        ({"look_back": -1}, "look_back must be an integer >= 0, got -1"),
        ({"look_ahead": 0.5}, "look_ahead must be an integer >= 0, got 0.5"),
        ({"seed": -1}, "seed must be an integer >= 0 or None, got -1"),
        ({"shared_qk": 1}, "shared_qk must be True or False, got 1"),
        ({"hashing": "kmeans"}, "hashing must be 'rotation' or 'anchors', got 'kmeans'"),
        ({"local": 1}, "local must be True or False, got 1"),
        ({"sinks": -1}, "sinks must be an integer >= 0, got -1"),
        ({"sinks": 2, "shared_qk": True}, "sinks must be 0 with shared_qk, got 2"),
        ({"count": "twice"}, "count must be 'once' or 'per_round', got 'twice'"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=f"lsh: {message}"):
        get("lsh", **fields)
