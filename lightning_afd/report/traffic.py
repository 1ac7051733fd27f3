"""The panel of bytes: per link and direction, per channel, per host."""

from __future__ import annotations

from lightning_afd.placement import Layout
from lightning_afd.recording import Recording, Traffic
from lightning_afd.report.markup import NONE, bytes_text, element, table, text
from lightning_afd.report.run import Run
from lightning_afd.report.shares import MESSAGES, WAYS, message_text

FORWARD_FIRST = str.maketrans("fb", "01")
LINKS = 16
"""Ranks in a table of links at most; more are summed up by worker."""


def traffic(run: Run) -> str:
    """Who sent how much to whom, on which channel, and what left a host."""
    senders = link_bytes(run.chosen)
    names = sorted({name for pair in senders for name in pair}, key=_name_key)
    most = max(senders.values(), default=0) or 1
    links = table(
        ("from \\ to", *names),
        ([text(one), *(_cell(senders.get((one, to), 0), most) for to in names)] for one in names),
        "matrix",
    )
    channels = table(("message", "way", "messages", "bytes", "mean size"), channel_rows(run.chosen))
    return links + channels + _hosts(run.chosen)


def link_bytes(recording: Recording) -> dict[tuple[str, str], int]:
    """Bytes by sender and receiver: ranks, or workers where there are more than LINKS ranks."""
    layout = recording.timeline.layout
    by_worker = layout.world > LINKS
    found: dict[tuple[str, str], int] = {}
    for one in recording.traffic:
        ends = [
            ", ".join(map(str, layout.workers_of(rank))) if by_worker else layout.name_of(rank).removeprefix("rank ")
            for rank in (one.sender, one.receiver)
        ]
        found[ends[0], ends[1]] = found.get((ends[0], ends[1]), 0) + one.nbytes
    return found


def _name_key(name: str) -> tuple[bool, int, str]:
    number = name.split(" ")[0]
    return (not number.isdigit(), int(number) if number.isdigit() else 0, name)


def _cell(nbytes: int, most: int) -> str:
    if not nbytes:
        return NONE
    return element("span", bytes_text(nbytes), class_="share", style=f"--share:{nbytes / most:.2f}")


def channel_rows(recording: Recording) -> list[list[str]]:
    """Per op and phase: between which roles, how many messages, how large."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for one in recording.traffic:
        key = one.channel, _way(recording.timeline.layout, one)
        messages, nbytes = sums.get(key, (0, 0))
        sums[key] = messages + one.messages, nbytes + one.nbytes
    return [
        [text(_channel_text(channel)), way, f"{messages:,}", bytes_text(nbytes), bytes_text(nbytes / max(messages, 1))]
        for (channel, way), (messages, nbytes) in sorted(sums.items(), key=lambda item: _channel_key(*item[0]))
    ]


def _way(layout: Layout, one: Traffic) -> str:
    """From which role to which one; ranks with both send dispatches as A ranks and combines as F ranks."""
    if layout.collocated:
        return "A → F" if one.channel.startswith("D") else "F → A"
    return " → ".join(layout.worker_of(rank).role for rank in (one.sender, one.receiver))


def _channel_key(channel: str, way: str) -> tuple[int, str, str]:
    """By op as in MESSAGES, forward first."""
    ops = list(MESSAGES)
    return ops.index(channel[0]) if channel[:1] in ops else len(ops), channel[1:].translate(FORWARD_FIRST), way


def _channel_text(channel: str) -> str:
    return message_text(channel) if channel[:1] in MESSAGES and channel[1:] in WAYS else channel


def _hosts(recording: Recording) -> str:
    if len({nic.rank for nic in recording.nics}) > 1:
        note = "NICs as their hosts count: all processes, headers of the network and sums of gradients included."
        return table(("NIC", "bytes out", "bytes in"), nic_rows(recording)) + element("p", note)
    rows = host_rows(recording)
    if not rows:
        return element("p", "All ranks share one host: nothing passed a NIC.")
    return table(("NICs of host", "bytes out", "bytes in"), rows)


def nic_rows(recording: Recording) -> list[list[str]]:
    """Bytes that were counted at each NIC, and those of the job's own messages between hosts where these are known."""
    counted = [
        [text(f"host of rank {nic.rank}: {nic.name}"), bytes_text(nic.out), bytes_text(nic.into)]
        for nic in recording.nics
    ]
    return counted + [[f"{name}: messages of the schedule", *moved] for name, *moved in host_rows(recording)]


def host_rows(recording: Recording) -> list[list[str]]:
    """Bytes that left and entered each host, all its NICs together; none where there is only one."""
    hosts = [clock.host for clock in recording.clocks]
    between = [(hosts[one.sender], hosts[one.receiver], one.nbytes) for one in recording.traffic]
    crossing = [link for link in between if link[0] != link[1]]
    if len(set(hosts)) == 1:
        return []
    return [
        [
            f"host of rank {host}",
            bytes_text(sum(nbytes for sender, _, nbytes in crossing if sender == host)),
            bytes_text(sum(nbytes for _, receiver, nbytes in crossing if receiver == host)),
        ]
        for host in sorted(set(hosts))
    ]
