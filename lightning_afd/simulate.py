"""Run a schedule on paper: a discrete-event simulator whose timeline has the type of measured ones.

Each worker executes its program in order. Sends go to the background, receives wait, as in the runtime; times are in
seconds. Lanes of a machine work at the same time, each on one thing after another, first come, first served: compute,
per class of links one lane for sending and one for receiving, and one for reducing gradients. Times may be any exact
numbers, fractions for example: the simulator only adds, divides and compares them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from lightning_afd.backlog import Backlog, Unreduced, makes_gradients
from lightning_afd.errors import ScheduleError
from lightning_afd.lanes import Track, Way
from lightning_afd.load import Chunks, Link, Load
from lightning_afd.placement import Layout, Worker
from lightning_afd.schedule.actions import Action, Op
from lightning_afd.schedule.check import check_executable, in_flight
from lightning_afd.schedule.shape import Schedule
from lightning_afd.timeline import Reduce, Span, Timeline


@dataclass(frozen=True, slots=True)
class Carried:
    """One transfer, or the reduce of a layer (`action` is then the one behind which it started)."""

    action: Action
    worker: Worker
    """The sender, or the worker that reduces."""
    asked: float
    """When it was handed over to its lane."""
    start: float
    end: float
    """Arrival of the last byte."""


Lane = tuple[Worker, Link | None, Way]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A simulated step."""

    schedule: Schedule
    timeline: Timeline
    """One rank per worker; sends are instants, receives last as long as they are waited for."""
    transfers: tuple[Carried, ...]
    """In the order in which they started."""
    reduces: tuple[Carried, ...]
    busy: Mapping[Lane, float]
    """Seconds in which each lane is occupied."""
    events: int
    """How many events it took: a measure of the simulator's work."""

    @property
    def seconds(self) -> float:
        """Length of the step, from 0 to the end of the last action or reduce."""
        ends = [span.end for span in self.timeline.spans] + [reduce.end for reduce in self.reduces]
        return max(ends, default=0)

    @property
    def bound(self) -> float:
        """What no order can beat with these costs: the seconds of the busiest lane."""
        return max(self.busy.values(), default=0)

    def held(self, worker: Worker) -> int:
        """The most (layer, micro-batch) pairs whose activations a worker holds at once."""
        return in_flight(self.schedule, worker)

    def early(self, worker: Worker) -> int:
        """The most messages that have arrived at a worker and are not asked for yet."""
        rank = self.timeline.layout.ranks_of(worker)[0]
        asked = {span.action: span.start for span in self.timeline.spans if span.rank == rank}
        changes: list[tuple[float, int]] = []
        for carried in self.transfers:
            if carried.worker != worker and carried.action in asked and carried.end < asked[carried.action]:
                changes += [(carried.end, 1), (asked[carried.action], -1)]
        most = here = 0
        for _, change in sorted(changes):
            here += change
            most = max(most, here)
        return most


def simulate(schedule: Schedule, load: Load) -> Simulation:
    """Execute all programs of a schedule under a load; raises ScheduleError if they come to a deadlock."""
    run = _Run(schedule, load)
    run.to_the_end()
    layout = Layout(attention=1, ffn=1, groups=schedule.shape.groups, head=schedule.shape.head)
    spans = (
        Span(action, layout.ranks_of(worker)[0], start, end)
        for worker in layout.workers()
        for action, start, end in run.done[worker]
    )
    reduces = run.reduces()
    chunks = (Reduce(chunk, layout.ranks_of(r.worker)[0], r.start, r.end) for chunk, r in enumerate(reduces))
    return Simulation(
        schedule=schedule,
        timeline=Timeline(layout, tuple(spans), tuple(chunks)),
        transfers=tuple(run.transfers),
        reduces=reduces,
        busy={lane: track.busy for lane, track in run.tracks.items()},
        events=run.events,
    )


@dataclass(frozen=True)
class _Gap:
    """An event: lanes of a machine may be free for a chunk."""

    machine: Worker
    chunks: Chunks


class _Run:
    """Events in the order of time: a worker goes on with its program, or a message starts on its way."""

    def __init__(self, schedule: Schedule, load: Load) -> None:
        self._schedule = schedule
        self._load = load
        self._places = dict.fromkeys(schedule.programs, 0)
        self._known: dict[tuple[Worker, Op | None, Way], Track] = {}
        self._arrived: dict[Action, float] = {}
        self._waiting: dict[Action, tuple[Worker, float]] = {}
        self._queue: list[tuple[float, bool, int, Worker | Action | _Gap]] = []
        self._asked: dict[Action, float] = {}
        self._backlog = Backlog(schedule.programs)
        self._reduced: list[Carried] = []
        self.done: dict[Worker, list[tuple[Action, float, float]]] = {worker: [] for worker in schedule.programs}
        self.transfers: list[Carried] = []
        self.tracks: dict[Lane, Track] = defaultdict(Track)
        self.events = 0

    def to_the_end(self) -> None:
        for worker in self._schedule.programs:
            self._push(0, worker)
        while self._queue:
            now, *_, what = heappop(self._queue)
            if isinstance(what, Action):
                self._start(what, now)
            elif isinstance(what, Worker):
                self._go_on(what, now)
            else:
                self._fill(what, now)
        if self._waiting:
            check_executable(self._schedule)
            raise ScheduleError(f"nothing happens any more, and {' '.join(map(str, self._waiting))} never came")

    def _push(self, time: float, what: Worker | Action | _Gap) -> None:
        """Events at the same time happen in the order in which they were found, chunks of reduces behind the others."""
        self.events += 1
        heappush(self._queue, (time, isinstance(what, _Gap), self.events, what))

    def _go_on(self, worker: Worker, now: float) -> None:
        """Execute a program up to its next action that takes time."""
        program, shape = self._schedule.programs[worker], self._schedule.shape
        while self._places[worker] < len(program):
            action = program[self._places[worker]]
            self._places[worker] += 1
            if action.op == "S":
                self.done[worker].append((action, now, now))
            elif not action.is_transfer:
                return self._compute(worker, action, now)
            elif worker == shape.endpoints(action)[0]:
                self._send(worker, action, now)
                if action.is_exchange:
                    self._waiting[action] = worker, now
                    return None
                self.done[worker].append((action, now, now))
            elif action not in self._arrived:
                self._waiting[action] = worker, now
                return None
            elif self._arrived[action] > now:
                return self._receive(worker, action, now)
            else:
                self.done[worker].append((action, now, now))

    def _compute(self, worker: Worker, action: Action, now: float) -> None:
        factor = self._load.imbalance if action.op == "E" else 1
        start, end = self._track(worker, None, "compute").occupy(now, self._load.seconds(action) * factor)
        self.done[worker].append((action, start, end))
        self._push(end, worker)
        if self._load.chunks and self._backlog.completes(worker, action):
            self._enqueue(Unreduced(action, worker, end, self._load.reduce(worker, action.layer)), self._load.chunks)

    def _enqueue(self, layer: Unreduced, chunks: Chunks) -> None:
        machine = self._load.machine(layer.worker)
        if layer.left and self._backlog.add(machine, layer):
            self._push(layer.asked, _Gap(machine, chunks))

    def _fill(self, gap: _Gap, now: float) -> None:
        """Send a chunk if the machine's lanes are free, else look again when they are."""
        machine, chunks = gap.machine, gap.chunks
        lanes = [self.tracks[machine, chunks.link, "send"], self.tracks[machine, chunks.link, "receive"]]
        layer = self._backlog.first(machine)
        free = max(layer.asked, *(lane.free for lane in lanes))
        if free > now:
            return self._push(free, gap)
        seconds = self._backlog.take(machine, chunks.longest) + chunks.launch
        for lane in lanes:
            lane.occupy(now, seconds)
        self._reduced.append(Carried(layer.action, layer.worker, layer.asked, now, now + seconds))
        if self._backlog.waits(machine):
            self._push(now + seconds, gap)
        return None

    def _send(self, worker: Worker, action: Action, now: float) -> None:
        """Put a message behind those that the worker sends over the same class of links."""
        self._asked[action] = now
        start, _ = self._track(worker, action.op, "send").occupy(now, self._seconds(worker, action))
        self._push(start, action)

    def _start(self, action: Action, now: float) -> None:
        """A message leaves; it has arrived when both ends are through with it."""
        sender, receiver = self._schedule.shape.endpoints(action)
        _, end = self._track(receiver, action.op, "receive").occupy(now, self._seconds(receiver, action))
        arrival = max(end, now + self._seconds(sender, action)) + self._load.links[action.op].latency
        self.transfers.append(Carried(action, sender, self._asked.pop(action), now, arrival))
        self._arrived[action] = arrival
        if action in self._waiting:
            worker, since = self._waiting.pop(action)
            self._receive(worker, action, since)

    def _receive(self, worker: Worker, action: Action, now: float) -> None:
        self.done[worker].append((action, now, self._arrived[action]))
        self._push(self._arrived[action], worker)

    def _seconds(self, worker: Worker, action: Action) -> float:
        """For how long a message occupies the lane of one of its ends."""
        factor = self._load.imbalance if worker.role == "F" else 1
        return self._load.bytes(action) * factor / self._load.links[action.op].rate(worker.role)

    def _track(self, worker: Worker, op: Op | None, way: Way) -> Track:
        """The lane of a worker for a kind of transfers, or for what is none (None)."""
        key = worker, op, way
        if key not in self._known:
            link = None if op is None else self._load.links[op]
            self._known[key] = self.tracks[self._load.machine(worker), link, way]
        return self._known[key]

    def reduces(self) -> tuple[Carried, ...]:
        """The chunks of all reduces, or the reduces of all layers, first come, first served."""
        if self._load.chunks:
            return tuple(self._reduced)
        found = []
        for asked, worker, action in sorted(self._complete(), key=lambda entry: entry[0]):
            seconds = self._load.reduce(worker, action.layer)
            if seconds:
                found.append(
                    Carried(action, worker, asked, *self._track(worker, None, "reduce").occupy(asked, seconds))
                )
        return tuple(found)

    def _complete(self) -> Iterator[tuple[float, Worker, Action]]:
        """When the gradients of each layer of a worker may be reduced, and its last action on them."""
        for worker, done in self.done.items():
            last = {action.layer: (end, action) for action, _, end in done if makes_gradients(action)}
            places = [(action.layer, end) for action, _, end in done if action.op == "S"]
            for layer, (end, action) in last.items():
                yield min((time for complete, time in places if complete <= layer), default=end), worker, action
