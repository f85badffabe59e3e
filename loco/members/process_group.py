"""The process group whose ranks form the sites."""

import os
import sys
from pathlib import Path

import torch.distributed as dist

_SET_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ensure_process_group() -> None:
    """Initialise the default process group as the launcher describes it, unless the caller has done so.

    Raises:
        ValueError: there is none, and no launcher has said which ranks there are.
    """
    if not dist.is_available():
        raise ValueError("loco needs torch.distributed, which this build of torch was made without")
    if dist.is_initialized():
        return
    missing = [name for name in _SET_BY_LAUNCHERS if name not in os.environ]
    if missing:
        script = Path(sys.argv[0]).name
        if not script.endswith(".py") or script == "__main__.py":  # an interactive session, or `python -m`
            script = "your_script.py"
        raise ValueError(
            f"loco needs several processes, because the ranks of a process group are its sites, and no "
            f"launcher has started this one ({missing[0]} is not set): launch with "
            f"`torchrun --nproc-per-node 4 {script}`, or call torch.distributed.init_process_group(…) "
            f"before you build the optimizer"
        )
    dist.init_process_group()
