"""What a training step costs, from shapes and hardware figures alone: FLOPs, bytes, seconds, memory (no torch).

model.py      shapes of a model: matrices, parameters, FLOPs, exactly
config.py     shapes out of a transformers configuration
hardware.py   a cluster: rates, efficiencies, links
routing.py    how many copies of a token travel, and how uneven experts are
job.py        everything that an estimate is made for
in_flight.py  how many micro-batches a schedule holds
memory.py     bytes per rank
sums.py       all-reduces
times.py      seconds and bytes of each action
measured.py   rates of a cluster out of what its ranks have measured
"""
