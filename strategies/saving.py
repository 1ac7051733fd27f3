"""Lightning's checkpoint calls of a strategy, each answered by what this rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_afd.model.hub_model import with_hub_entry
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.strategies.base import RankedStrategy
from lightning_afd.strategies.checkpoints import RankCheckpoints

if TYPE_CHECKING:
    from torch.optim import Optimizer


class SavingStrategy(RankedStrategy):
    """A strategy whose ranks write and read one directory together."""

    def __init__(self, *, weights_only: bool, **options: Any) -> None:
        super().__init__(**options)
        self._weights_only = weights_only
        self._checkpoints = RankCheckpoints(self)

    @property
    def checkpoint_notes(self) -> dict[str, Any]:
        """Plain values that are saved in each checkpoint and restored from it."""
        return self._checkpoints.notes

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are restored into what this rank owns after the split."""
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._checkpoints.owned_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        # After a failure nothing will be written, and ranks that divide a state cannot ask each other for it.
        return {} if self.leaves_alone else self.guarded(self._checkpoints.optimizer_state, optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise MisconfigurationException(
                f"strategy {self.strategy_name} has no use for storage_options of save_checkpoint"
            )
        if self.leaves_alone:
            rank_zero_warn("no checkpoint is written after a failure: ranks that have stopped hold parts of it")
        else:
            self.guarded(self._checkpoints.save, with_hub_entry(checkpoint, self.lightning_module), filepath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self._checkpoints.load(checkpoint_path, self._weights_only if weights_only is None else weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._checkpoints.restore_owned(checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints.restore_optimizers(checkpoint, self.optimizers)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self._checkpoints.remove(filepath)
