"""Users on many GPUs and hosts: how many replicas hold them, which resource binds, what the links carry, tokens per second.

A replica is the fewest GPUs of one host that hold the weights and a user; it runs its users as the rows of one step. Replicas share
nothing: users are dealt to them evenly. Of a replica of several GPUs weights, KV and reads are taken to be divided evenly; what they
exchange is counted (`peer`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from semkv.errors import ConfigError

from .decoder import Decoder
from .machine import Machine
from .plan import Estimator, Workload

MEASURED = {"full": 2.53, "compresskv": 12.47, "sekv": 15.51}
"""A step's median over its floor, by method: at 131,072 tokens and 10 %, one row, on an H200 (benchmarks/results/decode_step.json). Most of
it is the host's time, which more rows may share."""
MOST_GPUS = 1 << 20


@dataclass(frozen=True)
class Fleet:
    """What is asked for.

    users: with a context each, all of them answering at once. gpus: that there are, None: as many as are needed. host_memory: bytes of
    a host, None: without limit. network: bytes per second between hosts, one direction.
    """

    users: int
    gpus: int | None = None
    gpus_per_host: int = 8
    host_memory: int | None = None
    network: int = 12_500_000_000

    def __post_init__(self) -> None:
        for name, value in (("users", self.users), ("gpus", self.gpus), ("gpus-per-host", self.gpus_per_host)):
            if value is not None and not 1 <= value <= MOST_GPUS:
                raise ConfigError(f"--{name} {value}: expected a number from 1 to {MOST_GPUS:,}")


@dataclass(frozen=True)
class Deployment:
    """One way to hold the users.

    way: of `semkv.planning.plan.WAYS`. replica_gpus: of one replica. replicas, gpus, hosts: that are used, those that there are or as many
    as the users need. needed_gpus: the fewest that hold all users. capacity: users that the replicas hold. served: of those asked for.
    users_per_replica: of the fullest one. binds: what ends the capacity, `device memory` or `host memory`.
    device, host: bytes on each GPU and each host. link: bytes per second that a GPU's link to the host carries at the floor. peer: those
    that a GPU exchanges with the others of its replica. session: bytes of a user's memory; session_seconds: to move them to another host.
    step_floor: seconds of a step at the floor, `step_binds` by the device's or the link's bandwidth. slower: an estimate of how much
    longer a step takes.
    """

    way: str
    replica_gpus: int
    replicas: int
    gpus: int
    hosts: int
    needed_gpus: int
    capacity: int
    served: int
    users_per_replica: int
    binds: str
    device: int
    host: int
    link: float
    peer: float
    session: int
    session_seconds: float
    step_floor: float
    step_binds: str
    slower: float

    @property
    def floor_tokens(self) -> float:
        """Tokens per second of all users, which nothing can exceed."""
        return self.served / self.step_floor

    @property
    def estimated_tokens(self) -> float:
        """An estimate of them."""
        return self.floor_tokens / self.slower

    @property
    def estimated_tokens_per_user(self) -> float:
        """An estimate of one user's."""
        return 1 / (self.step_floor * self.slower)


def slowdown(method: str | None, way: str) -> tuple[float, str]:
    """How many floors a step takes, and the method whose measurement says so: that of `full`, of the method, or the slowest."""
    name = "full" if way == "full" else method if method in MEASURED else max(MEASURED, key=lambda name: MEASURED[name])
    return MEASURED[name], name


def deploy(
    decoder: Decoder, machine: Machine, workload: Workload, fleet: Fleet, method: str | None = None
) -> tuple[Deployment, ...]:
    """The full KV on the devices, and semkv's budget where the workload has one.

    Raises
    ------
    ConfigError: no replica of one host holds a user, or there are fewer GPUs than a replica takes.
    """
    ways = ("full",) if workload.budget is None else ("full", "budget")
    found = [_deployed(decoder, machine, replace(workload, rows=1, host=None), fleet, way, method) for way in ways]
    made = tuple(one for one in found if isinstance(one, Deployment))
    if not isinstance(found[-1], Deployment):
        raise ConfigError(found[-1])
    return made


def _deployed(
    decoder: Decoder, machine: Machine, workload: Workload, fleet: Fleet, way: str, method: str | None
) -> Deployment | str:
    """A text that says why, where the way holds no user."""
    size, estimator = 1, Estimator(decoder, machine, workload)
    while estimator.most_rows(way, workload.tokens) < 1:
        size *= 2
        if size > fleet.gpus_per_host:
            return (
                f"{decoder.name}: {fleet.gpus_per_host} GPU(s) of a host, {machine.name}, do not hold the weights and one user of "
                f"{workload.tokens:,} tokens: give larger GPUs, more with --gpus-per-host, a shorter --context or a smaller --budget"
            )
        estimator = Estimator(decoder, _together(machine, size), workload)
    one = estimator.bytes_of(way, workload.tokens, 1)
    assert one is not None
    rows = estimator.most_rows(way, workload.tokens)
    room = None if fleet.host_memory is None or not one.host else int(fleet.host_memory // one.host)
    if room == 0:
        return (
            f"--host-memory {fleet.host_memory:,}: a user of {workload.tokens:,} tokens takes {one.host:,.0f} bytes of a host; give "
            "more, or --waits none where the method drops tokens"
        )
    most = fleet.gpus_per_host // size  # replicas of a host
    if fleet.gpus is not None and fleet.gpus < size:
        return (
            f"--gpus {fleet.gpus}: a replica of {decoder.name} with a user of {workload.tokens:,} tokens takes {size}"
        )

    def held(replicas: int) -> int:
        return replicas * rows if room is None else min(replicas * rows, room)

    full_hosts, left = divmod(fleet.users, held(most))
    rest = next((n for n in range(most + 1) if held(n) >= left), most)
    if fleet.gpus is None:
        hosts, beside = full_hosts, rest
    else:
        hosts = fleet.gpus // fleet.gpus_per_host
        beside = min(most, fleet.gpus % fleet.gpus_per_host // size)
    replicas = hosts * most + beside
    capacity = hosts * held(most) + held(beside)
    served = min(fleet.users, capacity)
    each = -(-served // replicas)
    if (
        room is not None and min(most, replicas) * each > room
    ):  # whole hosts are full, a part of one takes more for each GPU
        others = -(-(served - hosts * room) // beside) if beside else 0
        each = max(-(-min(room, served) // most), others) if hosts else others
    found = estimator.bytes_of(way, workload.tokens, each)
    assert found is not None
    times = (found.read / estimator.machine.bandwidth, found.moved / estimator.machine.link)
    step = max(times)
    session = one.device - decoder.weights - estimator.runtime + one.host
    return Deployment(
        way=way,
        replica_gpus=size,
        replicas=replicas,
        gpus=replicas * size,
        hosts=hosts + (beside > 0),
        needed_gpus=(full_hosts * most + rest) * size,
        capacity=capacity,
        served=served,
        users_per_replica=each,
        binds="host memory" if held(most) < most * rows else "device memory",
        device=round(found.device / size),
        host=round(min(min(most, replicas) * each, served, room or served) * one.host),
        link=found.moved / size / step,
        peer=_exchanged(decoder, size, each) / step,
        session=round(session),
        session_seconds=session / fleet.network,
        step_floor=step,
        step_binds="device bandwidth" if times[0] >= times[1] else "link",
        slower=slowdown(method, way)[0],
    )


def _together(machine: Machine, count: int) -> Machine:
    """Several GPUs as one."""
    return replace(
        machine,
        memory=count * machine.memory,
        bandwidth=count * machine.bandwidth,
        link=count * machine.link,
    )


def _exchanged(decoder: Decoder, count: int, rows: int) -> float:
    """Bytes that a GPU sends in a step: two sums over the replica in each layer, of a row's hidden state, in a ring."""
    return 2 * len(decoder.layers) * rows * decoder.hidden * decoder.itemsize * 2 * (count - 1) / count


__all__ = ["MEASURED", "Deployment", "Fleet", "deploy", "slowdown"]
