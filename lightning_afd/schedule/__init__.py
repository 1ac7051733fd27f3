"""Schedules are values: who does what in which order, without torch, ranks, time or environment.

actions.py   one step of a program and its short name
shape.py     what has to be done: owners, endpoints, the dependency rule; the Schedule
orders.py    in which order: sequential, layer-major, af-pipe, zero-bubble
fill.py      weight gradients as fillers of gaps
passes.py    Schedule -> Schedule
check.py     complete, ordered, free of deadlock, or a ScheduleError that shows the place
"""
