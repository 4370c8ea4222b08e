"""Swapping in PyTorch's own modules, and in calls of F.scaled_dot_product_attention wherever they stand."""

import copy
import functools
import importlib.util
import io
import sys
import warnings
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as bound_early
from torch.utils.checkpoint import checkpoint

import effattn
import effattn.swap
from effattn.backends.full import Full

EXACT = ["full", "sdpa", "chunked", "sliding_window(left=64, right=64)"]
CAUSAL = nn.Transformer.generate_square_subsequent_mask(11)
PAD = torch.arange(11)[None] >= torch.tensor([[11], [7]])  # True = padding


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, **{"batch_first": True, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot use nested tensors
        return nn.TransformerEncoder(layer, 2).eval()


def attributes_of(model):
    return {path: dict(vars(module)) for path, module in model.named_modules()}


# nn.MultiheadAttention and the layers around it --------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"bias": False}, {"activation": "gelu"}])
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"src_key_padding_mask": PAD},
        {"mask": CAUSAL, "is_causal": True},
        {"mask": CAUSAL},
        {"mask": CAUSAL < 0, "src_key_padding_mask": PAD},
    ],
)
def test_an_encoder_is_served_past_its_fast_path(options, masks):
    model, x = encoder(**options), randn(2, 11, 32)
    keep = ~PAD if "src_key_padding_mask" in masks else torch.ones(2, 11, dtype=torch.bool)
    before = attributes_of(model)
    with torch.no_grad():
        want = model(x, **masks)[keep]
        for backend in EXACT:
            with effattn.swap(model, backend) as swapped:
                torch.testing.assert_close(model(x, **masks)[keep], want, atol=1e-5, rtol=1e-5)
            assert [site.calls for site in swapped.sites] == [1, 1]
        assert attributes_of(model) == before
        assert torch.equal(model(x, **masks)[keep], want)


def record(monkeypatch, name):
    """The option ``name`` of every call of ``full`` from here on."""
    seen, attend = [], Full.attend

    def recorded(self, *tensors, **options):
        seen.append(options[name])
        return attend(self, *tensors, **options)

    monkeypatch.setattr(Full, "attend", recorded)
    return seen


def test_a_causal_encoder_holds_no_dense_mask(monkeypatch):
    seen, model = record(monkeypatch, "mask"), encoder()
    with effattn.swap(model, "full"):
        model(randn(2, 11, 32), mask=CAUSAL, src_key_padding_mask=torch.zeros(2, 11))
    assert {repr(mask) for mask in seen} == {"Causal() & Padding(bool[2, 11])"}


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_decoder_serves_self_and_cross_attention(batch_first):
    torch.manual_seed(0)
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, batch_first=batch_first), 2).eval()
    target, memory = randn(2, 7, 32), randn(2, 11, 32, seed=1)
    if not batch_first:
        target, memory = target.transpose(0, 1), memory.transpose(0, 1)
    masks = {"tgt_mask": CAUSAL[:7, :7], "memory_key_padding_mask": PAD, "tgt_is_causal": True}
    with torch.no_grad():
        want = model(target, memory, **masks)
        with effattn.swap(model, "chunked") as swapped:
            torch.testing.assert_close(model(target, memory, **masks), want)
    assert [site.path for site in swapped.sites] == [
        f"layers.{i}.{name}" for i in range(2) for name in ("self_attn", "multihead_attn")
    ]
    assert [site.calls for site in swapped.sites] == [1] * 4


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"kdim": 16, "vdim": 24}, {"bias": False}])
def test_multihead_attention_gives_what_pytorch_gives(options, need_weights, average):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 4, **options)
    query, key, value = randn(3, 5, 32), randn(3, 7, module.kdim, seed=1), randn(3, 7, module.vdim, seed=2)
    if not module.batch_first:
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    hidden = torch.arange(7) >= torch.tensor([[7], [4], [5]])
    some = torch.rand(5, 7, generator=torch.Generator().manual_seed(3)) < 0.3
    some[:, 0] = False
    per_head = some.expand(12, 5, 7)
    for masks in (
        {},
        {"key_padding_mask": hidden},
        {"attn_mask": some},
        {"attn_mask": per_head, "key_padding_mask": hidden},
        {"attn_mask": randn(5, 7)},
        {"attn_mask": randn(5, 7), "key_padding_mask": randn(3, 7).masked_fill(hidden, -torch.inf)},
    ):
        arguments = {**masks, "need_weights": need_weights, "average_attn_weights": average}
        want = module(query, key, value, **arguments)
        with effattn.swap(module, "full"):
            got = module(query, key, value, **arguments)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_unbatched_multihead_attention():
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(32, 4, batch_first=True), randn(5, 32)
    want = module(x, x, x, key_padding_mask=torch.arange(5) > 3)
    with effattn.swap(module, "chunked"):
        torch.testing.assert_close(module(x, x, x, key_padding_mask=torch.arange(5) > 3), want)


def test_dropout_is_the_modules_and_only_in_training(monkeypatch):
    rates = record(monkeypatch, "dropout_p")
    module, x = nn.MultiheadAttention(32, 4, dropout=0.3), randn(5, 1, 32)
    with effattn.swap(module, "full"):
        module(x, x, x)
        module.eval()
        module(x, x, x)
    assert rates == [0.3, 0.0]


def test_what_multihead_attention_cannot_serve_is_named():
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ValueError, match=f"MultiheadAttention cannot be served: it was made with {option}=True"):
            effattn.swap(nn.MultiheadAttention(32, 4, **{option: True}), "full")
    module, x = nn.MultiheadAttention(32, 4), randn(5, 1, 32)
    with effattn.swap(module, "full"), pytest.raises(ValueError, match="attn_mask: must be given with is_causal=True"):
        module(x, x, x, is_causal=True)


class Overridden(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


def test_a_subclass_with_a_forward_of_its_own_is_not_passed_by():
    with pytest.raises(ValueError, match="Overridden computes an attention of its own"):
        effattn.swap(nn.Sequential(Overridden(32, 4)), "full")


class Ours(nn.Module):
    """As this project's own layers do it: the backend is an attribute, or a property in front of one."""

    def __init__(self):
        super().__init__()
        self.linear, self._backend = nn.Linear(8, 8), effattn.get("full")

    @property
    def backend(self):
        return self._backend

    @backend.setter
    def backend(self, backend):
        self._backend = effattn.get(backend)

    def forward(self, x):
        x = self.linear(x)
        return effattn.attention(x, x, x, backend=self.backend)


class Fixed(nn.Module):
    def forward(self, x):
        return effattn.attention(x, x, x, backend="full")


def test_modules_that_hold_a_backend_are_given_another():
    model, x = Ours(), randn(2, 4, 9, 8)
    before = attributes_of(model)
    with effattn.swap(model, "sliding_window(left=1, right=1)") as swapped:
        got = model(x)
    inner = model.linear(x)
    assert torch.equal(got, effattn.attention(inner, inner, inner, backend="sliding_window(left=1, right=1)"))
    assert [(site.kind, site.calls) for site in swapped.sites] == [("effattn.attention", 1)]
    assert attributes_of(model) == before
    with pytest.raises(ValueError, match="Fixed computes an attention of its own"):
        effattn.swap(Fixed(), "chunked")


# Calls of F.scaled_dot_product_attention ---------------------------------------------------------------------


def helper(*tensors, **options):
    return bound_early(*tensors, **options)


class Processor:
    def __call__(self, *tensors, **options):
        return F.scaled_dot_product_attention(*tensors, **options)


class Block(nn.Module):
    """An attention that leaves the call itself to its subclass: one for each way in which models make it."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x, **options):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v, **options).transpose(1, 2).flatten(2)


class ByAttribute(Block):
    def attend(self, *tensors, **options):
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)


class BoundEarly(Block):
    def attend(self, *tensors, **options):
        return bound_early(*tensors, **options)


class ByHelper(Block):
    def attend(self, *tensors, **options):
        return helper(*tensors, **options)


class ByPartial(Block):
    def __init__(self):
        super().__init__()
        self.held = functools.partial(F.scaled_dot_product_attention, dropout_p=0.0)

    def attend(self, *tensors, **options):
        return self.held(*tensors, **options)


class ByProcessor(ByPartial):
    def __init__(self):
        super().__init__()
        self.held = Processor()


class ByMember(Block):
    attend = staticmethod(F.scaled_dot_product_attention)


class ByImportInside(Block):
    def attend(self, *tensors, **options):
        from torch.nn.functional import scaled_dot_product_attention as late

        return late(*tensors, **options)


class Decorated(Block):
    @torch.autocast("cpu", enabled=False)
    def attend(self, *tensors, **options):
        return bound_early(*tensors, **options)


WAYS = [ByAttribute, BoundEarly, ByHelper, ByPartial, ByProcessor, ByMember, ByImportInside, Decorated]


class Blocks(nn.Module):
    def __init__(self, *ways):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(way() for way in ways)

    def forward(self, x, **options):
        for block in self.blocks:
            x = x + block(x, **options)
        return x


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"attn_mask": CAUSAL}, {"attn_mask": ~PAD[:, None, None]}, {"scale": 0.3}],
)
def test_a_call_is_seen_by_whatever_name_it_is_made(options):
    model, x = Blocks(*WAYS), randn(2, 11, 32)
    before, want = attributes_of(model), model(x, **options)
    for backend in EXACT:
        with effattn.swap(model, backend) as swapped:
            torch.testing.assert_close(model(x, **options), want)
        assert [site.calls for site in swapped.sites] == [1] * len(WAYS)
    assert attributes_of(model) == before
    assert torch.equal(model(x, **options), want)


class Call(nn.Module):
    def forward(self, *tensors, **options):
        return F.scaled_dot_product_attention(*tensors, **options)


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((5, 8), (7, 8), (7, 6)), {}),
        (((3, 5, 8), (3, 7, 8), (3, 7, 6)), {"attn_mask": torch.ones(3, 5, 7).tril().bool()}),
        (((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 6)), {"attn_mask": torch.ones(2, 1, 1, 5, 7).tril().bool()}),
        (((2, 3, 4, 5, 8), (1, 3, 4, 7, 8), (2, 1, 4, 7, 6)), {}),
        (((2, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 6)), {"attn_mask": torch.ones(5, 7).tril()}),
        (((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)), {"enable_gqa": True}),
        (((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 6)), {}),
        (((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)), {"is_causal": True}),  # top-left aligned
        (((2, 4, 7, 8), (2, 4, 5, 8), (2, 4, 5, 6)), {"is_causal": True}),
    ],
)
def test_every_shape_that_pytorch_takes(shapes, options):
    model, tensors = Call(), [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
    want = model(*tensors, **options)
    for backend in ("full", "sdpa", "chunked"):
        with effattn.swap(model, backend) as swapped:
            torch.testing.assert_close(model(*tensors, **options), want)
        assert swapped.sites[0].calls == 1


def test_heads_that_do_not_fit_are_refused_as_by_pytorch():
    model = Call()
    tensors = randn(1, 4, 5, 8), randn(1, 2, 5, 8), randn(1, 2, 5, 8)
    with (
        effattn.swap(model, "full"),
        pytest.raises(ValueError, match="4 query heads on 2 key heads without enable_gqa"),
    ):
        model(*tensors)


def test_other_models_and_other_calls_are_left_alone():
    inside, outside = Blocks(ByAttribute), Blocks(ByAttribute)
    x = randn(2, 11, 32)
    want = outside(x)
    with effattn.swap(inside, "sliding_window(left=1, right=1)"):
        assert torch.equal(outside(x), want)


def test_a_checkpointed_block_is_recomputed_through_the_backend():
    model, x = Blocks(ByHelper), randn(2, 11, 32).requires_grad_()
    with effattn.swap(model, "sliding_window(left=2, right=0)") as swapped:
        (want,) = torch.autograd.grad(model(x).square().sum(), x)
        again = x + checkpoint(model.blocks[0], x, use_reentrant=False)
        (got,) = torch.autograd.grad(again.square().sum(), x)
    torch.testing.assert_close(got, want)
    assert swapped.sites[0].calls == 3


def test_the_innermost_swap_serves_and_outer_ones_come_back():
    model, x = Blocks(ByHelper, ByAttribute), randn(2, 11, 32)
    with effattn.swap(model, "sdpa") as outer:
        with effattn.swap(model, "full", layers=0) as inner:
            model(x)
        model(x)
    assert [site.calls for site in inner.sites] == [1, 0]
    assert [site.calls for site in outer.sites] == [1, 2]


class Around(ByAttribute):
    def __init__(self):
        super().__init__()
        self.inner = ByHelper()

    def forward(self, x):
        return super().forward(x) + self.inner(x)


def test_a_site_within_a_site_is_served_once():
    model, x = Around(), randn(2, 11, 32)
    want = model(x)
    for backend in EXACT:  # sdpa among them, which makes the call itself
        with effattn.swap(model, backend) as swapped:
            torch.testing.assert_close(model(x), want)
        assert [(site.path, site.calls) for site in swapped.sites] == [("", 1), ("inner", 1)]


def test_copies_and_pickles_are_served_on_their_own():
    model, x = Blocks(ByHelper), randn(2, 11, 32)
    swapped = effattn.swap(model, "sliding_window(left=2, right=0)")
    want = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x), want)
        with torch.no_grad():
            twin.blocks[0].qkv.weight.zero_()
        assert not torch.equal(twin(x), want)
    assert swapped.sites[0].calls == 1
    assert torch.equal(model(x), want)


def test_it_compiles_as_one_graph_and_a_later_swap_is_seen():
    model, x = nn.Sequential(Blocks(ByHelper, ByAttribute), encoder()), randn(2, 11, 32)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        want = model(x)
        torch.testing.assert_close(compiled(x), want)
        with effattn.swap(model, "sliding_window(left=2, right=0)") as swapped:
            local = model(x)
            for _ in range(3):
                torch.testing.assert_close(compiled(x), local)
        assert [site.calls for site in swapped.sites] == [4] * 4
        assert not torch.allclose(local, want)
        torch.testing.assert_close(compiled(x), want)


class TutorialAttention(nn.Module):
    """As many write it: a method of the same name that is not PyTorch's."""

    def forward(self, x):
        return self.scaled_dot_product_attention(x, x, x)

    def scaled_dot_product_attention(self, query, key, value):
        return (query @ key.mT).softmax(-1) @ value


def test_a_method_of_the_same_name_is_not_taken_for_the_call():
    with pytest.raises(ValueError, match="TutorialAttention computes an attention of its own"):
        effattn.swap(TutorialAttention(), "full")


def test_a_switched_off_call_is_named():
    model = Blocks(ByAttribute)
    model.blocks[0].fused_attn = False
    with pytest.raises(ValueError, match="ByAttribute cannot be served: its fused_attn is off"):
        effattn.swap(model, "full")


@pytest.fixture
def timm(monkeypatch):
    """timm, with a stand-in for torchvision where that is not installed: its vision transformers do not use it."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    if importlib.util.find_spec("torchvision") is None:
        for name in ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets", ".datasets.folder"):
            monkeypatch.setitem(sys.modules, f"torchvision{name}", MagicMock())
    import timm

    return timm


def test_a_vision_transformer_of_timm(timm):
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
    model = timm.models.vision_transformer.VisionTransformer(**sizes).eval()
    images = randn(2, 3, 32, 32)
    before = attributes_of(model)
    with torch.no_grad():
        want = model(images)
        for backend in EXACT:
            with effattn.swap(model, backend) as swapped:
                torch.testing.assert_close(model(images), want, atol=1e-5, rtol=1e-5)
            assert [(site.path, site.calls) for site in swapped.sites] == [("blocks.0.attn", 1), ("blocks.1.attn", 1)]
        assert torch.equal(model(images), want)
    assert attributes_of(model) == before
