"""DisagMoE's figures 3 and 6: what attention, experts and all-to-all take where nothing is overlapped."""

from __future__ import annotations

from paper.jobs import LENGTHS, Section, cluster_of, job_of, model_of, shares, table, with_top_k

CASES = (("none", 0.8), ("none", 0.45), ("node", 0.8), ("node", 0.45))
NAMES = {"none": "a row per expert", "node": "a row per node"}
NODES, TOP_K = (1, 2, 4, 8), (1, 2, 4, 6, 8)


def by_nodes(dedup: str, efficiency: float) -> list[float]:
    """Share of the all-to-all, by the number of nodes that share the experts (DeepSeek-MoE, 8192 tokens)."""
    job = job_of(model_of("DeepSeek-MoE"), 8192, cluster_of(efficiency), dedup)
    return [shares(job, 8 * nodes)[2] for nodes in NODES]


def by_top_k(dedup: str, efficiency: float, nodes: int = 2) -> list[float]:
    """The same, by the number of experts per token."""
    jobs = (job_of(with_top_k(model_of("DeepSeek-MoE"), k), 8192, cluster_of(efficiency), dedup) for k in TOP_K)
    return [shares(job, 8 * nodes)[2] for job in jobs]


def by_length(dedup: str, efficiency: float) -> list[tuple[float, float, float]]:
    """Shares of attention, experts and all-to-all of Qwen3 on 8 nodes."""
    return [shares(job_of(model_of("Qwen3"), length, cluster_of(efficiency), dedup), 64) for length in LENGTHS]


def figure_3() -> Section:
    head = ["all-to-all", "NIC efficiency", *(f"{nodes} node{'s' * (nodes > 1)}" for nodes in NODES)]
    rows = [(NAMES[d], e, *(f"{share:.0%}" for share in by_nodes(d, e))) for d, e in CASES]
    k_head = ["all-to-all", "NIC efficiency", *(f"k = {k}" for k in TOP_K)]
    k_rows = [(NAMES[d], e, *(f"{share:.0%}" for share in by_top_k(d, e))) for d, e in CASES]
    growth = by_nodes("none", 0.45)
    return Section(
        title="Figure 3: share of the all-to-all (DeepSeek-MoE, 8192 tokens)",
        lines=[
            "Paper: 22 % on one node, nearly 78 % on eight; it rises with top-k.",
            "",
            *table(head, [("paper", "", "22%", "", "", "78%"), *rows]),
            *table(k_head, k_rows),
            f"Agrees: on eight nodes within {abs(growth[-1] - 0.78):.2f}, on one within {abs(growth[0] - 0.22):.2f}, "
            "at the efficiency published for NCCL's all-to-all and with a row per expert, as Megatron-LM sends it. A "
            "row per node takes up to a fifth of the step away, most on two nodes; top-k then hardly "
            "matters, since a token "
            "visits every node anyway.",
        ],
    )


def figure_6() -> Section:
    paper = {4096: ("28.4%", "19.2%", "52.4%", "1.08", "0.73"), 32768: ("50.3%", "14.0%", "35.8%", "2.78", "0.77")}
    rows: list[tuple[object, ...]] = [(length, "paper", "", *values) for length, values in paper.items()]
    for dedup, efficiency in CASES:
        for length, found in zip(LENGTHS, by_length(dedup, efficiency), strict=True):
            if length in paper:
                ratios = (f"{2 * found[part] / found[2]:.2f}" for part in (0, 1))
                rows.append((length, NAMES[dedup], efficiency, *(f"{share:.1%}" for share in found), *ratios))
    rows.sort(key=lambda row: row[0])
    head = ["tokens", "all-to-all", "NIC efficiency", "attention", "experts", "all-to-all", "A / one", "F / one"]
    return Section(
        title="Figure 6: shares of Qwen3 on eight nodes",
        lines=[
            "`one` is half of the all-to-all, as the paper's ratios count it: they are ratios of times.",
            "",
            *table(head, rows),
            *_roofline(),
        ],
    )


def _roofline() -> list[str]:
    """The intensities of figure 6b, as printed, and the ridge that they are compared with."""
    cluster, model = cluster_of(), model_of("Qwen3")
    experts = model.moe[0]
    ridge = cluster.device.peak("bfloat16") / (cluster.nic.gb_per_s * 1e9 * cluster.ports)
    projections = model.hidden * (2 + 2 / 16)
    attention = [(projections + 4 * length) / (2 * experts.top_k) for length in (4096, 32768)]
    return [
        "Agrees: attention's ratio grows threefold, that of experts stays. Nearest are a row per node and 0.8 (ratios "
        "within 1.4); with a row per expert the all-to-all weighs more than the paper shows.",
        "",
        f"Figure 6b does not say more: with the paper's own formulas intensities are {attention[0]:,.0f} to "
        f"{attention[1]:,.0f} FLOP/B (attention, 4096 to 32768 tokens) and {2 * experts.width:,} (experts), below the "
        f"ridge of {ridge:,.0f} of an H800 with one 400 Gbit/s NIC, so that all would be bound by the network "
        "always. The "
        "formulas count neither deduplication nor the backward pass.",
    ]
