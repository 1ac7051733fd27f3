"""Everything that lightning-afd raises by itself.

AFDError
├── PlanError (ValueError)         what the user asked for cannot work: numbers and a remedy
├── ScheduleError (ValueError)     a schedule that cannot be executed: the grid and the place
├── CheckpointError (ValueError)   a checkpoint that is incomplete, of another model, or not safe to load
├── RecordingError (ValueError)    a file that is no recorded step, damaged, or of another version
├── ProtocolError (RuntimeError)   a message is not the one that the receiver waits for
│   └── StaleMessage               the message belongs to another step, attempt or expert map
└── PeerFailure (RuntimeError)     another rank failed first: its rank, role, action and exception
"""


class AFDError(Exception):
    """Base of all errors of this package."""


class PlanError(AFDError, ValueError):
    """A layout, plan, model or batch that cannot work, said before anything is lost."""


class ScheduleError(AFDError, ValueError):
    """A schedule that is incomplete, out of order or would deadlock."""


class CheckpointError(AFDError, ValueError):
    """A checkpoint that is incomplete, belongs to another model, or cannot be loaded safely."""


class RecordingError(AFDError, ValueError):
    """A file that is no recorded step, is damaged, or was written by another version."""


class ProtocolError(AFDError, RuntimeError):
    """A message whose header, size or dtype differs from what the receiver waits for."""


class StaleMessage(ProtocolError):
    """A message of another optimizer step, attempt or expert-map version."""


class PeerFailure(AFDError, RuntimeError):
    """Another rank failed first; the text names that rank, its role, its action and its exception."""
