"""Reformer's attention against Hugging Face's with its weights, the hashes pinned to ours."""

import pytest
import torch

import effattn
from effattn import Causal, Padding
from effattn.kernels.hashing import plan_chunks
from effattn.nn import ReformerAttention, from_huggingface
from effattn.nn.reformer import _unit

D, H, L, BUCKET = 24, 3, 64, 8


def states(length=L, seed=0):
    return torch.randn(2, length, D, generator=torch.Generator().manual_seed(seed))


def hugging_face(num_hashes, causal=False, length=L):
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    torch.manual_seed(0)
    config = ReformerConfig(
        hidden_size=D,
        num_attention_heads=H,
        attention_head_size=16,  # not D / H
        lsh_attn_chunk_length=BUCKET,
        num_hashes=num_hashes,
        num_buckets=2 * length // BUCKET,
        is_decoder=causal,
    )
    theirs = LSHSelfAttention(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return theirs


def pinned(ours, x, keep=None):
    """Buckets ``[B, H, rounds * L]`` that sort as ours do, and the rows that stand in no round's first chunk.

    A first chunk of Hugging Face's looks round to the last chunk; ours has nothing before it.
    """
    q = ours.query_key(x).unflatten(2, (H, -1)).transpose(1, 2)
    backend = ours.backend
    plan = plan_chunks(
        _unit(q),
        _unit(q),
        keep,
        query_offset=0,
        chunk_size=backend.bucket_size,
        num_hashes=backend.num_hashes,
        look_back=1,
        look_ahead=0,
        shared=True,
        seed=backend.seed,
    )
    rank = plan.key_rank.long().permute(1, 2, 0, 3)  # [B, H, rounds, L]
    buckets = rank + torch.arange(backend.num_hashes)[:, None] * x.shape[1]
    return buckets.flatten(2), (rank >= backend.bucket_size).all(dim=2)


@pytest.mark.parametrize("num_hashes", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_hugging_face_with_its_weights_and_pinned_hashes(num_hashes, causal, padded):
    theirs = hugging_face(num_hashes, causal)
    ours = from_huggingface(theirs)
    wanted = {"bucket_size": BUCKET, "num_hashes": num_hashes, "shared_qk": True, "count": "per_round"}
    assert ours.backend == effattn.get("lsh", **wanted)
    x = states()
    keep = torch.arange(L) < torch.tensor([[L], [L - 2 * BUCKET if padded else L]])
    buckets, comparable = pinned(ours, x, keep if padded else None)
    mask = (Causal() if causal else effattn.Everything()) & Padding(keep)
    # In float64: its score of -1e5 for a token itself leaves float32 three digits where nothing else is seen.
    expected = theirs.double()(x.double(), attention_mask=keep.long(), buckets=buckets).hidden_states.float()
    got = ours(x, mask=mask)
    rows = (comparable & keep[:, None]).transpose(1, 2)
    assert rows.double().mean() > 0.5
    expected, got = (t.unflatten(2, (H, -1))[rows] for t in (expected, got))
    assert expected.abs().mean() > 0.1
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_where_two_chunks_are_the_whole_hashes_do_not_matter():
    theirs = hugging_face(num_hashes=1, length=2 * BUCKET)
    ours = from_huggingface(theirs)
    weight = torch.randn(2, 2 * BUCKET, 3 * 16, generator=torch.Generator().manual_seed(1))
    theirs_x, ours_x = states(2 * BUCKET).requires_grad_(), states(2 * BUCKET).requires_grad_()
    expected, got = theirs(theirs_x).hidden_states, ours(ours_x)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    (expected * weight).sum().backward()
    (got * weight).sum().backward()
    torch.testing.assert_close(ours_x.grad, theirs_x.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.query_key.weight.grad, theirs.query_key.weight.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 7, 65])
def test_any_length(length):
    torch.manual_seed(0)
    ours = ReformerAttention(D, H, backend="lsh(bucket_size=8, shared_qk=True)")
    output = ours(states(length), mask=Causal())
    assert output.shape == (2, length, D)
    assert output.isfinite().all()
    first = ours.out_proj(ours.value(states(length))[:, :1])  # a first token sees itself alone
    torch.testing.assert_close(output[:, :1], first)


def test_a_vector_of_zeros_has_no_direction_and_no_nan():
    x = torch.zeros(1, 1, 2, 8, requires_grad=True)
    _unit(x).sum().backward()
    assert x.grad.isfinite().all()
    assert _unit(torch.ones(1, 1, 1, 8)).norm() == pytest.approx(1, abs=1e-5)


def test_dropout_acts_in_training_alone():
    torch.manual_seed(0)
    ours = ReformerAttention(D, H, dropout=0.5)
    assert not torch.equal(ours(states()), ours(states()))
    ours.eval()
    assert torch.equal(ours(states()), ours(states()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ReformerAttention(10, 4), "d_model must be a multiple of num_heads = 4, got 10"),
        (lambda: ReformerAttention(D, H, backend="lsh"), r"must share queries and keys.*got lsh"),
        (lambda: ReformerAttention(D, H, backend="full"), r"must share queries and keys.*got full"),
        (lambda: ReformerAttention(D, H)(torch.zeros(1, D)), r"x must have shape"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
