"""A folder that looks like /sys/class where NICs are looked up."""

from pathlib import Path


class Sysfs:
    """Files of interfaces and InfiniBand devices; what is made twice gets new numbers."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def interface(
        self, name: str, *, up: bool = True, hardware: bool = False, bridge: bool = False, kind: int = 1, **moved: int
    ) -> None:
        """`moved` has bytes: out, into."""
        folder = self.root / "net" / name
        self._write(folder / "statistics", tx_bytes=moved.get("out", 0), rx_bytes=moved.get("into", 0))
        self._write(folder, flags="0x1003" if up else "0x1002", type=kind)
        for part in ["device"] * hardware + ["bridge"] * bridge:
            (folder / part).mkdir(exist_ok=True)

    def infiniband(self, name: str, *, up: bool = True, out: int = 0, into: int = 0) -> None:
        """`out` and `into` are words of four bytes."""
        port = self.root / "infiniband" / name / "ports" / "1"
        self._write(port / "counters", port_xmit_data=out, port_rcv_data=into)
        self._write(port, state="4: ACTIVE" if up else "1: DOWN")

    def _write(self, folder: Path, **files: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(f"{content}\n")
