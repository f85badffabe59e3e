"""The ops in Triton, for CUDA and ROCm devices; in tests, by its interpreter, for CPU tensors too.

Same functions, same signatures and the same bits as `reference`. Every launch has floating-point fusion
off, so that no product and sum melt into one rounding.
"""

from .digesting import digest
from .encoding import encode
from .stepping import apply
from .weights import write_weights

__all__ = ["apply", "digest", "encode", "write_weights"]
