"""What cannot work is refused on every rank alike, with numbers and a remedy, before anybody waits for a time-out."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import refused
from fits import Run
from lightning.pytorch.trainer.states import TrainerFn
from pool import RankPool, RemoteError

from lightning_afd import AFDStrategy
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.strategies.refusals import refuse_unsupported

MISCONFIGURED, PLAN, PEER = "MisconfigurationException", "PlanError", "PeerFailure"

ALONE = {
    refused.too_few_ranks: ("needs 4 ranks", "Trainer has 3", "set devices=4"),
    refused.too_many_ranks: ("needs 2 ranks", "Trainer has 3", "set devices=2"),
    refused.too_many_groups: ("3 ranks into 2 group(s) of attention and ffn", "use more ranks"),
    refused.one_rank: ("at least 2 ranks", "set devices=2"),
    refused.one_rank_with_two_groups: ("strategy afd falls back", "cannot have groups=2", "use groups=1"),
    refused.collocated_with_groups: ("strategy ep has no option groups, head", "use AFDStrategy"),
    refused.collocated_with_another_order: ("order='af-pipe': choose one of sequential, experts-only, flowmoe",),
    refused.no_attention_left: ("attention=0",),
    refused.manual_optimization: ("automatic_optimization=False",),
    refused.compiled_step: ("training_step compiled with torch.compile", "beside the experts"),
    refused.weight_averaging: ("WeightAveraging",),
    refused.stochastic_weight_averaging: ("StochasticWeightAveraging",),
    refused.learning_rate_finder: ("does not support LearningRateFinder",),
    refused.synchronised_batch_norm: ("sync_batchnorm=True",),
    refused.sparse_embedding: ("model.embedding (Embedding) has sparse=True", "leave it out"),
}
"""What a rank finds out by itself, before it talks to another one."""

SAME_ON_ALL = {
    refused.one_rank_with_shared_experts_apart: (1, "shared_experts='ffn' on a collocated layout"),
    refused.fewer_experts_than_collocated_ranks: (3, "3 collocated ranks for 2 experts", "2 ranks at most"),
    refused.more_chosen_than_experts: (2, "4 of 2 experts", "top_k <= 2"),
    refused.dense_model: (2, "no routed experts", "another strategy"),
    refused.more_ranks_than_experts: (4, "ffn=3 F ranks for 2 experts", "ffn <= 2"),
    refused.lbfgs: (2, "does not support LBFGS"),
    refused.two_optimizers: (2, "one optimizer"),
    refused.compiled_experts: (2, "model.layers.1.mlp.experts is compiled", "such as self_attn"),
    refused.compiled_model: (2, "model is compiled", "such as self_attn"),
    refused.compiled_in_place: (2, "Model is compiled", "such as self_attn"),
    refused.metric_that_waits: (2, "dist_sync_on_step=True", "mean"),
    refused.unequal_plans: (4, "ranks 0 and 2", "micro_batches=1", "micro_batches=2", "same script and options"),
    refused.unequal_layouts: (4, "different plans", "attention=1", "attention=2"),
    refused.unequal_shardings: (3, "different plans", "optimizer_sharding='none'", "optimizer_sharding='torch'"),
    refused.unequal_verdicts: (2, "different plans", "on_nonfinite='error'", "on_nonfinite='skip'"),
    refused.layer_that_is_not_additive: (4, "model.layers.1 is not additive", "needs groups=1"),
    refused.batch_without_common_rows: (3, "[1, 4] rows", "afd_split"),
    refused.step_without_loss: (3, "training_step returned NoneType", "return a loss of zero"),
    refused.step_with_a_vector: (3, "training_step returned a tensor of shape [2, 8]", "scalar loss"),
    refused.loader_that_ends_early: (3, "ended after 1 batches", "promised 2", "__len__"),
    refused.model_outside_of_a_step: (3, "called outside of a training"),
    refused.values_logged_by_one_rank_only: (3, "log different values", "loss_of_0"),
}


def run(pool: RankPool, function: Callable[[], None], world: int) -> list[RemoteError]:
    """The errors of all ranks; a rank that went through fails the test."""
    answers = pool.try_run(function, world)
    assert all(isinstance(answer, RemoteError) for answer in answers), answers
    return answers


def look_alone(module: pl.LightningModule, layout: str = "1A+1F", strategy: Any = None, **options: Any) -> None:
    """What every rank looks at first, in the place of a fit."""
    trainer = Run(layout=layout).trainer(strategy, **options)
    trainer.state.fn = TrainerFn.FITTING
    refuse_unsupported(trainer, module)


@pytest.mark.parametrize("function", ALONE, ids=lambda function: function.__name__)
def test_a_rank_finds_out_by_itself(monkeypatch: pytest.MonkeyPatch, function: Callable[[], None]) -> None:
    monkeypatch.setattr(refused, "fit", look_alone)
    with pytest.raises(MisconfigurationException) as error:
        function()
    assert all(part in str(error.value) for part in ALONE[function]), error.value


@pytest.mark.parametrize("function", SAME_ON_ALL, ids=lambda function: function.__name__)
def test_every_rank_gets_one_sentence(pool: RankPool, function: Callable[[], None]) -> None:
    world, *parts = SAME_ON_ALL[function]
    errors = run(pool, function, world)
    for error in errors:
        assert error.type_name in (MISCONFIGURED, PLAN), error.traceback
        assert all(part in error.message for part in parts), error.message
        assert "onnection" not in error.message


@pytest.mark.parametrize(
    ("function", "world", "guilty", "place"),
    [
        (refused.boom_in_a_step, 4, 1, "rank 1 (A0) failed in A2f0: layer 2, micro-batch 0"),
        (refused.boom_in_an_expert, 4, 3, "rank 3 (F0) failed in E1f0: layer 1, micro-batch 0"),
        (refused.boom_in_collocated_experts, 2, 1, "rank 1 (F0) failed in E1f0: layer 1, micro-batch 0"),
        (refused.boom_in_a_hook, 4, 1, ""),
        (refused.boom_at_start, 4, 1, ""),
    ],
)
def test_the_first_cause_of_a_users_own_error(
    pool: RankPool, function: Callable[[], None], world: int, guilty: int, place: str
) -> None:
    for number, error in enumerate(run(pool, function, world)):
        if number == guilty:
            assert (error.type_name, error.message) == ("LookupError", "boom")
            assert place in error.traceback
        else:
            assert error.type_name == PEER, error.traceback
            assert f"rank {guilty}" in error.message and "LookupError: boom" in error.message
            assert place in error.message


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"order": "fastest"}, "choose one of"),
        ({"micro_batches": 0}, "at least 1"),
        ({"on_nonfinite": "ignore"}, "'error' or 'skip'"),
        ({"optimizer_sharding": "zero"}, "choose one of none, torch, deepspeed"),
        ({"dedup": "host"}, "dedup='host': choose one of True, node, False"),
        ({"capacity": "half"}, "'counted' or 'full'"),
        ({"capacity": "full", "dedup": False}, "use dedup=True"),
        ({"capacity": "full", "dedup": "node"}, "use dedup=True"),
        ({"reduce_chunk_bytes": 0}, "reduce_chunk_bytes=0: choose 'auto', None or a number of bytes"),
        ({"attention": 0, "ffn": 2}, "attention=0"),
        ({"groups": 2, "micro_batch_group": 3}, "at least 4 micro-batches in a run"),
        (
            {"groups": (2, 1), "micro_batch_group": 2},
            "a ring of 3 workers (groups=(2, 1)) needs at least 3 micro-batches",
        ),
        ({"groups": (1, 2, 3)}, "groups=(1, 2, 3): give one number for both roles, or a pair (attention groups, ffn"),
        ({"groups": "2,0"}, "groups=2,0: at least 1 is needed"),
        ({"groups": [2, 1]}, "cannot divide 2 ranks into (2, 1) group(s)"),
        (
            {"groups": "2, 1", "attention": 1, "ffn": 2},
            "needs 4 ranks (2 x 1A + 1 x 2F), but the Trainer has 2 (devices x num_nodes): set devices=4, or choose "
            "attention and ffn so that 2 * attention + 1 * ffn = 2",
        ),
        ({"pending_weight_gradients": 0}, "pending=0: an order needs at least 1"),
    ],
)
def test_options_that_are_wrong_by_themselves(options: dict[str, Any], part: str) -> None:
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException) as error:
        pl.Trainer(accelerator="cpu", devices=2, strategy=AFDStrategy(**options), logger=False)
    assert part in str(error.value)
