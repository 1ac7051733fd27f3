"""How a job is trained whose user has left that open: by an earlier plan, by a new one, or by rule."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_afd.allocate.choice import PlanChoice
from lightning_afd.allocate.choose import Effort
from lightning_afd.allocate.replica import Replicas, choose_for_replicas, cuts
from lightning_afd.allocate.request import RUNGS, Rung
from lightning_afd.checkpoint import open_checkpoint
from lightning_afd.cost.job import BatchShape
from lightning_afd.errors import CheckpointError, PlanError
from lightning_afd.model.place import placed_layout
from lightning_afd.model.sample import shape_of
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.placement import NEIGHBOURS, Layout
from lightning_afd.strategies.base import RankedStrategy
from lightning_afd.strategies.config import AFDConfig, Arrangement
from lightning_afd.strategies.planning.measured import Calibrate, described
from lightning_afd.strategies.planning.progress import showing_progress
from lightning_afd.strategies.planning.subject import Rows, choices_of, random_numbers_untouched, rows_of_fit
from lightning_afd.strategies.planning.trials import Trials, Tried

if TYPE_CHECKING:
    import lightning.pytorch as pl

PLAN_FILE = "plan.json"
ORDERS = ("af-pipe", "zero-bubble")
"""That are tried where the order is left open."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What all ranks do, and why."""

    arrangement: Arrangement
    lines: tuple[str, ...] = ()
    """For the log."""
    plan: PlanChoice | None = None
    is_new: bool = False
    """Whether the plan has been made just now."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Who asks."""

    strategy: RankedStrategy
    config: AFDConfig
    trainer: pl.Trainer
    checkpoint: str | None
    """From which this job goes on."""

    @property
    def world(self) -> int:
        return self.strategy.world_size

    @property
    def is_fit(self) -> bool:
        return self.trainer.state.fn == "fit"

    @property
    def module(self) -> Any:
        return self.strategy.lightning_module


class Decision:
    """Made on rank 0, with what all ranks measure, and told the others; each method is collective."""

    def __init__(self, asked: Asked, calibrate: Calibrate) -> None:
        self._asked = asked
        self._config = asked.config
        self._calibrate = calibrate

    def make(self) -> Decided:
        """Raises MisconfigurationException on all ranks for a plan file that does not fit, and by fallback="error"."""
        by_rule = self._config.arrange(self._asked.world)
        placed = placed_layout(self._asked.module)
        if placed is not None and placed.world == self._asked.world:
            return Decided(arrangement=self._as_placed(by_rule, placed))
        try:
            plan, origin = self._on_first(self._earlier_plan)
        except PlanError as error:
            raise MisconfigurationException(str(error)) from None
        if plan is not None:
            followed = self._follow(plan, origin)
            return replace(followed, lines=(*followed.lines, *self._other_options(plan, origin)))
        if not self._asked.is_fit:
            return Decided(arrangement=by_rule)
        try:
            with random_numbers_untouched():
                return self._new_plan()
        except PlanError as error:
            how = f"{by_rule.layout.describe()}, {by_rule.micro_batches} micro-batches"
            return Decided(arrangement=by_rule, lines=(f"no plan was made, so it is {how} by rule: {error}",))

    def _as_placed(self, by_rule: Arrangement, layout: Layout) -> Arrangement:
        """A module that an earlier Trainer has split stays as it is."""
        order = "flowmoe" if layout.collocated else by_rule.order
        reason = "the module was trained so before" if layout.collocated else ""
        return replace(by_rule, layout=layout, order=order, reason=reason)

    def _on_first(self, function: Callable[[], Any]) -> Any:
        """What `function` returns on rank 0, on every rank, and its PlanError as well."""
        answer: tuple[Any, str | None] = (None, None)
        if self._asked.strategy.global_rank == 0:
            try:
                answer = function(), None
            except PlanError as error:
                answer = None, str(error)
        value, refusal = self._asked.strategy.broadcast(answer, 0)
        if refusal is not None:
            raise PlanError(refusal)
        return value

    # -- earlier plans --------------------------------------------------------------------------------------------

    def _earlier_plan(self) -> tuple[PlanChoice | None, str]:
        """That of the user's file, or of the checkpoint if it is for such a job, and where it is from."""
        path = self._config.plan_file
        if path is not None:
            plan = PlanChoice.load(path)
            if refusal := self._refusal(plan):
                raise PlanError(f"plan={path} {refusal}")
            return plan, f"plan={path}"
        plan = self._plan_of_checkpoint()
        return (None, "") if plan is None or self._refusal(plan) else (plan, "the checkpoint's plan")

    def _plan_of_checkpoint(self) -> PlanChoice | None:
        path = self._asked.checkpoint
        if path is None or not Path(path).is_dir():  # Lightning's own files have no plan
            return None
        try:
            text = open_checkpoint(path, weights_only=self._config.weights_only).afd.get("notes", {}).get("plan")
            return None if text is None else PlanChoice.loads(text, path)
        except (CheckpointError, PlanError):
            return None  # loading it says what is wrong with it; a plan of another version is made again

    def _refusal(self, plan: PlanChoice) -> str | None:
        """Why a plan is none for this job."""
        layout, config, world = plan.best.layout, self._config, self._asked.world
        if layout.world != world:
            return (
                f"is for {layout.world} ranks ({layout.describe()}), but the Trainer has {world}: make the plan again, "
                f"or set devices and num_nodes so that their product is {layout.world}"
            )
        for name in ("attention", "ffn", "groups"):
            mine, its = getattr(config, name), getattr(layout, name)
            if mine not in ("auto", its):
                return f"has {name}={its}, but the strategy was given {name}={mine}: leave one of them out"
        try:
            model = shape_of(self._asked.module).describe()
        except PlanError:
            return None
        if plan.model not in ("", model):
            return f"is for a model of {plan.model}, but this one has {model}: make the plan again"
        return None

    def _other_options(self, plan: PlanChoice, origin: str) -> list[str]:
        """A line about what a plan has been made for that this job does otherwise."""
        try:
            mine = choices_of(self._config, self._asked.trainer).options
        except PlanError:
            return []
        if not (others := plan.others(mine)):
            return []
        its, here = (", ".join(f"{name}={found[name]}" for name in others) for found in (others, mine))
        return [
            f"{origin} was made for {its}, but this job has {here}, so that its predictions are of another job: give "
            "both the same options"
        ]

    # -- a new plan -----------------------------------------------------------------------------------------------

    def _new_plan(self) -> Decided:
        start, asked, config = time.perf_counter(), self._asked, self._config
        batch = self._batch()
        with showing_progress(asked.trainer) as progress:
            measured = self._calibrate(
                asked.module,
                BatchShape.rows(-(-batch.rows // min(4, batch.rows)), batch.tokens),
                self._on_first(self._cluster),
                asked.strategy.root_device,
                budget_seconds=config.planning.budget_seconds * (0.5 if config.planning.trials else 1.0),
                progress=progress,
                choices=choices_of(config, asked.trainer),
            )
            job = self._job(measured, batch)
            plan = self._on_first(lambda: choose_for_replicas(job, Effort()))
            found = Tried(layout=plan.best.layout)
            if not config.falls_back(plan.verdict.disaggregate):
                trials = Trials(asked.strategy, asked.module, config, start + config.planning.budget_seconds)
                found = trials.run(job, plan.best, progress)
        if found.layout != plan.best.layout:
            own = job.only(found.layout, plan.best.micro_batches)
            plan = self._on_first(lambda: choose_for_replicas(own, Effort()))
        how = f"a plan after {time.perf_counter() - start:.0f} s"
        followed = self._follow(plan, how)
        return replace(followed, is_new=True, lines=(*followed.lines, *found.lines))

    def _batch(self) -> Rows:
        """The batch of a replica as rank 0 sees it, on all ranks."""
        refusal, found = None, None
        try:
            found = rows_of_fit(self._asked.trainer, self._config.planning)
        except PlanError as error:
            refusal = error

        def answer() -> Rows:
            if found is None:
                assert refusal is not None
                raise refusal
            return found

        shape = self._on_first(answer)
        assert isinstance(shape, Rows)
        return shape

    def _cluster(self) -> Any:
        strategy = self._asked.strategy
        return described(strategy.num_nodes, self._asked.world // strategy.num_nodes, strategy.root_device)

    def _job(self, measured: Any, batch: Rows) -> Replicas:
        config = self._config
        return Replicas(
            request=measured.request(
                1,
                rungs=_rungs(config),
                orders=ORDERS if config.order == "auto" else (config.order,),
                neighbours=NEIGHBOURS if config.neighbours == "auto" else (config.neighbours,),
            ),
            rows=batch.rows,
            length=batch.tokens,
            layouts=tuple(layout for layout in config.sizes.layouts(self._asked.world) if config.allows(layout)),
            micro_batches=cuts(batch.rows) if config.micro_batches == "auto" else (config.micro_batches,),
        )

    # -- what follows ---------------------------------------------------------------------------------------------

    def _follow(self, plan: PlanChoice, origin: str) -> Decided:
        best, config, verdict = plan.best, self._config, plan.verdict
        if config.falls_back(verdict.disaggregate):
            if config.fallback == "error":
                raise MisconfigurationException(
                    f"strategy afd ends, as fallback='error' says. {verdict.sentence} Use strategy='flowmoe', "
                    "fallback='collocated', or give attention and ffn"
                )
            reason = f"{origin} says: {verdict.sentence}"
            arrangement = config.collocated(self._asked.world, reason, verdict.collocated[0])
            return Decided(arrangement=arrangement, plan=plan)
        arrangement = config.planned(best)
        return Decided(arrangement=arrangement, plan=plan, lines=tuple(self._lines(plan, arrangement, origin)))

    def _lines(self, plan: PlanChoice, done: Arrangement, origin: str) -> list[str]:
        best, accumulated = plan.best, self._asked.trainer.accumulate_grad_batches
        again = f"recompute={done.recompute}" + (" and recompute_experts" if done.recompute_experts else "")
        again += ", dedup=node" if self._config.dedup == "node" else ""
        lines = [
            f"{origin}: {done.layout.describe()}, order {done.order}, {done.micro_batches} micro-batches, {again}, "
            f"{best.seconds:.3g} s per step (predicted)",
            plan.verdict.sentence,
        ]
        if best.passes not in (1, accumulated):
            lines.append(
                f"the plan has {best.passes} passes per optimizer step, to fit into memory, but the Trainer has "
                f"accumulate_grad_batches={accumulated}: batches are left as they are, so cut them by {best.passes} "
                f"and set accumulate_grad_batches={best.passes * accumulated}"
            )
        return lines


def save_plan(decided: Decided, trainer: pl.Trainer) -> None:
    """Collective: rank 0 writes a new plan beside the logs."""
    if decided.plan is None or not decided.is_new:
        return
    folder = Path(trainer.log_dir or trainer.default_root_dir)
    if trainer.global_rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        decided.plan.save(folder / PLAN_FILE)


def _rungs(config: AFDConfig) -> tuple[Rung, ...]:
    """Recomputation that the options allow."""
    wanted = config.recompute, config.recompute_experts
    allowed = tuple(r for r in RUNGS if all(w in ("auto", has) for w, has in zip(wanted, r, strict=True)))
    return allowed or ((config.recompute, bool(config.recompute_experts)),)  # type: ignore[return-value]
