"""Memory that is used again: by name and dtype, and grown when it must."""

import torch

from effattn.kernels.workspace import Workspace


def test_the_same_name_is_the_same_memory():
    workspace = Workspace(torch.float32, torch.device("cpu"))
    first = workspace("a", 2, 3).fill_(1)
    assert workspace("a", 3, 2).data_ptr() == first.data_ptr()
    assert workspace("b", 2, 3).data_ptr() != first.data_ptr()
    assert workspace("a", 2, 3, dtype=torch.bfloat16).data_ptr() != first.data_ptr()
    assert workspace("a", 4, 4).shape == (4, 4)
    assert (first == 1).all()  # a larger one is new memory; what was given stays alive


def test_converting_copies_only_where_it_must():
    workspace = Workspace(torch.float32, torch.device("cpu"))
    tensor = torch.randn(3)
    assert workspace.convert("a", tensor) is tensor
    narrow = workspace.convert("a", tensor, torch.bfloat16)
    assert torch.equal(narrow, tensor.bfloat16())
    assert torch.equal(workspace.convert("b", narrow), narrow.float())
