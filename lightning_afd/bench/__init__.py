"""Strategies side by side on the ranks of one job: `lightning-afd bench`.

names.py, ratios.py, result.py    what is compared, arithmetic of repetitions, and the values that are kept (no torch)
workload.py, job.py               one model and its data; what the contenders of one rank share
engine_step.py, replay.py         a contender of our own, and its computation without any communication
registry.py                       contenders by name; others are functions `make(job) -> step`
compare.py                        the interleaved run
tables.py, picture.py, docs.py    what is shown of it
"""
