"""The first panel: what ran, how fast, what bounds it and what to change."""

from __future__ import annotations

from lightning_afd.recording import Recording
from lightning_afd.regime import Regime, regime_of
from lightning_afd.report.markup import count_text, element, seconds_text, text
from lightning_afd.report.run import Run, tokens_per_second
from lightning_afd.waits import mean_usage


def summary(run: Run) -> str:
    """Settings and figures, and what to change."""
    regime = regime_of(run.chosen.timeline, run.usage)
    rows = (element("dt", text(name)) + element("dd", text(value)) for name, value in summary_rows(run, regime))
    advice = element("p", text(regime.advice[0].upper() + regime.advice[1:] + "."), class_="advice")
    return advice + element("dl", "".join(rows))


def summary_rows(run: Run, regime: Regime) -> list[tuple[str, str]]:
    """Names and values of the summary."""
    one, usage = run.chosen, mean_usage(run.usage.values()).shares()
    layout, versions = one.timeline.layout, one.versions
    hosts = count_text(len({clock.host for clock in one.clocks}), "host")
    return [
        ("Bound by", regime.bound),
        ("Tokens per second", f"{tokens_per_second(one):,.0f}"),
        ("Forward and backward", f"{seconds_text(one.seconds)} for {one.tokens:,} tokens, loss {one.loss:.4f}"),
        ("Ranks on average", f"busy {usage['busy']:.0%}, exposed communication {usage['exposed']:.0%}"),
        ("Model", _model(run)),
        ("Layout", f"{layout.describe()}: {count_text(layout.world, 'rank')} on {hosts}"),
        ("Order", f"{one.order}, {count_text(one.shape.micro_batches, 'micro-batch')} per attention rank and step"),
        ("Shown in detail", f"step {one.global_step} of {_recorded(run)}"),
        ("Versions", f"lightning-afd {versions.package}, torch {versions.torch}, expert map {versions.expert_map}"),
        ("Device", f"{versions.device}, experts by {versions.experts}, transport {versions.transport}"),
        ("Clocks", _clocks(one)),
    ]


def _model(run: Run) -> str:
    counts = sorted({len(tokens) for tokens in run.chosen.tokens_per_expert})
    layers = f"{count_text(run.chosen.shape.layers, 'MoE layer')} of {' or '.join(map(str, counts))} experts"
    return f"{run.model}, {layers}" if run.model else layers


def _clocks(recording: Recording) -> str:
    """Where times come from, and how well ranks agree on them."""
    sources = ", ".join(sorted({clock.source for clock in recording.clocks}))
    accuracy = max(clock.accuracy for clock in recording.clocks)
    return f"{sources}; ranks agree to {seconds_text(accuracy)}" if accuracy else sources


def _recorded(run: Run) -> str:
    steps = [str(one.global_step) for one in run.recordings]
    listed = ", ".join(steps) if len(steps) <= 8 else f"{steps[0]} to {steps[-1]}"
    some = f", {len(steps)} of them read" if len(steps) < run.recorded else ""
    return f"{count_text(run.recorded, 'recorded step')} ({listed}){some}"
