"""DistributedDataParallel over two processes: the gradients are those of one process with the whole batch."""

import copy

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import effattn.swap

BACKEND = "sliding_window(left=3, right=0)"


def make():
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, use_cache=False)
    return nn.ModuleDict({"hugging_face": transformers.LlamaModel(config), "torch": encoder_layer()})


def encoder_layer():
    return nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = make()

    def forward(self, ids):
        return self.parts["torch"](self.parts["hugging_face"](ids).last_hidden_state)


def batch():
    return torch.randint(3, 99, (4, 12), generator=torch.Generator().manual_seed(1))


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = DistributedDataParallel(Both())  # a parameter without a gradient would stop the second step
    swapped = effattn.swap.swap(model, BACKEND)
    for _ in range(2):
        model.zero_grad()
        model(batch()[2 * rank : 2 * rank + 2]).square().mean().backward()
    torch.save(
        {
            "gradients": [p.grad for p in model.parameters()],
            "calls": [(site.path, site.calls) for site in swapped.sites],
        },
        f"{folder}/{rank}.pt",
    )
    dist.destroy_process_group()


def test_two_processes_train_as_one(tmp_path):
    torch.multiprocessing.start_processes(work, (str(tmp_path),), nprocs=2, start_method="spawn")
    alone = copy.deepcopy(Both())
    with effattn.swap(alone, BACKEND):
        alone(batch()).square().mean().backward()
    for rank in range(2):
        got = torch.load(tmp_path / f"{rank}.pt")
        assert got["calls"] == [
            ("module.parts.hugging_face.layers.0.self_attn", 2),
            ("module.parts.torch.self_attn", 2),
        ]
        for one, other in zip(got["gradients"], alone.parameters(), strict=True):
            torch.testing.assert_close(one, other.grad)
