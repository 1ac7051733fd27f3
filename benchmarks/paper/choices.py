"""DisagMoE's figures 12 to 14: ratio of attention to expert ranks, top-k and EP size, virtual stages."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from lightning_afd.baselines.apart import Division, best_apart, run
from lightning_afd.baselines.predict import tuned
from lightning_afd.cost.job import Job
from lightning_afd.placement import Layout
from paper.jobs import LENGTHS, SEQUENCES, Section, cluster_of, job_of, model_of, table, with_top_k

RATIOS = ((32, 96), (48, 80), (64, 64), (80, 48), (96, 32))
TOP_K, EXPERT_RANKS = (1, 2, 4, 8), (8, 16, 32, 64)
VIRTUAL = (1, 2, 4, 8, 16)


def division_of(job: Job, attention: int, ffn: int, groups: int) -> Division:
    """A job of the whole cluster on one layout, with G = 2P."""
    layout = Layout(attention=attention, ffn=ffn, groups=groups)
    made = replace(job, layout=layout, micro_batches=-(-SEQUENCES // attention))
    return Division(job=made, run=4 * groups)


@cache
def megatron(length: int) -> float:
    """Seconds of the plain baseline, with a row per expert."""
    found = tuned(job_of(model_of("DeepSeek-MoE"), length, cluster_of(), "none"), "exposed", 16)
    assert found is not None
    return found.seconds


@cache
def by_ratio(length: int) -> dict[tuple[int, int], float]:
    """Speed over Megatron, by ranks for attention and experts; p = 1 or 2, whichever is better."""
    job = job_of(model_of("DeepSeek-MoE"), length, cluster_of())
    found = {}
    for attention, ffn in RATIOS:
        seconds = (
            run(division_of(job, attention // groups, ffn // groups, groups)).seconds
            for groups in (1, 2)
            if ffn // groups <= 64
        )
        found[attention, ffn] = megatron(length) / min(seconds)
    return found


@cache
def idle_ranks() -> tuple[float, float]:
    """Speed of 4 x (16A + 10F) over 4 x (16A + 16F) at 16384 tokens, with its own NICs and with those of idle GPUs."""
    job = job_of(model_of("DeepSeek-MoE"), 16384, cluster_of())
    lent = replace(job, choices=replace(job.choices, ffn_nics=1.6))
    whole, alone, borrowed = (
        run(division_of(made, 16, ffn, 4)).seconds for made, ffn in ((job, 16), (job, 10), (lent, 10))
    )
    return whole / alone, whole / borrowed


def figure_12() -> Section:
    rows = []
    for length in LENGTHS:
        found = by_ratio(length)
        best = max(found, key=lambda ratio: found[ratio])
        rows.append((length, *(f"{speed:.2f}" for speed in found.values()), f"{best[0]}:{best[1]}"))
    alone, borrowed = idle_ranks()
    return Section(
        title="Figure 12: ratio of attention to expert ranks (DeepSeek-MoE)",
        lines=[
            "Speed over Megatron (1F1B, EP16, a row per expert) with all 128 GPUs used.",
            "",
            *table(["tokens", *(f"{a}A:{f}F" for a, f in RATIOS), "best"], rows),
            "Agrees in direction: longer sequences want more attention ranks.",
            "",
            "At 16384 tokens the paper has 16:10 beat 16:16 by 1.29x per GPU. Simulated (p = 4, G = 2P), 4 x "
            "(16A + 10F)",
            f"is {alone:.2f} times as fast, {alone * 128 / 104:.2f}x per GPU that is used. With the NICs of the "
            "24 idle GPUs",
            f"lent to the expert ranks it is {borrowed:.2f}, and {borrowed * 128 / 104:.2f}x per used GPU: "
            "whatever is left of the",
            "claim comes from NICs that are not counted. Per GPU of the cluster it does not hold.",
        ],
    )


@cache
def by_top_k() -> dict[int, tuple[float, float]]:
    """Speed over 1F1B with EP16, a row per expert and a row per node, by top-k (8192 tokens)."""
    found = {}
    for top_k in TOP_K:
        model = with_top_k(model_of("DeepSeek-MoE"), top_k)
        apart = best_apart(job_of(model, 8192, cluster_of())).seconds
        others = (tuned(job_of(model, 8192, cluster_of(), dedup), "exposed", 16) for dedup in ("none", "node"))
        plain, deduplicated = (other.seconds / apart for other in others if other is not None)
        found[top_k] = plain, deduplicated
    return found


@cache
def by_expert_ranks() -> dict[int, tuple[float, float]]:
    """The same, by the ranks that share the experts."""
    model, found = model_of("DeepSeek-MoE"), {}
    apart = best_apart(job_of(model, 8192, cluster_of())).seconds
    for ranks in EXPERT_RANKS:
        others = (tuned(job_of(model, 8192, cluster_of(), dedup), "exposed", ranks) for dedup in ("none", "node"))
        plain, deduplicated = (other.seconds / apart for other in others if other is not None)
        found[ranks] = plain, deduplicated
    return found


def figure_13() -> Section:
    names = ("a row per expert", "a row per node")
    return Section(
        title="Figure 13: top-k and EP size (DeepSeek-MoE, 8192 tokens)",
        lines=[
            "Speed over 1F1B; for top-k with EP16. The paper's values are not in what we know of it, but its "
            "direction is:",
            "more experts per token and more nodes cost the baseline more.",
            "",
            *_by(names, "k", by_top_k()),
            *_by(names, "EP", by_expert_ranks()),
            "Agrees in direction for EP size. For top-k it does with a row per expert; where both sides send a row per "
            "node, top-k changes little but the experts' work, which both have to do.",
        ],
    )


def _by(names: tuple[str, ...], what: str, found: dict[int, tuple[float, float]]) -> list[str]:
    rows = [(name, *(f"{speeds[index]:.2f}" for speeds in found.values())) for index, name in enumerate(names)]
    return table(["baseline sends", *(f"{what} = {value}" for value in found)], rows)


@cache
def by_virtual() -> dict[int, tuple[float, float, float]]:
    """Shares of the bound for G = P and G = 2P, and GB on an A rank for 2P, by virtual stages: v layers per group.

    2 x (16A + 16F), 128 sequences of 8192 tokens.
    """
    model, found = model_of("DeepSeek-MoE"), {}
    for virtual in VIRTUAL:
        layers = model.layers[:1] * (2 * virtual)
        job = job_of(replace(model, layers=layers), 8192, cluster_of())
        layout = Layout(attention=16, ffn=16, groups=2)
        made = replace(job, layout=layout, micro_batches=8)
        steps = [run(Division(job=made, run=group)) for group in (4, 8)]
        short, long = (step.simulation.bound / step.simulation.seconds for step in steps)
        found[virtual] = short, long, steps[1].division.memory / 1e9
    return found


def figure_14() -> Section:
    rows = [(v, f"{short:.2f}", f"{long:.2f}", f"{memory:.0f}") for v, (short, long, memory) in by_virtual().items()]
    return Section(
        title="Figure 14: virtual stages",
        lines=[
            "Share of the busiest lane's time in the step, 2 x (16A + 16F), 8 micro-batches of 8192 tokens, "
            "models of 2v",
            "DeepSeek-MoE layers (a virtual stage is a layer here).",
            "",
            *table(["v", "G = P", "G = 2P", "GB on the fullest rank (G = 2P)"], rows),
            "Agrees: more virtual stages fill the pipeline, with less and less to gain, and memory in flight "
            "grows with "
            "them until it is the limit.",
        ],
    )
