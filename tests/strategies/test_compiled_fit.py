"""A fit with a compiled self_attn equals the fit without it, also from one of its checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from cases import join, largest_difference, weights
from compiling import Compile, graphs, in_place, wrapped
from fits import Model, Run, State, tiny_module, tokens
from lightning.pytorch.callbacks import ModelCheckpoint
from pool import RankPool
from tiny import tiny_hf

from lightning_afd.model.compiled import plain_name

ATTENTION = "layers.1.self_attn"
RUN = Run(layout="1A+1F", precision="64-true")


def fitted(folder: Path, compiled: Compile | None, seed: int = 0, start: Path | None = None) -> State:
    """The weights behind four steps, with a checkpoint in `folder` after every second one."""
    module = Model(tiny_hf("qwen3_moe", seed=seed), [tokens(4, vocab=64, seed=step) for step in range(4)])
    module.optimizer = partial(torch.optim.AdamW, lr=1e-2)
    if compiled is not None:
        compiled(module.model.model, ATTENTION)
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = RUN.trainer(callbacks=[saver], enable_checkpointing=True, gradient_clip_val=0.5)
    trainer.fit(module, ckpt_path=start)
    return weights(module)


def without_and_with(folder: Path) -> tuple[dict[str, State], list[int]]:
    """A plain fit and a compiled one, fits from the middle of both with other first weights, and from these alone."""
    plain, middle = fitted(folder / "plain", None), "step=2.ckpt"
    compiled, seen = {}, []
    for name, compile_, start in (
        ("wrapped", wrapped, None),
        ("wrapped, resumed", wrapped, folder / "wrapped" / middle),
        ("in place, resumed", in_place, folder / "plain" / middle),  # whose names are the same
    ):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled[name] = fitted(folder / name, compile_, 0 if start is None else 1, start)
        seen.append(graphs())
    return {"plain": plain, "other weights": fitted(folder / "other", None, 1), **compiled}, seen


def test_weights_names_and_checkpoints(pool: RankPool, tmp_path: Path) -> None:
    ranks = pool.run(without_and_with, 2, tmp_path)
    whole = {kind: join([states[kind] for states, _ in ranks]) for kind in ranks[0][0]}
    plain, other = whole.pop("plain"), whole.pop("other weights")
    assert largest_difference(other, plain) > 1e-3
    for kind, state in whole.items():
        assert any("self_attn._orig_mod." in name for name in state) == kind.startswith("wrapped")
        assert largest_difference({plain_name(name): value for name, value in state.items()}, plain) < 1e-12, kind
    assert min(ranks[0][1]) >= 1 and max(ranks[1][1]) == 0  # F ranks run no attention


def test_a_compiled_module_is_refused_by_lightning() -> None:
    with pytest.raises(RuntimeError, match="compiled model is incompatible with the current strategy: `AFDStrategy`"):
        RUN.trainer().fit(torch.compile(tiny_module(), backend="eager"))
