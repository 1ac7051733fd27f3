"""What `trainer.predict` returns: the predictions of all A ranks, in the order of one device, on every rank."""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import Any

from lightning_afd.engine import Engine
from lightning_afd.placement import Worker

_NOTHING = object()


def join_predictions(loop: Any, engine: Engine) -> None:
    """Collective: fill the lists that Lightning's predict loop returns; batch j of all A ranks comes before j + 1."""
    if not loop.return_predictions:
        return
    layout = engine.plan.layout
    for loader, predictions in zip(loop._combined_loader.flattened, loop._predictions, strict=True):
        mine = predictions[: loader.batches]  # behind them are those of batches that only other ranks have
        parts = [engine.collectives.broadcast_object(mine, rank) for rank in layout.ranks_of(Worker("A", 0))]
        in_order = chain.from_iterable(zip_longest(*parts, fillvalue=_NOTHING))  # type: ignore[arg-type]
        predictions[:] = [prediction for prediction in in_order if prediction is not _NOTHING]
