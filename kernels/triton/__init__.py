"""The ops in Triton, for CUDA and ROCm devices; in tests, by Triton's interpreter, for CPU tensors too.

Same functions, same signatures and the same bits as `reference`. Every launch has floating-point fusion
off, so that no multiplication and addition are fused into one rounding.
"""

try:
    import triton as _triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"the kernels for GPUs need triton, loco's extra `gpu` ({error}): pip install 'triton>=3.6'"
    ) from error

from .changes import digest_bits, find_changes, swap_bits
from .digesting import digest
from .encoding import encode
from .ranking import place_ranked, rank_changes
from .stepping import apply
from .weights import write_weights

__all__ = [
    "apply",
    "digest",
    "digest_bits",
    "encode",
    "find_changes",
    "place_ranked",
    "rank_changes",
    "swap_bits",
    "write_weights",
]
