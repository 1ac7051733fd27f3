"""What flash attention does with packed documents, on a CPU: each is attended to alone, by the borders it is given."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

NAME = "by_document"


@contextmanager
def varlen_kernel(*, ignores_borders: bool = False) -> Iterator[list[list[int]]]:
    """Register a kernel under `NAME`, as transformers' flash ones are; yields the borders of each of its calls."""
    seen: list[list[int]] = []

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **given: Any) -> tuple[Tensor, None]:
        """q, k, v [1, heads, T, width]; returns [1, T, heads, width]."""
        assert mask is None, "flash kernels take no mask"
        borders = given["cu_seq_lens_q"].tolist()
        assert given["cu_seq_lens_k"].tolist() == borders and given["cu_seq_lens_q"].dtype == torch.int32
        longest = max(end - start for start, end in pairwise(borders))
        assert (given["max_length_q"], given["max_length_k"]) == (longest, longest)
        seen.append(borders)
        cuts = [0, borders[-1]] if ignores_borders else borders
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        documents = [
            F.scaled_dot_product_attention(*(t[:, :, a:b] for t in (q, k, v)), is_causal=True, scale=given["scaling"])
            for a, b in pairwise(cuts)
        ]
        return torch.cat(documents, dim=2).transpose(1, 2), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, NAME, attend)
        patch.setitem(AttentionMaskInterface._global_mapping, NAME, flash_attention_mask)
        yield seen
