"""Strategies side by side on the ranks of one job: `lightning-afd bench`.

settings.py, names.py, conditions.py     what is asked for (no torch)
ratios.py, result.py                     arithmetic of repetitions, and what is kept of a run (no torch)
namespaces.py, start.py                  hosts on one machine, joined by links of a chosen rate; ranks on them
workload.py, job.py                      one model and its data; what the contenders of one rank share
registry.py                              contenders by name; other systems are functions `make(job) -> step`
engine_step.py, replay.py                contenders of our own, and their computation without any communication
balance.py, compare.py, rank.py          experts of the right width, the interleaved run, and one rank of it
overhead.py, memory.py, probes.py        the engine's own work, memory, and single links
report.py, tables.py, picture.py, docs.py, machine.py    what is shown
"""
