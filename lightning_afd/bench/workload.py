"""What all contenders of a run train: one model of transformers with the same first weights, and the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_afd.model.split import find_moe_layers

OptimizerName = Literal["sgd", "adamw"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of a Mixture-of-Experts language model, and of a step."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    experts: int = 8
    top_k: int = 4
    width: int = 139
    """Hidden width of an expert (SwiGLU: three matrices)."""
    vocabulary: int = 512
    seq_len: int = 512
    sequences: int = 8
    """Per step, over all ranks."""
    optimizer: OptimizerName = "sgd"
    lr: float = 1e-2
    seed: int = 1
    skew: float = 0.0
    """How uneven tokens, and so routing, are: the v-th id is drawn v ** -skew as often as the first (Zipf's law)."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What AutoConfig.for_model gets instead of these sizes or besides: another `model_type`, for example."""

    @property
    def tokens(self) -> int:
        """Of a step, over all ranks."""
        return self.sequences * self.seq_len

    def config(self) -> Any:
        """The configuration of transformers."""
        from transformers import AutoConfig

        sizes = {
            "model_type": "qwen3_moe",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "moe_intermediate_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.hidden // self.heads,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "max_position_embeddings": self.seq_len,
            "use_cache": False,
        }
        return AutoConfig.for_model(**{**sizes, **self.fields})

    def model(self, device: torch.device) -> nn.Module:
        """A new one, in train mode, with the weights that every contender on every rank starts from."""
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng(), device:
            torch.manual_seed(self.seed)
            return AutoModelForCausalLM.from_config(self.config()).train()

    def batch(self, step: int) -> Tensor:
        """Ids [B, S] of a step, the same on all ranks."""
        numbers = torch.Generator().manual_seed(self.seed * 100_003 + step)
        if not self.skew:
            return torch.randint(0, self.vocabulary, (self.sequences, self.seq_len), generator=numbers)
        weights_V = torch.arange(1, self.vocabulary + 1).double() ** -self.skew
        ids = torch.multinomial(weights_V, self.sequences * self.seq_len, replacement=True, generator=numbers)
        return ids.view(self.sequences, self.seq_len)

    def make_optimizer(self, parameters: Any, *, fused: bool = True) -> torch.optim.Optimizer:
        """That of this rank's parameters, or groups of them; some tensors, as DTensor, have no fused one."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=self.lr, fused=fused)
        return torch.optim.SGD(parameters, lr=self.lr, fused=fused)


@torch.no_grad()
def busiest_expert(workload: Workload, device: torch.device) -> float:
    """Rows of the busiest expert of a layer over the mean of its experts, in the worst layer on the first batch."""
    model: Any = workload.model(device)
    model.config._experts_implementation = "eager"  # the grouped product refuses some widths
    worst: list[float] = []

    def count(module: nn.Module, given: tuple[Any, ...]) -> None:
        counts_E = torch.bincount(given[1].flatten(), minlength=workload.experts)
        worst.append(float(counts_E.max() / counts_E.float().mean()))

    for layer in find_moe_layers(model):
        layer.experts.register_forward_pre_hook(count)
    loss_of(model, workload.batch(0).to(device))
    return max(worst)


def loss_of(model: nn.Module, ids_BS: Tensor) -> Tensor:
    """Mean next-token loss of some rows; auxiliary losses, which depend on the division into parts, are left out."""
    logits_BSV = model(input_ids=ids_BS).logits
    return nn.functional.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())
