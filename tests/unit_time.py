"""Run a schedule on paper: forward 1, backward 2 (on F: 1 for the input gradient, 1 for the weight gradient)."""

from dataclasses import dataclass, field

from lightning_afd.placement import Worker
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.shape import Schedule


@dataclass
class Paper:
    """Programs executed with blocking receives; a transfer takes `transfer`, a tail `tail` times a segment.

    With different numbers of groups the work is divided evenly over all workers: a forward lasts as many units as its
    role has groups.
    """

    schedule: Schedule
    transfer: float = 0.0
    tail: float = 0.0
    clocks: dict[Worker, float] = field(default_factory=dict)
    sent: dict[Action, float] = field(default_factory=dict)

    def makespan(self) -> float:
        """Time from the first start to the last end."""
        programs = self.schedule.programs
        self.clocks, self.sent = dict.fromkeys(programs, 0.0), {}
        places = dict.fromkeys(programs, 0)
        moved = True
        while moved:
            moved = False
            for worker, program in programs.items():
                while places[worker] < len(program) and self._execute(worker, program[places[worker]]):
                    places[worker] += 1
                    moved = True
        assert all(places[worker] == len(program) for worker, program in programs.items()), "deadlock"
        return max(self.clocks.values())

    def _execute(self, worker: Worker, action: Action) -> bool:
        if not action.is_transfer:
            shape = self.schedule.shape
            unit = self.tail if action.layer == shape.layers else 1.0
            if not isinstance(shape.groups, int):
                unit *= shape.attention_groups if action.op == "A" else shape.ffn_groups
            whole = action.op == "A" and action.phase == "b" and not shape.splits(action.layer)
            self.clocks[worker] += unit * (2.0 if whole else 1.0)
        elif worker == self.schedule.shape.endpoints(action)[0]:
            self.sent[action] = self.clocks[worker]
        elif action in self.sent:
            self.clocks[worker] = max(self.clocks[worker], self.sent[action] + self.transfer)
        else:
            return False
        return True


def overhead(schedule: Schedule, transfer: float = 0.0) -> float:
    """Time beyond the work of the busiest worker, in units of (workers - 1), with a tail that costs nothing."""
    shape = schedule.shape
    rounds = -(-shape.layers // shape.groups)
    return (Paper(schedule, transfer).makespan() - 3 * rounds * shape.micro_batches) / (2 * shape.groups - 1)
