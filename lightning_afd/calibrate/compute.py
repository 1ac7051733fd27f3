"""How long this rank takes for the segments and experts of a model: they are run, on synthetic rows of the right sizes.

Attention, ends and everything around messages run in a small job (sample_job.py); experts run apart, as many as an F
rank would have.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from lightning_afd.calibrate.sample_job import ONE_EACH, SampleJob
from lightning_afd.calibrate.setting import Setting, Taken, Timed, Times
from lightning_afd.cost.measured import Point
from lightning_afd.cost.times import StepCosts, step_costs
from lightning_afd.cost.traffic import load_of
from lightning_afd.model.experts import ExpertShard, shard_experts
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
        job = self._setting.job(self._sample, layout)
        load = load_of(job, self._sample.shape.moe[0])
        taken = _experts_times(self._sample, self._setting, layout, seconds)
        estimates = _estimates(step_costs(job))
        tokens = layout.attention * self._setting.batch.tokens
        rows = {"Ef": packing["f"], "Eb": packing["b"], "Ew": 0.0}
        layers = len(self._sample.layers)
        return {
            kind: Point(estimate=estimates[kind] / layers, seconds=taken[kind] + rows[kind] * load.tokens / tokens)
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
    """One F rank's forward, input gradient and weight gradient of the rows of one micro-batch of all A ranks."""
    layer, generator = sample.layers[0], torch.Generator().manual_seed(0)
    owned = -(-layer.num_experts // layout.ffn)
    shard = ExpertShard(_experts_of(layer, owned, setting), recompute=setting.choices.recompute_experts)
    total = layout.attention * setting.batch.tokens
    idx_TK = torch.rand(total, layer.num_experts, generator=generator).topk(layer.top_k).indices
    idx_TK = idx_TK.where(idx_TK < owned, -1)
    idx_TK = idx_TK[(idx_TK >= 0).any(1)].to(setting.device)
    x_TH = torch.randn(len(idx_TK), sample.shape.hidden, generator=generator).to(setting.device, setting.dtype)
    w_TK = torch.full(idx_TK.shape, 1 / layer.top_k, device=setting.device)
    taken = Taken()
    for repetition in setting.repetitions(seconds):
        timed = Timed(setting, taken if repetition else Taken())
        saved = [timed("f", lambda: shard.forward(x_TH, idx_TK, w_TK))[1] for _ in range(setting.in_flight)]
        pending = [timed("b", lambda one=one: shard.backward(one, x_TH))[2] for one in saved]
        for one in pending:
            timed("w", lambda one=one: shard.weight_gradient(one))
    return {f"E{phase}": seconds for (_, _, phase), seconds in taken.typical().items()}


def _experts_of(layer: MoELayer, owned: int, setting: Setting) -> nn.Module:
    """A copy of a layer's experts with random weights, as many as one F rank has."""
    module = copy.deepcopy(layer.experts)
    shard_experts(module, range(owned))
    generator = torch.Generator(setting.device).manual_seed(0)
    for name, parameter in list(module.named_parameters(recurse=False)):
        data = torch.empty(parameter.shape, dtype=setting.weight_dtype, device=setting.device)
        setattr(module, name, nn.Parameter(data.normal_(0.0, 0.02, generator=generator)))
    return module
