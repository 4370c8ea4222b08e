"""Modules and models under autocast, compilation, gradient checkpointing, DDP, copying, and a fixed seed."""

import copy
import pickle
import socket

import pytest
import torch
import torch.multiprocessing
from torch import nn

import effattn
from effattn.nn import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    EncoderLayer,
    GPTConfig,
    GPTForCausalLM,
    LongformerAttention,
    MultiheadAttention,
    ReformerAttention,
)

SIZES = {"vocab_size": 50, "d_model": 32, "num_layers": 2, "num_heads": 4, "max_len": 40}
IDS = torch.randint(50, (2, 33), generator=torch.Generator().manual_seed(0))
KEEP = (torch.arange(33) >= torch.tensor([[0], [5]])).long()


def build(kind, **options):
    torch.manual_seed(0)
    config = GPTConfig if kind is GPTForCausalLM else BertConfig
    return kind(config(**{"backend": "chunked", **SIZES, **options}))


def loss_of(model, ids=IDS, keep=KEEP):
    logits = model(ids, keep)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def stack_of(model):
    return model.bert if hasattr(model, "bert") else model.gpt


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "backend", ["full", "sdpa", "chunked", "sliding_window(left=4, right=4)", "lsh(bucket_size=8)"]
)
@pytest.mark.parametrize("kind", [BertForMaskedLM, GPTForCausalLM])
def test_autocast_trains_in_bfloat16_near_single_precision(kind, backend):
    model = build(kind, backend=backend).eval()
    seen = []
    out_proj = stack_of(model).layers[0].attention.out_proj
    out_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    expected = loss_of(model)
    expected.backward()
    exact = gradients(model)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model)
    loss.backward()
    assert seen == [torch.float32, torch.bfloat16]
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)
    for name, grad in gradients(model).items():
        assert grad.dtype == torch.float32
        if exact[name].norm() > 1e-3 and "lsh" not in backend:  # hashes of rounded numbers differ
            assert (grad - exact[name]).norm() / exact[name].norm() < 0.15, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_run_in_other_dtypes(dtype):
    for kind in (BertForMaskedLM, GPTForCausalLM):
        for positions in ("learned", "sinusoidal", "rotary", "alibi"):
            model = build(kind, positions=positions).eval()
            expected = model(IDS, KEEP)
            got = model.to(dtype)(IDS, KEEP)
            assert got.dtype == dtype
            assert (got - expected)[KEEP.bool()].abs().max() < (0.1 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(
    ("kind", "backend", "positions"),
    [
        (BertForMaskedLM, "chunked", "learned"),
        (BertForMaskedLM, "sdpa", "alibi"),
        (GPTForCausalLM, "sliding_window(left=4, right=0)", "rotary"),
        (GPTForCausalLM, "lsh(bucket_size=8, num_hashes=2)", "sinusoidal"),
    ],
)
def test_models_compile_as_one_graph(kind, backend, positions):
    model = build(kind, backend=backend, positions=positions, num_layers=1, dropout=0.0, attention_dropout=0.0)
    expected = loss_of(model)
    expected.backward()
    exact = gradients(model)
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = loss_of(compiled)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, exact[name], atol=1e-6, rtol=1e-4, msg=name)


def test_a_compiled_model_decodes_the_same_tokens():
    model = build(GPTForCausalLM, num_layers=1).eval()
    expected = model.generate(IDS[:, -9:], KEEP[:, 4:13], max_new_tokens=4)
    torch._dynamo.reset()
    model.compile(backend="eager")
    assert torch.equal(model.generate(IDS[:, -9:], KEEP[:, 4:13], max_new_tokens=4), expected)


def test_a_reformer_layer_compiles_as_one_graph():
    torch.manual_seed(0)
    layer = EncoderLayer(ReformerAttention(32, 4, backend="lsh(bucket_size=8, shared_qk=True)"), 64).eval()
    x = torch.randn(1, 20, 32)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


def test_a_compiled_model_follows_a_change_of_backend():
    model = build(BertForMaskedLM, num_layers=1).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(IDS)
    effattn.nn.set_backend(model, "sliding_window(left=1, right=1)")
    torch.testing.assert_close(compiled(IDS), model(IDS))


@pytest.mark.parametrize("kind", [BertForMaskedLM, GPTForCausalLM])
def test_gradient_checkpointing_changes_no_gradient(kind):
    model = build(kind, dropout=0.2, attention_dropout=0.2)
    runs, calls = [], []
    stack_of(model).layers[1].register_forward_pre_hook(lambda *_: calls.append(1))
    for checkpointing in (False, True):
        stack_of(model).gradient_checkpointing = checkpointing
        model.zero_grad()
        torch.manual_seed(5)
        loss_of(model).backward()
        runs.append(gradients(model))
    assert len(calls) == 3  # once, and twice
    for name in runs[0]:
        torch.testing.assert_close(runs[0][name], runs[1][name], msg=name)


def test_gradient_checkpointing_refuses_a_cache():
    model = build(GPTForCausalLM)
    model.gpt.gradient_checkpointing = True
    with pytest.raises(ValueError, match="would fill the cache twice"):
        model(IDS, cache=model.new_cache())
    model.eval()(IDS, cache=model.new_cache())


def test_dropout_follows_the_seed_and_ends_with_training():
    model = build(GPTForCausalLM, dropout=0.3, attention_dropout=0.3)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(model(IDS))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    model.eval()
    torch.testing.assert_close(model(IDS), build(GPTForCausalLM).eval()(IDS))  # with the same weights


@pytest.mark.parametrize("kind", [BertForMaskedLM, BertForSequenceClassification, GPTForCausalLM])
def test_copies_pickles_and_state_dicts(kind):
    model = build(kind, backend="sliding_window(left=3, right=3)").eval()
    expected = model(IDS, KEEP)
    other = kind(model.config)
    assert not torch.equal(other.eval()(IDS, KEEP), expected)
    other.load_state_dict(model.state_dict())
    for twin in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(IDS, KEEP), expected)


def test_every_weight_has_a_gradient():
    torch.manual_seed(0)
    x = torch.randn(2, 10, 32)
    for module in (MultiheadAttention(32, 4, 2), LongformerAttention(32, 4, window=2), ReformerAttention(32, 4)):
        module(x).square().sum().backward()
        assert all(p.grad is not None for p in module.parameters())
    for kind in (BertForMaskedLM, GPTForCausalLM):
        model = build(kind)
        loss_of(model).backward()
        assert all(p.grad is not None for p in model.parameters())


def train_on_one_of_two(rank, port, ids, keep, path):
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(ddp_model())
    nn.functional.cross_entropy(model(ids[rank], keep[rank])[0], ids[rank][0]).backward()
    if rank == 0:
        torch.save({name: parameter.grad for name, parameter in model.module.named_parameters()}, path)
    torch.distributed.destroy_process_group()


class Longformer(nn.Module):
    """A model with Longformer layers, whose global projections are unused where a batch has no global tokens."""

    def __init__(self):
        super().__init__()
        self.gpt = build(GPTForCausalLM)
        self.layer = EncoderLayer(LongformerAttention(50, 5, window=2), 16)

    def forward(self, ids, keep):
        return self.layer(self.gpt(ids, keep), attention_mask=keep)


def ddp_model():
    torch.manual_seed(0)
    return Longformer().eval()


@pytest.mark.timeout(600)
def test_two_processes_give_the_gradients_of_one(tmp_path):
    ids = IDS[:, None]
    keep = KEEP[:, None]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train_on_one_of_two, (port, ids, keep, tmp_path / "gradients.pt"), nprocs=2)
    together = torch.load(tmp_path / "gradients.pt")
    model = ddp_model()
    for rank in range(2):
        (nn.functional.cross_entropy(model(ids[rank], keep[rank])[0], ids[rank][0]) / 2).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)
