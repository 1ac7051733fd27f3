"""Write docs/paper.md and its pictures: simulated results beside those of DisagMoE and FlowMoE.

Inputs are shapes (conf/model, and FlowMoE's in paper/flowmoe.py) and hardware rates (conf/cluster).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from paper import choices, flowmoe, pictures, shares, throughput
from paper.jobs import Section

DOCS = Path(__file__).resolve().parent.parent / "docs"
INTRODUCTION = """# Simulated results beside the papers'

Written by `python benchmarks/paper_figures.py`, from shapes (conf/model; FlowMoE's in benchmarks/paper/flowmoe.py) and
hardware rates (conf/cluster) alone. All methods run in the same simulator (`lightning_afd.simulate`) with the same
costs (`lightning_afd.cost`) and the same transport; what each baseline models is said in
`lightning_afd/baselines/predict.py`. The papers are DisagMoE (2605.11005) and FlowMoE
(2510.00207), both known here second-hand. Nothing is fitted to DisagMoE. For FlowMoE the batch, the top-k of the
custom layer, and the efficiency of PCIe were chosen with its published times in view, and the latency of a chunk
after a first look at the best S_p: absolute times and S_p of its tables are no independent check. The head of the
models is left out, as in DisagMoE's counts.

![speed](paper_speed.png)
![shares](paper_shares.png)
![ratio](paper_ratio.png)
![FlowMoE](paper_flowmoe.png)
"""
SECTIONS = (
    shares.figure_3,
    shares.figure_6,
    throughput.figure_10,
    throughput.bounds,
    throughput.figure_11,
    choices.figure_12,
    choices.figure_13,
    choices.figure_14,
    flowmoe.table_of_models,
    flowmoe.ablation,
)


def report(sections: list[Section]) -> str:
    """The whole page."""
    return "\n".join((INTRODUCTION, *(section.text() for section in sections)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder to write to")
    options = parser.parse_args()
    start = time.process_time()
    sections = []
    for make in SECTIONS:
        sections.append(make())
        sys.stderr.write(f"{sections[-1].title}: {time.process_time() - start:.0f} s\n")
    (options.docs / "paper.md").write_text(report(sections))
    for draw in pictures.PICTURES:
        draw(options.docs)
    sys.stderr.write(f"{time.process_time() - start:.0f} s of CPU in all\n")


if __name__ == "__main__":
    main()
