"""Which transformers architectures can be split: each is built tiny and trained for a step, split and whole.

equal      the layers' experts run on F ranks; loss and every gradient equal those of the whole model
suspended  the same, but the layers wait for their experts inside (they are not rest + experts), so groups=1 is needed
refused    the split says in a sentence why it does not take the model
different  a bug: the gradients are not those of the whole model
not built  no tiny model that runs was found, which says nothing about the split
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_afd.errors import AFDError
from lightning_afd.model.port import suspended_layers
from lightning_afd.model.shared import PLACES
from lightning_afd.placement import Layout
from lightning_afd.recipes.local_job import Batches, Gradients, LocalJob, plain_step
from lightning_afd.recipes.tiny_models import build, moe_models

TOLERANCE = {torch.float64: 5e-6, torch.float32: 1e-4}
"""Largest relative difference by dtype.

transformers computes some routers, rotary embeddings and state-space scans in float32 also in a float64 model, which
shows as 1e-8 to 2e-6; other differences are 1e-15. float32 is for models that cannot run in float64.
"""
SHORT = (
    *("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h", "step3p7", "zaya"),
    *("deepseek_v4", "flex_olmo", "afmoe", "minimax_m3_vl_text", "llama4_text", "muse_spark"),
)
"""Models of the short form: each way in which layers differ, once."""
_NOISE = 1e-9
"""Gradients smaller than this part of the largest one of the model are rounding, and are compared to that part."""
_TEXT_IDS = 32


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found out about one architecture."""

    model: str
    verdict: str
    """equal, suspended, refused, different, or not built."""
    layers: int = 0
    """MoE layers of the tiny model."""
    dtype: str = ""
    difference: float = 0.0
    """Largest relative difference of the loss and of all gradients."""
    reason: str = ""
    """Why it was refused, or not built."""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.model}: {self.verdict}: {self.reason}"
        return f"{self.model}: {self.verdict}, {self.layers} MoE layers, {self.difference:.1e} in {self.dtype}"


def survey(models: Iterable[str], layout: Layout, report: Callable[[Finding], None], **choices: Any) -> list[Finding]:
    """Try the models one after another; `choices` are further fields of Plan."""
    findings = []
    for model_type in models:
        findings.append(examine(model_type, layout, **choices))
        report(findings[-1])
    return findings


def examine(model_type: str, layout: Layout, **choices: Any) -> Finding:
    """Build one model tiny, train it for a step whole and split over `layout`, and compare."""
    batches = text_batches(layout.attention)
    try:
        model, loss, gradients = _whole(model_type, batches)
    except Exception as error:  # whatever a model's own code raises
        return Finding(model=model_type, verdict="not built", reason=_one_line(error))
    try:
        job = LocalJob(model, layout, micro_batches=len(batches[0]), loss=language_loss, **choices)
        outcome = job.step(batches)
    except AFDError as error:
        return Finding(model=model_type, verdict="refused", reason=_one_line(error))
    except Exception as error:
        return Finding(model=model_type, verdict="different", reason=_one_line(error))
    dtype = next(model.parameters()).dtype
    worst = outcome.difference(loss, gradients, _NOISE)
    verdict = "suspended" if suspended_layers(job.models[0]) else "equal"
    return Finding(
        model=model_type,
        verdict=verdict if worst < TOLERANCE[dtype] else "different",
        layers=job.engines[0].plan.layers,
        dtype=str(dtype).removeprefix("torch."),
        difference=worst,
    )


def language_loss(model: nn.Module, ids_BS: Tensor) -> Tensor:
    """Mean next-token loss in the dtype of the model, and the auxiliary loss where the model returns one."""
    out = model(ids_BS)
    loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())
    aux = getattr(out, "aux_loss", None)
    return loss if not isinstance(aux, Tensor) else loss + 0.05 * aux


def text_batches(replicas: int) -> Batches:
    """Two micro-batches per replica, of different sizes."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 6), (1, 5), (3, 4), (2, 7))
    ids = [torch.randint(0, _TEXT_IDS, shape, generator=generator) for shape in shapes]
    return [ids[2 * replica : 2 * replica + 2] for replica in range(replicas)]


def table(findings: Sequence[Finding], more_groups: Sequence[Finding] = ()) -> str:
    """The findings as a Markdown table; `more_groups` are those of the same models with more groups."""
    others = {finding.model: finding for finding in more_groups}
    rows = ["| Architecture | Verdict | Two groups | MoE layers | Difference | Remark |", "|---|---|---|---|---|---|"]
    for finding in findings:
        other = others.get(finding.model)
        measured = f"{finding.layers} | {_worst(finding, other):.0e}" if finding.layers else " | "
        verdict = other.verdict if other is not None else ""
        remark = _remark(finding, other).replace("|", "/")
        rows.append(f"| {finding.model} | {finding.verdict} | {verdict} | {measured} | {remark} |")
    return "\n".join(rows) + "\n"


def _remark(finding: Finding, other: Finding | None) -> str:
    """Why not; of a refusal of more groups only the first clause, the rest of it is the same for all models."""
    parts = ["in float32"] if finding.dtype == "float32" else []
    if finding.reason:
        parts.append(finding.reason)
    elif other is not None and other.reason:
        parts.append(other.reason.partition(": ")[0])
    return "; ".join(parts)


def _worst(finding: Finding, other: Finding | None) -> float:
    return max(finding.difference, other.difference if other is not None else 0.0)


def summary(findings: Sequence[Finding]) -> str:
    """How many models have which verdict."""
    counts = Counter(finding.verdict for finding in findings)
    return f"{len(findings)} architectures: " + ", ".join(
        f"{count} {verdict}" for verdict, count in counts.most_common()
    )


def main() -> None:
    """The command `lightning-afd survey`; ends with exit code 1 where a model's gradients are different."""
    parser = argparse.ArgumentParser(prog="lightning-afd survey", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="model types of transformers; all Mixture-of-Experts ones by default")
    parser.add_argument("--short", action="store_true", help="a few models that differ in how they are split")
    parser.add_argument("--groups", type=int, nargs="+", default=[1], choices=(1, 2), help="groups per role to try")
    parser.add_argument("--shared-experts", choices=PLACES, default="attention", help="which ranks compute them")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    arguments = parser.parse_args()
    _quiet()
    models = arguments.models or (SHORT if arguments.short else moe_models())
    tried = []
    for groups in arguments.groups:
        layout = Layout(attention=2 if groups == 1 else 1, ffn=2, groups=groups)
        place = arguments.shared_experts
        tried.append(survey(models, layout, lambda finding: _say(str(finding)), shared_experts=place))
        _say(f"{layout.describe()}: {summary(tried[-1])}")
    if arguments.markdown:
        arguments.markdown.write_text(table(*tried))
    sys.exit(any(finding.verdict == "different" for findings in tried for finding in findings))


def _whole(model_type: str, batches: Batches) -> tuple[nn.Module, float, Gradients]:
    """The model in float64 if it runs so, else in float32, with its loss and gradients."""
    try:
        model = build(model_type, torch.float64)
        return model, *plain_step(model, batches, language_loss)
    except RuntimeError:  # such as a router that computes in float32 only
        model = build(model_type, torch.float32)
        return model, *plain_step(model, batches, language_loss)


def _one_line(error: Exception) -> str:
    return " ".join(f"{error}".split())[:300] or type(error).__name__


def _quiet() -> None:
    """Leave the lines to the findings: transformers tells about each fallback of each model."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
