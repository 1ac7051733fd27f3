"""Small mixture-of-experts language models for the tests: one in plain torch, and six transformers architectures.

Shapes: B rows, S positions, T = B * S tokens, K top-k, H hidden, E experts, V vocabulary.
"""

from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """Sizes of a TinyMoE; `aux` is the coefficient of the auxiliary loss, `dense` and the first `dense_first` layers
    have no routed experts.
    """

    vocab: int = 32
    hidden: int = 16
    layers: int = 3
    experts: int = 4
    top_k: int = 2
    expert_width: int = 8
    heads: int = 2
    shared_expert: bool = False
    dense_first: int = 0
    dense: tuple[int, ...] = ()
    aux: float = 0.0
    dropout: float = 0.0
    tied: bool = False


class TinyOutput(NamedTuple):
    """Logits [B, S, V], one [T, E] tensor of router logits per MoE layer, and aux * auxiliary loss, or None."""

    logits: Tensor
    router_logits: tuple[Tensor, ...]
    aux_loss: Tensor | None


class TinyExperts(nn.Module):
    """Experts by the contract of transformers 5, without its decorator."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.num_experts = config.experts
        self.gate_up_proj = nn.Parameter(torch.randn(config.experts, 2 * config.expert_width, config.hidden) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(config.experts, config.hidden, config.expert_width) * 0.2)
        self.act_fn = F.silu

    def _apply_gate(self, z: Tensor) -> Tensor:
        gate, up = z.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, x_TH: Tensor, idx_TK: Tensor, w_TK: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts, [T, H]."""
        y_TH = torch.zeros_like(x_TH)
        for expert in range(self.num_experts):
            token_R, slot_R = torch.where(idx_TK == expert)
            h = self._apply_gate(F.linear(x_TH[token_R], self.gate_up_proj[expert]))
            y = F.linear(h, self.down_proj[expert]) * w_TK[token_R, slot_R, None]
            y_TH = y_TH.index_add(0, token_R, y.to(y_TH.dtype))
        return y_TH


class TinyRouter(nn.Module):
    """Softmax over all experts, then the top-k of it, normalised."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.weight = nn.Parameter(torch.randn(config.experts, config.hidden) * 0.5)

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [T, E], weights [T, K] and expert ids [T, K]."""
        logits_TE = F.linear(x_TH, self.weight)
        w_TK, idx_TK = logits_TE.softmax(-1).topk(self.top_k, dim=-1)
        return logits_TE, w_TK / w_TK.sum(-1, keepdim=True), idx_TK


class TinyMLP(nn.Module):
    """A dense MLP: a dense layer's feed-forward part, or a shared expert."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 2 * config.expert_width, bias=False)
        self.down = nn.Linear(2 * config.expert_width, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., H] to [..., H]."""
        return self.down(F.silu(self.up(x)))


class TinyBlock(nn.Module):
    """Router, routed experts and, if asked for, a shared expert."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.router = TinyRouter(config)
        self.experts = TinyExperts(config)
        self.shared = TinyMLP(config) if config.shared_expert else None

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Map [B, S, H] to [B, S, H]."""
        x_TH = x_BSH.reshape(-1, x_BSH.shape[-1])
        _, w_TK, idx_TK = self.router(x_TH)
        y_BSH = self.experts(x_TH, idx_TK, w_TK).view_as(x_BSH)
        return y_BSH if self.shared is None else y_BSH + self.shared(x_BSH)


class TinyAttention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Map [B, S, H] to [B, S, H]."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x_BSH).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TinyLayer(nn.Module):
    """Attention and feed-forward part, both added to the residual stream."""

    def __init__(self, config: TinyConfig, index: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.hidden), nn.LayerNorm(config.hidden)
        self.attention = TinyAttention(config)
        dense = index < config.dense_first or index in config.dense
        self.mlp = TinyMLP(config) if dense else TinyBlock(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h_BSH: Tensor) -> Tensor:
        """Map [B, S, H] to [B, S, H]."""
        h_BSH = h_BSH + self.dropout(self.attention(self.norm1(h_BSH)))
        return h_BSH + self.mlp(self.norm2(h_BSH))


_collector: ContextVar[list[Tensor] | None] = ContextVar("collector", default=None)  # one per call and coroutine


def _collect(_router: nn.Module, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
    collected = _collector.get()
    if collected is not None:
        collected.append(output[0])


class TinyMoE(nn.Module):
    """Embedding, decoder layers, final norm and head."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config, self.collects = config, False
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(TinyLayer(config, index) for index in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> TinyOutput:
        """Map token ids [B, S] to a TinyOutput; router logits are what the routers' own forward hooks leave."""
        self._install_collectors()
        collected: list[Tensor] = []
        token = _collector.set(collected)
        try:
            h_BSH = self.embedding(input_ids)
            for layer in self.layers:
                h_BSH = layer(h_BSH)
            logits = self.lm_head(self.norm(h_BSH))
        finally:
            _collector.reset(token)
        aux = self.config.aux * balance(collected, self.config.top_k) if self.config.aux else None
        return TinyOutput(logits, tuple(collected), aux)

    def _install_collectors(self) -> None:
        """Hook the routers at the first forward, as transformers does: hooks made before it run before these."""
        if not self.collects:
            self.collects = True
            for router in (module for module in self.modules() if isinstance(module, TinyRouter)):
                router.register_forward_hook(_collect)


def balance(router_logits: list[Tensor], top_k: int) -> Tensor:
    """The Switch auxiliary loss over all layers together, as transformers computes it; its balanced value is top_k."""
    probabilities = torch.cat(router_logits).softmax(-1)
    chosen = F.one_hot(probabilities.topk(top_k, dim=-1).indices, probabilities.shape[-1]).sum(1)
    return (chosen.to(probabilities.dtype).mean(0) * probabilities.mean(0)).sum() * probabilities.shape[-1]


def tiny(seed: int = 0, **sizes: Any) -> TinyMoE:
    """A seeded TinyMoE; keyword arguments are TinyConfig's fields."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyMoE(replace(TinyConfig(), **sizes))


_SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
_MLA: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_DEEPSEEK: dict[str, Any] = {
    **_SMALL,
    **_MLA,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
}
HF: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **_SMALL,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mixtral": {
        **_SMALL,
        "intermediate_size": 16,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "greedy"},
    "deepseek_v3": {**_DEEPSEEK, "num_hidden_layers": 4},
    "olmoe": {
        **_SMALL,
        "intermediate_size": 16,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "eos_token_id": None,
    },
    "gpt_oss": {
        **_SMALL,
        "intermediate_size": 16,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
}


def hf_config(name: str, aux: float = 0.0, **overrides: Any) -> Any:
    """The configuration of a tiny transformers model; aux > 0 switches the auxiliary loss on, where there is one."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **{**HF[name], **overrides})
    if aux and hasattr(config, "router_aux_loss_coef"):
        config.output_router_logits, config.router_aux_loss_coef = True, aux
    return config


def tiny_hf(name: str, aux: float = 0.0, seed: int = 0, **overrides: Any) -> nn.Module:
    """A seeded tiny transformers model with eager experts, on CPU, in float32 and train mode."""
    from transformers import AutoModelForCausalLM

    config = hf_config(name, aux, **overrides)
    kwargs = {"attn_implementation": "eager"} if name == "gpt_oss" else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, experts_implementation="eager", **kwargs).train()
