"""Make the cost model true on the ranks at hand.

setting.py     in what, and how often, things are measured
sample_job.py  one A rank and one F rank in this thread: attention, ends, what messages cost beside their way
compute.py     all kinds of actions on this rank, experts included
links.py       messages between ranks
together.py    all ranks: what each has measured becomes one cluster
"""

from lightning_afd.allocate.calibration import Calibration
from lightning_afd.calibrate.together import RankLinks, calibrate

__all__ = ["Calibration", "RankLinks", "calibrate"]
