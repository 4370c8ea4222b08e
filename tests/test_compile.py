"""Modules around attention compile as one graph, and the custom operators keep their promises to PyTorch."""

import pytest
import torch

import effattn
from effattn import Causal, Global, Padding, Window
from effattn.kernels import hashing, sorted_chunks, tiles
from effattn.masks import pack

KEEP = torch.arange(37)[None] > 4


def tensors(requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 37, 8, generator=generator).requires_grad_(requires_grad) for _ in range(3)]


@pytest.mark.parametrize(
    ("spec", "mask", "dropout_p"),
    [
        ("full", Causal(), 0.0),
        ("chunked", Causal() & Padding(KEEP), 0.2),
        ("sliding_window(left=5, right=2)", Causal() & Padding(KEEP), 0.0),
        ("sliding_window(left=5, right=0, global_tokens=(0, 3))", Causal(), 0.2),
        ("sliding_window(left=5, right=0, dilation=2)", Causal(), 0.0),
        ("lsh(bucket_size=4)", Causal(), 0.2),
        ("lsh(bucket_size=4, shared_qk=True)", Padding(KEEP), 0.0),
    ],
)
def test_a_module_compiles_as_one_graph_and_equals_eager(spec, mask, dropout_p):
    backend = effattn.get(spec)

    def loss(query, key, value):
        output = effattn.attention(query * 2, key, value, backend=backend, mask=mask, dropout_p=dropout_p)
        return output.square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = []
    for call in (compiled, loss):
        inputs = tensors()
        torch.manual_seed(1)
        total = call(*inputs)
        results.append((total, *torch.autograd.grad(total, inputs)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("default")  # opcheck's own tracing warns
@pytest.mark.parametrize("with_bias", [False, True])
def test_opcheck_of_the_tiles(with_bias):
    packed, held = pack((Causal() & Window(9, 0) & Padding(KEEP)) | Global((0,)))
    bias = torch.randn(1, 2, 1, 37, requires_grad=True) if with_bias else None
    seed = torch.tensor(3) if with_bias else None
    torch.library.opcheck(
        tiles._tiles,
        (*tensors(), bias, packed, held, 0.3, 0, 0.1 if with_bias else 0.0, seed, 64, 1024, 4096, False, True, True),
    )


@pytest.mark.filterwarnings("default")
def test_opcheck_of_the_sorted_chunks_and_their_plan():
    query, key, value = tensors()
    plan_arguments = (query.detach(), key.detach(), KEEP, 0, 4, 2, 0, 8, False, 0)
    torch.library.opcheck(hashing._plan, plan_arguments)
    torch.library.opcheck(hashing._plan, (*plan_arguments, "anchors", True, 3))
    packed, held = pack(Causal() & Padding(KEEP))
    plan = list(hashing._plan(*plan_arguments))
    torch.library.opcheck(
        sorted_chunks._sorted_chunks,
        (query, key, value, plan, 4, 8, False, packed, held, 0.3, 0, False, True, 0.1, torch.tensor(3)),
    )
