"""The interleaved run: A B C A B C ..., all contenders in the same processes, each repetition with its own bound."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_afd.bench.engine_step import EngineStep, RankRecord
from lightning_afd.bench.job import Job
from lightning_afd.bench.machine import busy_seconds
from lightning_afd.bench.memory import peak_bytes
from lightning_afd.bench.overhead import BareShape, costs
from lightning_afd.bench.ratios import Bound, Spread, busiest_bytes
from lightning_afd.bench.registry import Contender
from lightning_afd.bench.repetition import Account, Alone, Condition, Entry, Repetition, Sample
from lightning_afd.bench.result import Measured, Section
from lightning_afd.bench.stages import Stages
from lightning_afd.errors import PlanError

BARE_STEPS = 15
WARM_UP = 2
"""Rounds before the first repetition: in the first one both ends of a channel learn how large messages are."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured."""

    repetitions: int = 7
    most_foreign_cpu: float | None = None
    """A repetition in which other processes took more CPU seconds is made again; None: never."""
    tick: Callable[[str], None] = lambda what: None
    """Called on rank 0 before each step."""


class Comparison:
    """Contenders on the ranks of a job; the same ones measure one section after another. All methods are collective."""

    def __init__(self, job: Job, contenders: Sequence[Contender]) -> None:
        """Build them all; raises PlanError where the first one fails, which is what others are measured against."""
        self._job = job
        self.left_out: list[str] = []
        """One line for each contender that has failed on any rank while it was built, or in its first step."""
        tried = [self._first_step(contender) for contender in contenders]
        if tried[0] is None:
            raise PlanError(self.left_out[0])
        self.entries = [entry for entry in tried if entry is not None]
        self._alone = self._twins()
        for _ in range(WARM_UP - 1):
            for entry in self.entries:
                self._run(entry)

    def _first_step(self, contender: Contender) -> Entry | None:
        """Build it and make a step; None on all ranks where any of them has failed."""
        entry, loss, problem = None, 0.0, ""
        try:
            entry = Entry(contender, contender.make(self._job))
            loss = entry.step()
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        losses, problems = zip(*self._job.gather((loss, problem)), strict=True)
        failed = next(((rank, one) for rank, one in enumerate(problems) if one), None)
        if failed is not None:
            self.left_out.append(f"{contender.name}: left out, as rank {failed[0]} raised {failed[1]}")
            return None
        assert entry is not None
        entry.losses.append(sum(losses))
        return entry

    def section(self, rate: str, effort: Effort) -> Section:
        """Measure under the present condition of the network, which is called `rate`."""
        conditions: list[Condition] = []
        foreign: list[float] = []
        operators: dict[str, Stages] = {}
        for entry in self.entries:
            entry.forget()
        again = effort.repetitions if effort.most_foreign_cpu is not None else 0
        while len(conditions) < effort.repetitions:
            before = self._cpu()
            repetition = self._repetition(effort)
            spent = self._job.gather(self._cpu() - before)[0]  # as rank 0 sees its machine
            if again and spent > (effort.most_foreign_cpu or 0.0):
                again -= 1
                continue
            for entry, sample in zip(self.entries, repetition.samples, strict=True):
                entry.keep(sample)
            for one in repetition.condition.alone:
                operators.setdefault(one.role, Stages(one.layers)).add(one.spans)
            conditions.append(repetition.condition)
            foreign.append(spent)
        for entry in self.entries:
            entry.memory = self._job.gather(peak_bytes(entry.step, self._job.device))
        return Section(
            rate=rate,
            measured=[self._measured(entry) for entry in self.entries],
            link_rates=[condition.rate for condition in conditions],
            compute={role: [one.compute[role] for one in conditions] for role in conditions[0].compute},
            operators={role: stages.quantiles() for role, stages in operators.items()},
            foreign_cpu=foreign,
            notes=self.left_out,
        )

    # -- one repetition -------------------------------------------------------------------------------------------

    def _repetition(self, effort: Effort) -> Repetition:
        tick = effort.tick if self._job.rank == 0 else lambda what: None
        tick("link rate")
        rate = max(self._job.gather(self._job.link_rate()))
        tick("computation alone")
        condition = Condition(rate=rate, alone=self._compute_alone())
        samples = []
        for entry in self.entries:
            tick(entry.contender.name)
            seconds = self._run(entry)
            account = None if entry.engine is None else self._account(entry.engine, condition)
            samples.append(Sample(seconds=seconds, account=account))
        return Repetition(condition=condition, samples=samples)

    def _run(self, entry: Entry) -> float:
        seconds, losses = self._job.slowest(entry.step)
        entry.losses.append(sum(losses))
        return seconds

    def _account(self, step: EngineStep, condition: Condition) -> Account:
        records: list[RankRecord] = self._job.gather(step.record())
        return Account(
            timeline=step.join(records).timeline,
            step_bytes=busiest_bytes([record.sent for record in records]),
            bound=self._bound(step, records, condition),
        )

    def _bound(self, step: EngineStep, records: Sequence[RankRecord], condition: Condition) -> Bound:
        """Computation alone, with the optimizer's step as it was measured in this one, and the wire."""
        compute: dict[str, float] = {}
        for rank, record in enumerate(records):
            role = _role(step, rank)
            compute[role] = max(compute.get(role, 0.0), condition.compute[role] + record.optimizer)
        return Bound(compute=compute, wire=busiest_bytes([record.sent for record in records]) / condition.rate)

    # -- computation without communication ------------------------------------------------------------------------

    def _twins(self) -> list[EngineStep]:
        """One more of our own per layout and number of micro-batches: its weights stay, and it only computes."""
        specs = {
            (engine.layout, engine.spec.micro_batches): replace(engine.spec, dedup=True)
            for engine in (entry.engine for entry in self.entries)
            if engine is not None
        }
        twins = [EngineStep(self._job, spec) for spec in specs.values()]
        for twin in twins:
            twin.keep_messages()
        return twins

    def _compute_alone(self) -> list[Alone]:
        return [
            Alone(role=_role(twin, rank), layers=twin.plan.layers, spans=spans)
            for twin in self._alone
            for rank, spans in enumerate(self._job.slowest(twin.compute_alone)[1])
        ]

    # -- results --------------------------------------------------------------------------------------------------

    def _measured(self, entry: Entry) -> Measured:
        common = {
            "name": entry.contender.name,
            "seconds": list(entry.seconds),
            "losses": list(entry.losses),
            "same_weights": entry.contender.same_weights,
            "memory": {f"rank {rank}": nbytes for rank, nbytes in enumerate(entry.memory)},
        }
        engine, details = entry.engine, entry.details
        if engine is None or details is None:
            return Measured(plan="", **common)  # type: ignore[arg-type]
        bare = self._job.gather(_overhead(engine) if self._job.rank == 0 else None)[0]
        step = Spread.of(entry.seconds).median
        return Measured(
            plan=_plan_of(engine),
            bounds=list(entry.bounds),
            bound_by=details.bound_by,
            step_bytes=details.step_bytes,
            usage=details.usage(),
            stages=details.stages(),
            overhead={role: seconds / step for role, seconds in bare.items()},
            advice=details.advice,
            **common,  # type: ignore[arg-type]
        )

    def _cpu(self) -> float:
        """Collective: CPU seconds of this machine so far without those of the ranks; right where all are on one."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        own = self._job.gather(usage.ru_utime + usage.ru_stime)
        return busy_seconds() - sum(own)


def _overhead(step: EngineStep) -> dict[str, float]:
    """Seconds per step of the engine's own work, by role."""
    bare = BareShape(
        layout=step.layout,
        order=step.spec.order,
        layers=step.plan.layers,
        micro_batches=step.shape.micro_batches,
        dedup=step.spec.dedup,
    )
    return {role: cost.step for role, cost in costs(bare, BARE_STEPS).items()}


def _role(step: EngineStep, rank: int) -> str:
    """`A R=4`: whose computation alone bounds this rank's."""
    role = "AF" if step.layout.collocated else step.layout.worker_of(rank).role
    return f"{role} R={step.spec.micro_batches}"


def _plan_of(step: EngineStep) -> str:
    dedup = "" if step.spec.dedup else ", no dedup"
    return f"{step.layout.describe()}, {step.spec.order}, R={step.shape.micro_batches}{dedup}"
