"""Recorded steps (no torch).

record.py   the value: a timeline and what explains it
saved.py    one JSON file per step: save, load, recordings_in
chrome.py   the same for chrome://tracing and Perfetto
"""

from lightning_afd.recording.chrome import chrome_trace, write_chrome_trace
from lightning_afd.recording.record import NicTraffic, RankClock, Recording, Traffic, Versions
from lightning_afd.recording.saved import load, recordings_in, save

__all__ = [
    "NicTraffic",
    "RankClock",
    "Recording",
    "Traffic",
    "Versions",
    "chrome_trace",
    "load",
    "recordings_in",
    "save",
    "write_chrome_trace",
]
