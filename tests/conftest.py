"""Shared by all tests: one thread a process, since the problems are small and the suite runs in parallel."""

import torch

torch.set_num_threads(1)
