"""The contract over every registered backend, and over the parameters that change what one computes."""

import pytest

import effattn
from effattn.testing import contract_cases

# Refused on a CPU as a whole; their own files test what can run here.
SPECS = [name for name in effattn.names() if name not in ("flex", "xformers")] + [
    "chunked(query_chunk=16, key_chunk=7)",
    "sdpa(kernel='math')",
    "sdpa(kernel='flash')",
    "sliding_window(left=5, right=3)",
    "sliding_window(left=4, right=0, dilation=3)",
    "sliding_window(left=5, right=0, global_tokens=(0, 9, 36))",
    "lsh(bucket_size=4)",
    "lsh(bucket_size=5, num_hashes=3, look_ahead=1)",
    "lsh(bucket_size=4, count='per_round')",
    "lsh(bucket_size=4, num_hashes=2, hashing='anchors', local=True, sinks=3)",
    "lsh(bucket_size=4, shared_qk=True)",
    "lsh(bucket_size=4, shared_qk=True, hashing='anchors')",
    "lsh(bucket_size=4, shared_qk=True, count='per_round')",
]


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"{spec}: {case}") for spec in SPECS for case in contract_cases(spec)]
)
def test_contract(case):
    case.check()
