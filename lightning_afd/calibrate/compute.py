"""How long this rank takes for the segments and experts of a model: they are run, on synthetic rows of the right sizes.

Attention, ends and everything around messages run in a small job (sample_job.py); experts run apart, as many as an F
rank would have.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lightning_afd.calibrate.sample_job import ONE_EACH, SampleJob
from lightning_afd.calibrate.setting import Setting, Taken, Timed, Times
from lightning_afd.cost.measured import Point
from lightning_afd.cost.times import StepCosts, step_costs
from lightning_afd.expert_map import split_sizes
from lightning_afd.model.experts import ExpertShard
from lightning_afd.model.experts_module import shard_experts
from lightning_afd.model.sample import Sample
from lightning_afd.model.split import MoELayer
from lightning_afd.placement import Layout


class Bench:
    """The parts of a sample on this rank, ready to be run as often as needed."""

    def __init__(self, sample: Sample, setting: Setting, layouts: Sequence[Layout]) -> None:
        """`layouts` give the loads of an F rank at which its experts are measured, smallest first."""
        self._sample, self._setting, self._layouts = sample, setting, layouts
        self._job = SampleJob(sample, setting)

    def measure(self, seconds: float) -> dict[str, list[Point]]:
        """Points of every kind; takes about so many seconds."""
        found = defaultdict(list)
        share = seconds / (len(self._layouts) + 2)
        own, packing = self._job.times(share)
        estimates = _estimates(step_costs(self._setting.job(self._sample, ONE_EACH)))
        for kind, taken in own.items():
            found[kind].append(Point(estimate=estimates[kind], seconds=taken))
        for layout in self._layouts:
            for kind, point in self._experts(layout, packing, share).items():
                found[kind].append(point)
        found["O"].append(self._job.optimizer(share))
        return dict(found)

    def _experts(self, layout: Layout, packing: Times, seconds: float) -> dict[str, Point]:
        """Each A rank's message is packed and unpacked apart."""
        taken = _experts_times(self._sample, self._setting, layout, seconds)
        estimates = _estimates(step_costs(self._setting.job(self._sample, layout)))
        messages = {"Ef": packing["f"], "Eb": packing["b"], "Ew": 0.0}
        layers, senders = len(self._sample.layers), layout.attention
        return {
            kind: Point(estimate=estimates[kind] / layers, seconds=taken[kind] + senders * messages[kind])
            for kind in taken
        }


def _estimates(costs: StepCosts) -> Times:
    """By kind, sums over the layers."""
    found: Times = defaultdict(float)
    for (op, layer, phase), cost in costs.actions.items():
        if op in "AE":
            found[("T" if op == "A" and layer == costs.shape.layers else op) + phase] += cost.seconds
    return found


def _experts_times(sample: Sample, setting: Setting, layout: Layout, seconds: float) -> Times:
    """One F rank's forward, input gradient and weight gradient of the rows of one micro-batch of all A ranks.

    Layers take turns, as in a step, so that no weights stay in a cache that they would not be in there.
    """
    shards = [_shard_of(layer, setting, layout) for layer in sample.layers]
    idx_TK, w_TK = _routes(sample.layers[0], setting, layout)
    x_TH = torch.randn(len(idx_TK), sample.shape.hidden, generator=_generator()).to(setting.device, setting.dtype)
    taken = Taken()
    for repetition in setting.repetitions(seconds):
        timed = Timed(setting, taken if repetition else Taken())
        turns = shards * setting.in_flight
        saved = [timed("f", partial(shard.forward, x_TH, idx_TK, w_TK))[1] for shard in turns]
        pending = [timed("b", partial(shard.backward, one, x_TH))[2] for shard, one in zip(turns, saved, strict=True)]
        for shard, one in zip(turns, pending, strict=True):
            timed("w", partial(shard.weight_gradient, one))
    return {f"E{phase}": seconds for (_, _, phase), seconds in taken.typical().items()}


def _routes(layer: MoELayer, setting: Setting, layout: Layout) -> tuple[Tensor, Tensor]:
    """Local expert ids [T, K], -1 for those of other ranks, and weights [T, K] of the tokens that visit an F rank."""
    chances = torch.rand(layout.attention * setting.batch.tokens, layer.num_experts, generator=_generator())
    idx_TK = chances.topk(layer.top_k).indices
    idx_TK = idx_TK.where(idx_TK < _owned(layer, layout), -1)
    idx_TK = idx_TK[(idx_TK >= 0).any(1)].to(setting.device)
    return idx_TK, torch.full(idx_TK.shape, 1 / layer.top_k, device=setting.device)


def _shard_of(layer: MoELayer, setting: Setting, layout: Layout) -> ExpertShard:
    """As many of a layer's experts as one F rank has, with random weights."""
    module = copy.deepcopy(layer.experts)
    shard_experts(module, range(_owned(layer, layout)))
    generator = torch.Generator(setting.device).manual_seed(0)
    for name, parameter in list(module.named_parameters(recurse=False)):
        data = torch.empty(parameter.shape, dtype=setting.weight_dtype, device=setting.device)
        setattr(module, name, nn.Parameter(data.normal_(0.0, 0.02, generator=generator)))
    return ExpertShard(module, recompute=setting.choices.recompute_experts)


def _owned(layer: MoELayer, layout: Layout) -> int:
    """Experts of the F rank with most of them."""
    return split_sizes(layer.num_experts, layout.ffn)[0]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
