"""Rows sorted by expert, and the two grouped matrix products on them, each as a loop or as one grouped kernel.

Shapes: T tokens, K slots per token, E experts, R rows (token, slot), I and O input and output width.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from lightning_afd.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Rows:
    """Which (token, slot) pairs the rows of one call stand for.

    slot_R is t * K + k, token_R is t, expert_R the local expert. For the loop `ends` holds, on the host, each
    expert's end row, and there are no other rows. For the grouped kernel ends_E is the same on the device (int32);
    rows of foreign slots follow behind the last end, marked in foreign_R1, since their number isn't known on the host.
    """

    shape: tuple[int, int]
    slot_R: Tensor
    token_R: Tensor
    expert_R: Tensor
    ends: list[int] | None = None
    ends_E: Tensor | None = None
    foreign_R1: Tensor | None = None

    def slices(self) -> list[tuple[int, slice]]:
        """The experts that have rows, each with its rows (loop only)."""
        ends = self.ends or []
        starts = [0, *ends][:-1]
        return [
            (expert, slice(*span)) for expert, span in enumerate(zip(starts, ends, strict=True)) if span[0] < span[1]
        ]

    def clear_foreign_(self, rows_RX: Tensor) -> Tensor:
        """Zero the rows behind the last end, which a grouped kernel leaves uninitialised."""
        return rows_RX if self.foreign_R1 is None else rows_RX.masked_fill_(self.foreign_R1, 0)

    def clear_empty_(self, products_EIO: Tensor) -> Tensor:
        """Zero the products of experts without rows, which grouped kernels of some devices leave uninitialised."""
        if self.ends_E is None:
            return products_EIO
        is_empty_E = self.ends_E.diff(prepend=self.ends_E.new_zeros(1)) == 0
        return products_EIO.masked_fill_(is_empty_E[:, None, None], 0)

    def weights(self, w_TK: Tensor) -> Tensor:
        """Routing weights of the rows [R], 0 for foreign ones."""
        w_R1 = w_TK.reshape(-1).index_select(0, self.slot_R)[:, None]
        return self.clear_foreign_(w_R1).squeeze(1)

    def sum_per_token(self, rows_RX: Tensor) -> Tensor:
        """Sum rows [R, X] into [T, X] in slot order: reproducible, and accumulated in fp32 for half precision."""
        tokens, k = self.shape
        slots = rows_RX.new_zeros(tokens * k, rows_RX.shape[1]).index_copy_(0, self.slot_R, rows_RX)
        return slots.view(tokens, k, -1).sum(1) if slots.numel() else slots.new_zeros(tokens, rows_RX.shape[1])

    def to_slots(self, values_R: Tensor) -> Tensor:
        """Put one value per row at its (token, slot) [T, K], 0 at foreign slots."""
        values_R1 = self.clear_foreign_(values_R[:, None])
        tokens, k = self.shape
        return values_R.new_zeros(tokens * k).index_copy_(0, self.slot_R, values_R1.squeeze(1)).view(tokens, k)


def sort_rows(idx_TK: Tensor, experts: int, grouped: bool) -> Rows:
    """Sort the slots of local experts (0 to experts - 1, foreign ones -1) by expert, in token order within each."""
    shape = (idx_TK.shape[0], idx_TK.shape[1])
    id_S = idx_TK.reshape(-1).long()
    expert_R, slot_R = id_S.masked_fill(id_S < 0, experts).sort(stable=True)
    token_R = slot_R // max(shape[1], 1)
    if not grouped:
        ends = _host_ends(id_S, experts)
        own = ends[-1] if ends else 0
        return Rows(shape, slot_R[:own], token_R[:own], expert_R[:own], ends)
    ends_E = torch.searchsorted(expert_R, torch.arange(experts, device=expert_R.device), right=True).int()
    foreign_R1 = (expert_R >= experts)[:, None]
    return Rows(shape, slot_R, token_R, expert_R.clamp_(max=max(experts - 1, 0)), None, ends_E, foreign_R1)


def _host_ends(id_S: Tensor, experts: int) -> list[int]:
    counts = torch.bincount(id_S.clamp(min=-1) + 1, minlength=experts + 1).tolist()  # the call's only copy to the host
    if len(counts) > experts + 1:
        raise ProtocolError(f"a token was sent to expert {len(counts) - 2} of a shard that holds {experts} experts")
    return list(accumulate(counts[1:]))


def grouped_linear(x_RI: Tensor, weight_EIO: Tensor, rows: Rows) -> Tensor:
    """Multiply each row by its expert's matrix: [R, I] to [R, O], 0 for foreign rows."""
    if rows.ends is None:
        return _grouped_linear_kernel(x_RI, weight_EIO, rows)
    y_RO = x_RI.new_empty(len(x_RI), weight_EIO.shape[2])
    for expert, span in rows.slices():
        torch.mm(x_RI[span], weight_EIO[expert], out=y_RO[span])
    return y_RO


def grouped_outer_(out_EIO: Tensor, left_RI: Tensor, right_RO: Tensor, rows: Rows) -> None:
    """Add to each expert's matrix the product of its rows, left^T right, in the dtype of `out`."""
    if rows.ends is None:
        _grouped_outer_kernel_(out_EIO, left_RI, right_RO, rows)
        return
    for expert, span in rows.slices():
        if out_EIO.dtype == left_RI.dtype:
            out_EIO[expert].addmm_(left_RI[span].t(), right_RO[span])
        else:
            out_EIO[expert].add_(left_RI[span].t() @ right_RO[span])


def _grouped_linear_kernel(x_RI: Tensor, weight_EIO: Tensor, rows: Rows) -> Tensor:
    if not len(x_RI) or not len(weight_EIO):
        return x_RI.new_zeros(len(x_RI), weight_EIO.shape[2])
    return rows.clear_foreign_(grouped_mm(x_RI.contiguous(), weight_EIO, offs=rows.ends_E))


def _grouped_outer_kernel_(out_EIO: Tensor, left_RI: Tensor, right_RO: Tensor, rows: Rows) -> None:
    if len(left_RI) and len(out_EIO):
        product_EIO = grouped_mm(left_RI.contiguous().t(), right_RO.contiguous(), offs=rows.ends_E)
        out_EIO.add_(rows.clear_empty_(product_EIO))
