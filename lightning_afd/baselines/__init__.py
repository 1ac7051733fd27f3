"""What one would train with instead of separate workers, in the same simulator (no torch).

stages.py      pipeline stages whose ranks have attention and experts
units.py       orders of stages: interleaved 1F1B, DualPipe
programs.py    orders as programs, with what hides which transfers
collocated.py  seconds, transfers, reduces and memory of a collocated layout
predict.py     each method, tuned: predicted step times
apart.py       separate workers, tuned in the same way
"""
