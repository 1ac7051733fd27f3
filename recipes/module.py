"""The language model of the recipes: an ordinary LightningModule around a transformers model."""

import math
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightning_afd.model.document_masks import separate_documents
from lightning_afd.model.hub_import import from_pretrained
from lightning_afd.model.hub_model import with_hub_entry
from lightning_afd.recipes.attention import Compute, check_attention, use_kernel

Batch = dict[str, Any]


class MoELanguageModel(L.LightningModule):
    """A causal language model of any architecture of transformers, trained from scratch or from a folder's weights.

    `config` is what transformers' AutoConfig takes: `model_type` and the fields of that architecture. With
    `pretrained`, a Hugging Face folder, it holds only what is to differ from the folder's own configuration. Weights
    are kept in float32, whatever the folder's dtype: that of the computation is the Trainer's `precision`. `attn` names
    the attention kernel; "auto" is flash attention where model, device and precision allow it, else what PyTorch has.
    """

    model: PreTrainedModel

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        pretrained: str | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
        attn: str = "auto",
    ) -> None:
        super().__init__()
        check_attention(attn)
        self.save_hyperparameters()
        self.fields = dict(config or {})
        self.pretrained = pretrained
        if pretrained is None:
            self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.fields))
            separate_documents(self.model)
        self.attn = attn
        self.kernel: str | None = None
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps

    def configure_model(self) -> None:
        """Make the model of a folder, choose its kernel; called before each fit, validation, test and prediction."""
        if self.pretrained is not None and not hasattr(self, "model"):
            self.model = from_pretrained(self.pretrained, dtype=torch.float32, **self.fields)
            separate_documents(self.model)
        chosen_in_config = self.attn == "auto" and "attn_implementation" in self.fields
        if self._trainer is not None and not chosen_in_config:  # none yet in load_from_checkpoint
            self._choose_kernel()

    def _choose_kernel(self) -> None:
        precision, root = str(self.trainer.precision), self.trainer.strategy.root_device
        half = torch.bfloat16 if "bf16" in precision else torch.float16
        dtype = half if "16" in precision else torch.float32
        capability = torch.cuda.get_device_capability(root) if root.type == "cuda" else (0, 0)
        compute = Compute(device=root.type, dtype=dtype, capability=capability)
        kernel = use_kernel(self.model, self.attn, compute)
        if kernel != self.kernel:
            rank_zero_info(f"attention: {kernel} on {root.type} in {precision} (model.attn={self.attn})")
        self.kernel = kernel

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what `lightning-afd export` needs, under any strategy."""
        checkpoint.update(with_hub_entry(checkpoint, self))

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return the model's own loss: cross entropy, and the router's auxiliary loss where there is one."""
        loss: torch.Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the cross entropy alone, in nats per token, so that it compares with an entropy."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits_BSV = self.model(**inputs).logits
        loss = cross_entropy(logits_BSV[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=batch["input_ids"].numel())

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return the logits [B, V] of the token that follows each row."""
        logits_BSV: torch.Tensor = self.model(input_ids=batch["input_ids"]).logits
        return logits_BSV[:, -1].float()

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW with a linear warm-up and a cosine decay to a tenth, per step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=self.weight_decay)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = LambdaLR(optimizer, lambda step: lr_factor(step, self.warmup_steps, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def lr_factor(step: int, warmup: int, total: int) -> float:
    """Return the share of the peak learning rate at `step`: up to 1 over `warmup` steps, then a cosine down to 0.1."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))
