"""The module and the runs of the equality cases: an ordinary LightningModule, fitted on one device and on a layout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from tiny import tiny_hf
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_afd import AFDStrategy
from lightning_afd.model.place import is_owned


def batch(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Random ids below 64, each its own label."""
    ids = torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


class Steps:
    """A resumable loader of ready batches."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.i = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        while self.i < len(self.items):
            self.i += 1
            yield self.items[self.i - 1]
        self.i = 0

    def state_dict(self) -> dict[str, int]:
        return {"i": self.i}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.i = state["i"]


class LM(L.LightningModule):
    """Language model whose loss is ce * cross entropy + aux * auxiliary loss; it knows nothing of strategies."""

    def __init__(
        self,
        steps: list[Any],
        *,
        name: str = "qwen3_moe",
        aux: float = 0.0,
        ce: float = 1.0,
        opt: str = "sgd",
        checkpointing: bool = False,
        experts: tuple[int, ...] = (),
        layers: int = 4,
    ) -> None:
        super().__init__()
        self.steps, self.aux, self.ce, self.opt = steps, aux, ce, opt
        self.model = tiny_hf(name, aux=aux, num_hidden_layers=layers)
        if checkpointing:
            self.model.activation_checkpointing_enable()
        if experts:
            route_to(self.model, experts)
        self.seen: dict[str, float] = {}

    def train_dataloader(self) -> Steps:
        """Rows a::n of each global batch for replica a of n."""
        own = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        replicas, rank = own["num_replicas"], own["rank"]
        return Steps([{key: value[rank::replicas] for key, value in item.items()} for item in self.steps])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self.model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"))
        labels = batch["labels"][:, 1:]
        nll = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")
        loss = self.ce * nll / (labels != -100).sum()
        if self.aux:
            loss = loss + self.aux * out.aux_loss
            self.log("aux", out.aux_loss)
        self.log("train_loss", loss, batch_size=len(labels))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.opt == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def route_to(model: nn.Module, experts: tuple[int, ...]) -> None:
    """Force every token to these experts (as many as top-k), by a hook on the routers."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        logits, w, _ = out
        idx = torch.tensor(experts).expand(logits.shape[0], -1)
        return logits, logits[:, list(experts)].softmax(-1).to(w.dtype), idx

    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(hook)


QUIET: dict[str, Any] = dict(
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    use_distributed_sampler=False,
    max_epochs=1,
    log_every_n_steps=1,
)


_OWN = ("order", "head", "on_nonfinite", "recompute", "recompute_experts", "shared_experts")


def fit_alone(module: L.LightningModule, **options: Any) -> L.Trainer:
    """The reference: the same script on one device."""
    trainer = L.Trainer(devices=1, **{**QUIET, "precision": "64-true", **options})
    trainer.fit(module)
    return trainer


def fit_apart(
    module: L.LightningModule, attention: int, ffn: int, *, R: int = 1, p: int = 1, **options: Any
) -> L.Trainer:
    """The same script under AFDStrategy, on a rank of the pool."""
    own = {key: options.pop(key) for key in _OWN if key in options}
    ckpt_path = options.pop("ckpt_path", None)
    trainer = L.Trainer(
        devices=p * (attention + ffn),
        strategy=AFDStrategy(attention=attention, ffn=ffn, groups=p, micro_batches=R, **own),
        plugins=[LightningEnvironment()],
        **{**QUIET, "precision": "64-true", **options},
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters that this process holds."""
    return {name: p.detach().clone() for name, p in module.named_parameters() if is_owned(p)}


def join(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole model from what each rank holds: experts of all ranks in their order, the rest from its first rank."""
    whole: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        held = [part[name] for part in parts if name in part]
        whole[name] = torch.cat(held) if ".experts." in name else held[0]
    return whole


def plain_chunks(
    module: LM, chunks: list[dict[str, Tensor]], valid: Callable[[dict[str, Tensor]], int]
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a plain loop over row chunks, weighted by their valid labels."""
    module = copy.deepcopy(module)
    total, loss_sum = sum(valid(chunk) for chunk in chunks), 0.0
    with recording(module):
        for chunk in chunks:
            loss = module.training_step(chunk, 0) * (valid(chunk) / total)
            loss.backward()
            loss_sum += loss.item()
    return loss_sum, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@contextmanager
def recording(module: LM) -> Iterator[None]:
    """`self.log` does nothing outside of a Trainer."""
    module.__dict__["log"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        module.__dict__.pop("log")


def largest_difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest |got - want| over the largest |want| of its parameter; infinite where names differ."""
    if got.keys() != want.keys():
        return float("inf")
    return max(((got[name] - want[name]).abs().max() / want[name].abs().max().clamp_min(1e-12)).item() for name in want)
