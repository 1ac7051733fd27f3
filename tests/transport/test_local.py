"""The in-process network: ranks take turns, deadlocks and lost messages are reported, collectives agree."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_afd.errors import ProtocolError
from lightning_afd.placement import Layout
from lightning_afd.transport.base import tag_of
from lightning_afd.transport.local import LocalNetwork, LocalTransport

variable: ContextVar[str] = ContextVar("variable", default="unset")


def network_of(attention: int, ffn: int, **options: Any) -> tuple[LocalNetwork, list[LocalTransport]]:
    network = LocalNetwork(Layout(attention=attention, ffn=ffn), **options)
    return network, [LocalTransport(network, rank) for rank in range(attention + ffn)]


def on_all(network: LocalNetwork, function: Callable[[int], Any]) -> list[Any]:
    return network.run([lambda rank=rank: function(rank) for rank in range(network.layout.world)])  # type: ignore[misc]


def bytes_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


@pytest.mark.parametrize("first", [0, 1])
def test_messages_arrive_whoever_runs_first(first: int) -> None:
    """Also where the first thing that a rank does is to wait, and the other one sends without having waited before."""
    network, transports = network_of(1, 1)

    def play(rank: int) -> list[int]:
        me, peer = transports[rank], 1 - rank
        posted = me.post("Df", peer, 0, 2)
        if rank != first:
            message = bytes_of(1, 2)
            me.send("Df", peer, 0, message)
            message.zero_()  # a message is taken when it is sent
            return posted.wait().tolist()
        got = posted.wait()
        me.send("Df", peer, 0, got + 1)
        return got.tolist()

    results = on_all(network, play)
    assert results[first] == [1, 2] and results[1 - first] == [2, 3]
    assert network.sent_bytes == {("Df", 0, 1): 2, ("Df", 1, 0): 2}


def test_channels_and_tags_keep_messages_apart() -> None:
    network, transports = network_of(1, 1)

    def play(rank: int) -> Any:
        if rank == 0:
            for number, (channel, tag) in enumerate([("Df", 0), ("Db", 0), ("Df", 1)]):
                transports[0].send(channel, 1, tag, bytes_of(number))  # type: ignore[arg-type]
            return None
        asked = [("Df", 1), ("Db", 0), ("Df", 0)]
        return [transports[1].post(c, 0, tag, 1).wait().item() for c, tag in asked]  # type: ignore[arg-type]

    assert on_all(network, play)[1] == [2, 1, 0]


def test_deadlock_names_what_each_rank_waits_for() -> None:
    network, transports = network_of(1, 2)

    def play(rank: int) -> None:
        if rank < 2:
            transports[rank].post("Cb", 2, tag_of(4, 1), 1).wait()

    with pytest.raises(ProtocolError) as failure:
        on_all(network, play)
    assert str(failure.value) == "deadlock: rank 0 waits for C4b1 from rank 2; rank 1 waits for C4b1 from rank 2"


@pytest.mark.parametrize(("hold", "order"), [(False, ["receiver", "bystander"]), (True, ["bystander", "receiver"])])
def test_held_message_arrives_after_what_other_ranks_do(hold: bool, order: list[str]) -> None:
    log: list[str] = []
    network, transports = network_of(1, 2, hold=lambda channel, tag: hold and "bystander" not in log)

    def play(rank: int) -> None:
        if rank == 0:
            transports[0].send("Cf", 1, 0, bytes_of(0))
        elif rank == 1:
            transports[1].post("Cf", 0, 0, 1).wait()
            log.append("receiver")
        else:
            log.append("bystander")

    on_all(network, play)
    assert log == order


def test_message_must_fit_and_must_be_received_once() -> None:
    network, transports = network_of(1, 1)

    def too_long(rank: int) -> None:
        if rank == 0:
            transports[0].send("Df", 1, tag_of(2, 3), bytes_of(1, 2, 3))
        else:
            transports[1].post("Df", 0, tag_of(2, 3), 2).wait()

    with pytest.raises(ProtocolError, match="message D2f3 from rank 0 to rank 1 has 3 bytes, the buffer 2"):
        on_all(network, too_long)

    def twice(rank: int) -> None:
        if rank == 0:
            transports[0].send("Df", 1, 0, bytes_of(1))
            transports[0].send("Df", 1, 0, bytes_of(1))

    with pytest.raises(ProtocolError, match="two messages D0f0 from rank 0 to rank 1"):
        on_all(network, twice)


def test_message_that_nobody_receives_is_an_error() -> None:
    network, transports = network_of(1, 1)
    with pytest.raises(ProtocolError, match="nobody received: D1f0 from rank 0 to rank 1"):
        on_all(network, lambda rank: transports[0].send("Df", 1, tag_of(1, 0), bytes_of(1)) if rank == 0 else None)


def test_exception_of_a_rank_comes_out() -> None:
    network, _ = network_of(1, 1)
    with pytest.raises(ZeroDivisionError):
        on_all(network, lambda rank: 1 // rank)


def test_collectives() -> None:
    network, transports = network_of(2, 1)

    def play(rank: int) -> Any:
        me = transports[rank]
        gathered = [me.all_gather([rank + 0.5, step]) for step in (0.0, 1.0)]
        tensor = torch.tensor([float(rank + 1)])
        me.sum_over_replicas(tensor)
        return gathered, me.broadcast_object({"from": rank} if rank == 1 else None, 1), tensor.item()

    results = on_all(network, play)
    for gathered, told, _ in results:
        assert gathered == [[[0.5, step], [1.5, step], [2.5, step]] for step in (0.0, 1.0)]
        assert told == {"from": 1}
    assert [total for _, _, total in results] == [3.0, 3.0, 3.0]  # A ranks: 1 + 2; the F rank alone: 3


def test_ranks_see_the_context_of_their_caller_and_not_of_each_other() -> None:
    network, _ = network_of(1, 1)
    variable.set("outside")

    def play(rank: int) -> str:
        seen = variable.get()
        variable.set(f"rank {rank}")
        return seen

    assert on_all(network, play) == ["outside"] * 2
    assert variable.get() == "outside"
