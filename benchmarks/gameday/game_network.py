"""Hosts of a game: network name spaces on one bridge, and faults between them.

Packets from a host to another one are lost on command by a neighbour entry that names a machine that does not exist:
packets leave and arrive nowhere, without an error and in one direction alone.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["HOSTS", "Network", "left_out"]

HOSTS = {
    "root": "10.78.0.1",
    "store": "10.78.0.10",
    **{f"m{number}": f"10.78.0.{10 + number}" for number in (1, 2, 3)},
    **{f"e{number}": f"10.78.0.{20 + number}" for number in (1, 2, 3, 4)},
    "prober": "10.78.0.31",
}
_BRIDGE = "game0"
_ABSENT_MAC = "02:00:00:00:ff:fe"
_SLOW = "rate 256kbit burst 8kb latency 300ms"
_LOST_PERCENT = 15


def left_out() -> dict[str, str]:
    """Return the capabilities that this machine lacks, and why."""
    if _loss_tool():
        return {}
    return {"loss": "neither netem in the kernel nor nft here: make iproute installs nft"}


def _loss_tool() -> str:
    """Return the means of losing packets: netem where the kernel has it, else nft."""
    tried = subprocess.run(
        [
            "unshare",
            "--net",
            "sh",
            "-ec",
            "ip link add a0 type veth peer name b0; tc qdisc add dev a0 root netem loss 1%",
        ],
        capture_output=True,
    )
    if tried.returncode == 0:
        return "netem"
    if shutil.which("nft") is None:
        return ""
    rule = "nft add table ip t; nft add chain ip t c '{ type filter hook input priority 0; }'"
    tried = subprocess.run(
        ["unshare", "--net", "sh", "-ec", f"{rule}; nft add rule ip t c numgen random mod 100 '<' 1 drop"],
        capture_output=True,
    )
    return "nft" if tried.returncode == 0 else ""


@dataclass(slots=True)
class Network:
    """A bridge and a host for each address; the process that makes it is the host `root`, which nothing happens to."""

    _loss: str = field(default_factory=_loss_tool)

    def lay(self) -> None:
        """Make everything, in the network of this process."""
        _run("ip link set lo up")
        _run(f"ip link add {_BRIDGE} type bridge")
        _run(f"ip address add {HOSTS['root']}/24 dev {_BRIDGE}")
        _run(f"ip link set {_BRIDGE} up")
        for name in HOSTS:
            if name != "root":
                self._add(name)

    def _add(self, name: str) -> None:
        _run(f"ip netns add {name}")
        _run(f"ip link add v-{name} type veth peer name eth0 netns {name}")
        _run(f"ip link set v-{name} master {_BRIDGE} up")
        _run(f"ip -n {name} address add {HOSTS[name]}/24 dev eth0")
        _run(f"ip -n {name} link set eth0 up")
        _run(f"ip -n {name} link set lo up")

    def on(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a program on a host."""
        return list(command) if name == "root" else ["nsenter", f"--net=/run/netns/{name}", "--", *command]

    def cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Lose all packets that the first of each pair sends to the second."""
        for sender, receiver in pairs:
            _run(f"ip -n {sender} neigh replace {HOSTS[receiver]} lladdr {_ABSENT_MAC} dev eth0 nud permanent")

    def mend(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Undo `cut`."""
        for sender, receiver in pairs:
            _run(f"ip -n {sender} neigh del {HOSTS[receiver]} dev eth0")

    def slow(self, name: str) -> None:
        """Let a host send and receive as through a narrow, filled line."""
        for device in self._ends(name):
            _run(f"{device} root tbf {_SLOW}")

    def abandon(self, name: str) -> None:
        """Let some of the packets that a host sends and receives get lost."""
        if self._loss == "netem":
            for device in self._ends(name):
                _run(f"{device} root netem delay 20ms 10ms loss {_LOST_PERCENT}%")
            return
        enter = f"nsenter --net=/run/netns/{name} -- nft"
        _run(f"{enter} add table ip game")
        for hook in ("input", "output"):
            _run(f"{enter} add chain ip game {hook} {{ type filter hook {hook} priority 0; }}")
            _run(f"{enter} add rule ip game {hook} numgen random mod 100 < {_LOST_PERCENT} drop")

    def heal(self, name: str) -> None:
        """Undo `slow` and `lose`."""
        for device in self._ends(name):
            subprocess.run(f"{device} root".replace("qdisc replace", "qdisc del").split(), capture_output=True)
        if self._loss == "nft":
            subprocess.run(f"nsenter --net=/run/netns/{name} -- nft delete table ip game".split(), capture_output=True)

    @staticmethod
    def _ends(name: str) -> tuple[str, str]:
        return f"tc -n {name} qdisc replace dev eth0", f"tc qdisc replace dev v-{name}"


def _run(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{line}: {done.stderr.strip()}")
