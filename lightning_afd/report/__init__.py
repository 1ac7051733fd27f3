"""A page about a run: its recorded steps as one HTML file that needs nothing else (no torch).

run.py        what a run's folder holds: recordings, metrics, settings
predict.py    the recorded step again, from the simulator with measured costs
markup.py     HTML and SVG elements, tables, numbers for people
charts.py     line charts, stacked bars, heat maps
lanes.py      two timelines above one another
summary.py, timelines.py, shares.py, traffic.py, experts.py, progress.py    the panels
page.py       the page around them; its style.css and zoom.js
"""

from lightning_afd.report.page import PANELS, REPORT, has_recordings, write_report

__all__ = ["PANELS", "REPORT", "has_recordings", "write_report"]
