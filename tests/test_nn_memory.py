"""No module holds an n x n tensor where its backend needs none: masks, positions and biases stay O(n)."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from effattn.nn import BertConfig, BertForMaskedLM, GPTConfig, GPTForCausalLM, LongformerAttention

LENGTH = 2048
SIZES = {"vocab_size": 20, "d_model": 16, "num_layers": 1, "num_heads": 2, "max_len": LENGTH}
KEEP = torch.arange(LENGTH)[None] >= 100


class Largest(TorchDispatchMode):
    """The largest storage that any operation outside of custom operators gives."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
        self.nbytes = max([self.nbytes, *sizes])
        return made


def largest(model, *inputs, **options):
    with torch.no_grad(), Largest() as seen:
        model(*inputs, **options)
    return seen.nbytes


@pytest.mark.parametrize("backend", ["chunked", "sliding_window(left=64, right=64)", "lsh(num_hashes=1)"])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
@pytest.mark.parametrize("kind", [BertForMaskedLM, GPTForCausalLM])
def test_models(kind, positions, backend):
    assert largest_of(kind, positions, backend) < LENGTH**2 / 2  # half a byte a pair


@pytest.mark.parametrize("backend", ["chunked", "sliding_window(left=64, right=64)"])
def test_alibi_where_attention_is_causal(backend):
    assert largest_of(GPTForCausalLM, "alibi", backend) < LENGTH**2 / 2


def test_a_dense_backend_is_seen():
    assert largest_of(GPTForCausalLM, "learned", "full") >= LENGTH**2


def largest_of(kind, positions, backend):
    torch.manual_seed(0)
    config = BertConfig if kind is BertForMaskedLM else GPTConfig
    model = kind(config(**SIZES, positions=positions, backend=backend)).eval()
    ids = torch.randint(20, (1, LENGTH))
    return largest(model, ids, KEEP)


def test_longformer():
    torch.manual_seed(0)
    marks = torch.zeros(1, LENGTH, dtype=torch.bool)
    marks[0, [200, 1000]] = True
    model = LongformerAttention(16, 2, window=64)
    x = torch.randn(1, LENGTH, 16)
    assert largest(model, x, attention_mask=KEEP, global_attention_mask=marks) < LENGTH**2 / 2
