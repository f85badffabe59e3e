"""The attention of AsyncGRPOTrainer, on GPUs a kernel, in plain torch; and a reward for its own process."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


def tree_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, size], of segments end to end
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    tree_kv_index: Tensor,  # the tokens of each segment's path from its root, end to end
    tree_cu_seqlens_q: Tensor,  # where segments begin and end
    tree_cu_seqlens_k: Tensor,  # where paths do
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Each segment attends to its path, causally: a path ends with its segment."""
    segments, paths = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    found = []
    for segment, ends in zip(pairwise(segments), pairwise(paths), strict=True):
        (start, stop), path = segment, tree_kv_index[slice(*ends)]
        mask = torch.ones(stop - start, len(path), dtype=torch.bool).tril(len(path) - (stop - start))
        keys, values = key.index_select(2, path), value.index_select(2, path)
        asked = query[:, :, start:stop]
        found.append(scaled_dot_product_attention(asked, keys, values, mask, scale=scaling, enable_gqa=True))
    return torch.cat(found, 2).transpose(1, 2), None


def reward(completion_ids: list[list[int]], **_: Any) -> Any:
    return [sum(token % 7 for token in tokens) / 7 for tokens in completion_ids]
