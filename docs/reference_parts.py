"""What stands in docs/reference.md: parts, and the names of each by module ("" is the text at a module's top)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One chapter."""

    title: str
    names: Mapping[str, tuple[str, ...]]


PARTS = (
    Part(
        "Strategies and their options",
        {
            "lightning_afd.strategies.afd": ("AFDStrategy",),
            "lightning_afd.strategies.ep": ("EPStrategy",),
            "lightning_afd.strategies.flowmoe": ("FlowMoEStrategy",),
            "lightning_afd.strategies.options": ("TrainingConfig",),
            "lightning_afd.strategies.config": ("AFDConfig", "EPConfig", "FlowMoEConfig"),
            "lightning_afd.strategies.planning.options": ("Planning",),
            "lightning_afd.strategies.driver": ("StepStats",),
        },
    ),
    Part(
        "Hooks of your LightningModule",
        {
            "lightning_afd.strategies.driver": ("",),
            "lightning_afd.batch": ("split_batch", "loss_weight", "merge_outputs"),
            "lightning_afd.model.split": ("",),
            "lightning_afd.model.experts_module": ("is_experts", "check_experts"),
        },
    ),
    Part(
        "Callbacks",
        {"lightning_afd.callbacks": ("StepMonitor", "ExpertLoad", "TimelinePicture")},
    ),
    Part(
        "Models and data",
        {
            "lightning_afd.model.hub_import": ("from_pretrained",),
            "lightning_afd.model.document_masks": ("separate_documents",),
            "lightning_afd.documents": ("PackedRows", "FlattenRows", "Replicas", "BalancedSampler"),
            "lightning_afd.packing": ("rows_of_documents", "attention_work", "deal", "imbalance"),
        },
    ),
    Part("Checkpoints", {"lightning_afd.checkpoint.saved": ("CheckpointReader", "open_checkpoint", "read_whole")}),
    Part(
        "Recordings and reports",
        {
            "lightning_afd.recording.saved": ("load", "save", "recordings_in"),
            "lightning_afd.recording.record": ("Recording", "Versions", "RankClock", "Traffic", "NicTraffic"),
            "lightning_afd.recording.chrome": ("write_chrome_trace", "chrome_trace"),
            "lightning_afd.report.page": ("write_report", "has_recordings"),
            "lightning_afd.waits": (
                *("", "Wait", "waits_of", "Usage", "usage_of", "mean_usage"),
                *("Quantiles", "waits_by_message", "waits_by_stage", "compute_by_stage"),
            ),
            "lightning_afd.regime": ("Regime", "regime_of"),
            "lightning_afd.draw": ("draw_timeline",),
        },
    ),
    Part(
        "Placement and schedules",
        {
            "lightning_afd.placement": ("Worker", "Layout"),
            "lightning_afd.expert_map": ("ExpertMap",),
            "lightning_afd.schedule.actions": ("", "Action", "Step"),
            "lightning_afd.schedule.shape": ("Shape", "Schedule"),
            "lightning_afd.schedule.orders": (
                *("build", "Knobs", "sequential", "layer_major", "af_pipe", "zero_bubble", "largest_group"),
            ),
            "lightning_afd.schedule.fill": ("Pace",),
            "lightning_afd.schedule.together": ("build_together", "Together", "layer_by_layer"),
            "lightning_afd.schedule.passes": ("place_transfers", "place_reduces", "forward_only", "in_blocks"),
            "lightning_afd.schedule.check": ("check", "check_executable", "in_flight"),
        },
    ),
    Part(
        "Timelines and the simulator",
        {
            "lightning_afd.timeline": ("Timeline", "Span", "Reduce"),
            "lightning_afd.simulate": ("", "simulate", "Simulation", "Carried"),
            "lightning_afd.load": ("Load", "Link", "Chunks", "by_kind"),
        },
    ),
    Part(
        "Costs",
        {
            "lightning_afd.cost.config": ("model_shape",),
            "lightning_afd.cost.model": (
                *("", "ModelShape", "LayerShape", "SegmentShape", "AttentionShape", "ExpertsShape", "Linear"),
                *("Parameters", "mean_keys"),
            ),
            "lightning_afd.cost.hardware": ("Cluster", "Device", "Efficiency", "Scale", "Link"),
            "lightning_afd.cost.job": ("Job", "BatchShape", "Choices", "Precision"),
            "lightning_afd.cost.times": ("step_costs", "StepCosts", "Busy", "Update", "Alike"),
            "lightning_afd.cost.transfers": ("ActionCost",),
            "lightning_afd.cost.reduces": ("sum_seconds", "reduce_seconds"),
            "lightning_afd.cost.memory": ("Memory", "memory_of", "scheduled_activations", "bounded_activations"),
            "lightning_afd.cost.in_flight": ("pipelined",),
            "lightning_afd.cost.routing": ("visits", "expected_copies", "sampling_imbalance"),
        },
    ),
    Part(
        "Plans",
        {
            "lightning_afd.allocate.request": ("Request", "Candidate"),
            "lightning_afd.allocate.choose": ("choose", "Effort", "division_of"),
            "lightning_afd.allocate.choice": ("PlanChoice",),
            "lightning_afd.allocate.verdict": ("Verdict", "Intensity", "judge"),
            "lightning_afd.allocate.collocated": ("Prediction",),
            "lightning_afd.allocate.formula": ("", "Stages", "formula_seconds", "exposed_all_reduce"),
            "lightning_afd.allocate.division": ("Division", "Needs", "Size", "Split"),
            "lightning_afd.allocate.milp": ("solve",),
            "lightning_afd.allocate.ratios": ("Ratios", "ratios", "Barrier", "barrier"),
            "lightning_afd.allocate.search": ("Search", "Found", "local_search"),
            "lightning_afd.allocate.simulated": ("Ordering", "simulated_pass"),
            "lightning_afd.baselines.predict": ("predict_baselines",),
            "lightning_afd.baselines.apart": ("best_apart",),
        },
    ),
    Part("Tuning S_p", {"lightning_afd.tune": ("Tuning", "Tuned", "Tuner")}),
    Part(
        "Errors",
        {
            "lightning_afd.errors": (
                *("AFDError", "PlanError", "ScheduleError", "CheckpointError", "RecordingError"),
                *("ProtocolError", "StaleMessage", "PeerFailure"),
            )
        },
    ),
)
