"""Before vLLM is imported: a small cache, and the engine in this process, so that a test can look into it."""

import gc
import os
from collections.abc import Iterator

import pytest

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
os.environ["VLLM_NO_USAGE_STATS"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore")  # vLLM's are many, and not ours to mend


@pytest.fixture(autouse=True)
def engines_end_together() -> Iterator[None]:
    yield
    from plain_engine import BUILT

    while BUILT:  # also those that a failed test's traceback keeps
        BUILT.pop().llm_engine.engine_core.shutdown()
    gc.collect()
