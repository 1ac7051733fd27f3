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
    """One fit that is not compiled, and two kinds that are, each also from its middle and with other first weights."""
    found, seen = {"plain": fitted(folder / "plain", None)}, []
    for name, compiled in (("wrapped", wrapped), ("in_place", in_place)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        found[name] = fitted(folder / name, compiled)
        found[f"{name}, resumed"] = fitted(folder / "on", compiled, 1, folder / name / "step=2.ckpt")
        seen.append(graphs())
    found["other weights"] = fitted(folder / "other", None, 1)
    return found, seen


def test_weights_names_and_checkpoints(pool: RankPool, tmp_path: Path) -> None:
    ranks = pool.run(without_and_with, 2, tmp_path)
    whole = {kind: join([rank[0][kind] for rank in ranks]) for kind in ranks[0][0]}
    plain, other = whole.pop("plain"), whole.pop("other weights")
    for kind, state in whole.items():
        assert any("self_attn._orig_mod." in name for name in state) == kind.startswith("wrapped")
        assert largest_difference({plain_name(name): value for name, value in state.items()}, plain) < 1e-12, kind
    assert largest_difference(other, plain) > 1e-3
    assert all(count >= 1 for count in ranks[0][1]) and ranks[1][1] == [0, 0]  # F ranks run no attention


def test_a_compiled_module_is_refused_by_lightning() -> None:
    with pytest.raises(RuntimeError, match="compiled model is incompatible with the current strategy: `AFDStrategy`"):
        RUN.trainer().fit(torch.compile(tiny_module(), backend="eager"))
