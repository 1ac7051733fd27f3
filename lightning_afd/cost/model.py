"""Shapes of a language model with routed experts: what is multiplied with what.

All FLOPs are those of one token (2 per multiply-add) and of the forward; a matrix costs the same again for the gradient
of its input, and once more for that of its weights. Parameters are counted as transformers makes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import NamedTuple


class Linear(NamedTuple):
    """A weight matrix that every token of its input passes."""

    inputs: int
    outputs: int
    bias: bool = False

    @property
    def parameters(self) -> int:
        """Bias included."""
        return self.inputs * self.outputs + self.bias * self.outputs

    @property
    def flops(self) -> int:
        """Forward FLOPs per token; bias additions are not counted."""
        return 2 * self.inputs * self.outputs


def flops_of(linears: Iterable[Linear]) -> int:
    """Forward FLOPs per token of some matrices."""
    return sum(linear.flops for linear in linears)


def parameters_of(linears: Iterable[Linear]) -> int:
    """Parameters of some matrices, biases included."""
    return sum(linear.parameters for linear in linears)


def mlp(hidden: int, width: int, *, matrices: int = 3) -> tuple[Linear, ...]:
    """The matrices of an MLP: gate, up and down, or with `matrices=2` up and down."""
    return (Linear(hidden, width),) * (matrices - 1) + (Linear(width, hidden),)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Self-attention of one layer: grouped-query, multi-head or latent (MLA)."""

    linears: tuple[Linear, ...]
    """Its projections."""
    query_width: int
    """Heads x width of a query or key: what a score is summed over."""
    value_width: int
    """Heads x width of a value."""
    kv_width: int
    """Keys and values of a token together, as the attention kernel reads them."""
    other_parameters: int = 0
    """Norms of queries, keys and latents, sinks."""
    normed_width: int = 0
    """Width of all that is normed inside (queries and keys, or latents)."""
    saved_width: int = 0
    """Columns per token that it keeps for backward: queries, keys, values, output, latents."""
    window: int = 0
    """Keys that a query sees at most; 0: all before it."""

    @property
    def parameters(self) -> int:
        """All of them."""
        return parameters_of(self.linears) + self.other_parameters

    def core_flops(self, keys: float) -> float:
        """Forward FLOPs per token of scores and weighted values with `keys` keys per query on average.

        2 per key and column of both products (Dao, FlashAttention-2, 2307.08691, section 3.2: 4 S^2 q per sequence
        without mask for equal widths, half of it for a causal mask).
        """
        return 2.0 * keys * (self.query_width + self.value_width)


def mean_keys(length: int, window: int = 0) -> float:
    """Keys per query on average under a causal mask: query i of a sequence sees min(i, window) of them.

    (S + 1) / 2 without window; with one, its triangular start is counted exactly.
    """
    if window <= 0 or length <= window:
        return (length + 1) / 2
    return (window * (window + 1) / 2 + (length - window) * window) / length


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """Router, routed and shared experts of one layer."""

    experts: int
    """E."""
    top_k: int
    """K."""
    expert: tuple[Linear, ...]
    """The matrices of one routed expert."""
    router: Linear
    """H to E."""
    shared: tuple[Linear, ...] = ()
    """The matrices of all shared experts together; empty where there are none."""
    shared_gate: tuple[Linear, ...] = ()
    """The gate beside them, where there is one: attention ranks compute it."""

    @property
    def width(self) -> int:
        """De: inputs of an expert's last matrix."""
        return self.expert[-1].inputs

    @property
    def wide(self) -> int:
        """Outputs of an expert's first matrices: 2 De with a gate, else De."""
        return sum(linear.outputs for linear in self.expert[:-1])

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert."""
        return parameters_of(self.expert)

    @property
    def flops(self) -> int:
        """Forward FLOPs per token of its K routed experts."""
        return self.top_k * flops_of(self.expert)


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One decoder layer: attention, then experts or a dense MLP."""

    attention: AttentionShape
    dense: tuple[Linear, ...] = ()
    """The dense MLP of a layer without experts."""
    experts: ExpertsShape | None = None
    """Of a layer that has them."""
    norm_parameters: int = 0

    def attention_side(self, *, shared: bool) -> Iterator[Linear]:
        """The matrices that A ranks multiply with; `shared`: those of the shared experts too."""
        yield from self.attention.linears
        yield from self.dense
        if self.experts is not None:
            yield self.experts.router
            yield from self.experts.shared_gate
            if shared:
                yield from self.experts.shared

    def attention_parameters(self, *, shared: bool) -> int:
        """Parameters of the layer on an A rank."""
        own = self.attention.other_parameters + self.norm_parameters
        return own + parameters_of(self.attention_side(shared=shared))


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of parameters, by what they belong to."""

    attention: int
    router: int
    experts: int
    shared: int
    dense: int
    norm: int
    embedding: int
    head: int
    """0 where it is tied to the embedding."""

    @property
    def total(self) -> int:
        """All of them."""
        return int(sum(asdict(self).values()))


@dataclass(frozen=True, kw_only=True)
class SegmentShape:
    """What one attention segment contains: dense layers, then an MoE layer without its experts, or the head."""

    layers: tuple[LayerShape, ...]
    """Decoder layers that begin in it."""
    embeds: bool
    """The first one looks up the embedding."""
    head: tuple[Linear, ...] = ()
    """The tail's last matrix."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only language model."""

    hidden: int
    """H."""
    vocab: int
    """V."""
    layers: tuple[LayerShape, ...]
    """Decoder layers, those without experts included."""
    tied: bool = False
    """Whether the head's matrix is that of the embedding."""
    final_norm_parameters: int = 0

    @cached_property
    def moe(self) -> tuple[ExpertsShape, ...]:
        """The experts of all MoE layers, in order: what a schedule calls layer l is the l-th of them."""
        return tuple(layer.experts for layer in self.layers if layer.experts is not None)

    @property
    def head(self) -> Linear:
        """The tail's last matrix: H to V."""
        return Linear(self.hidden, self.vocab)

    @cached_property
    def segments(self) -> tuple[SegmentShape, ...]:
        """The L + 1 attention segments: dense layers go with the next MoE layer, trailing ones with the tail."""
        found: list[SegmentShape] = []
        waiting: list[LayerShape] = []
        for layer in self.layers:
            waiting.append(layer)
            if layer.experts is not None:
                found.append(SegmentShape(layers=tuple(waiting), embeds=not found))
                waiting = []
        return (*found, SegmentShape(layers=tuple(waiting), embeds=not found, head=(self.head,)))

    def segment_parameters(self, index: int, *, shared: bool) -> int:
        """Dense parameters of a segment, its embedding or head included; `shared`: shared experts, too."""
        segment = self.segments[index]
        tables = int(segment.embeds) + int(bool(segment.head) and not self.tied)
        return (
            sum(layer.attention_parameters(shared=shared) for layer in segment.layers) + tables * self.head.parameters
        )

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Of each MoE layer with its segment a number: layers of the same shape have the same."""
        known: dict[tuple[SegmentShape, ExpertsShape], int] = {}
        return tuple(known.setdefault(both, len(known)) for both in zip(self.segments, self.moe, strict=False))

    def describe(self) -> str:
        """`4 layers (3 of them with 8 experts, top 2), hidden 32, vocabulary 64, 123456 parameters`."""
        experts = sorted({(layer.experts, layer.top_k) for layer in self.moe})
        kinds = " and ".join(f"{count} experts, top {k}" for count, k in experts)
        return (
            f"{len(self.layers)} layers ({len(self.moe)} of them with {kinds}), hidden {self.hidden}, "
            f"vocabulary {self.vocab}, {self.parameters().total} parameters"
        )

    def parameters(self) -> Parameters:
        """All parameters, each once."""
        moe = self.moe
        embedding = self.vocab * self.hidden
        return Parameters(
            attention=sum(layer.attention.parameters for layer in self.layers),
            router=sum(layer.router.parameters for layer in moe),
            experts=sum(layer.experts * layer.expert_parameters for layer in moe),
            shared=sum(parameters_of(layer.shared + layer.shared_gate) for layer in moe),
            dense=sum(parameters_of(layer.dense) for layer in self.layers),
            norm=self.final_norm_parameters + sum(layer.norm_parameters for layer in self.layers),
            embedding=embedding,
            head=0 if self.tied else embedding,
        )

    def forward_flops(self, lengths: Sequence[int]) -> float:
        """Forward FLOPs of sequences of these lengths: every matrix and the causal attention core, head included.

        Norms, activations, softmax and rotary embedding are not counted, as in Narayanan et al. (2104.04473, appendix).
        """
        tokens = sum(lengths)
        matrices = flops_of(linear for layer in self.layers for linear in layer.attention_side(shared=True))
        experts = sum(layer.flops for layer in self.moe)
        core = sum(
            length * layer.attention.core_flops(mean_keys(length, layer.attention.window))
            for layer in self.layers
            for length in lengths
        )
        return tokens * (matrices + experts + self.head.flops) + core

    def step_flops(self, lengths: Sequence[int]) -> float:
        """FLOPs of forward and backward, as model FLOPs utilisation counts them: three times the forward.

        Recomputation, also inside a flash attention's backward, is no model FLOP (PaLM, 2204.02311, appendix B).
        """
        return 3 * self.forward_flops(lengths)
