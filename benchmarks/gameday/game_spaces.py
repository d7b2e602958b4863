"""A world of its own for a game: mounts, network and process ids of which nothing is left when it ends.

The first process of a name space of process ids takes all others with it when it ends, however that happens, and with
the last process go network name spaces and mounts. So nothing has to be cleaned up, also after SIGKILL.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["enter", "why_not"]

_NEW_MOUNTS, _NEW_IDS, _NEW_NETWORK = 0x20000, 0x20000000, 0x40000000
_RECURSIVE, _PRIVATE = 0x4000, 1 << 18
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_TOOLS = {
    "ip": "make iproute",
    "tc": "make iproute",
    "nsenter": "util-linux",
    "mount": "mount",
    "redis-server": "make redis",
}
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Return why no game can be had on this machine, "" when it can."""
    if os.geteuid() != 0:
        return "network name spaces and mounts need root: run it as root"
    for tool, source in _TOOLS.items():
        if shutil.which(tool) is None:
            return f"there is no {tool} here: {source} has it"
    lines = ["ip link add one0 type veth peer name two0", "ip link add bridge0 type bridge", "mount -t tmpfs none /mnt"]
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-ec", "\n".join(lines)],
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        return f"name spaces need CAP_SYS_ADMIN and CAP_NET_ADMIN, and veth and bridge: {tried.stderr.strip()}"
    return ""


def enter(play: Callable[[], int]) -> int:
    """Run a function in a world of its own and return its exit code; SIGINT and SIGTERM end it in order.

    Args:
        play: called as the first process of that world; KeyboardInterrupt ends it.
    """
    _check(_libc.unshare(_NEW_MOUNTS | _NEW_IDS | _NEW_NETWORK), "unshare")
    child = os.fork()
    if child == 0:
        os._exit(_played(play))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: os.kill(child, signal.SIGTERM))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1


def _played(play: Callable[[], int]) -> int:
    os.setsid()  # a terminal's Ctrl-C reaches the parent alone, which signals us
    _libc.prctl(_DIE_WITH_PARENT, int(signal.SIGKILL))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        _check(_libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None), "mount /")
        _check(_libc.mount(b"proc", b"/proc", b"proc", 0, None), "mount /proc")
        Path("/run/netns").mkdir(parents=True, exist_ok=True)
        _check(_libc.mount(b"none", b"/run/netns", b"tmpfs", 0, None), "mount /run/netns")
        return play()
    except KeyboardInterrupt:
        return 130
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _interrupt(*_: object) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # an impatient second one changes nothing: the end is near
    raise KeyboardInterrupt


def _check(failed: int, what: str) -> None:
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
