"""docker-compose.yml carried out as processes: every service with the user, volumes, command and checks that it names.

Differences, since there is no Docker and no registry: all services share one loopback device, where each has an address
of its own, which managers get in a setting; Redis takes the place of Valkey, it and Prometheus are Debian's packages;
Grafana is left out.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composed import MANAGERS, composed, words_of
from container_stand_in import Container, Network, Recipe
from image_build import Image
from waiting import until

__all__ = ["ADDRESSES", "Composition"]

ADDRESSES = {
    "manager-1": "127.0.0.11", "manager-2": "127.0.0.12", "manager-3": "127.0.0.13", "valkey": "127.0.0.20",
    "prometheus": "127.0.0.30", "localhost": "127.0.0.1",
}  # fmt: skip
_FOREIGN = {"valkey": {"valkey-server": "redis-server", "valkey-cli": f"redis-cli -h {ADDRESSES['valkey']}"}}
_PATH = "PATH=/usr/local/bin:/usr/bin:/bin"
_ENTRY = {"prometheus": ["prometheus"]}  # of images that are not at hand
_MODE_OF_ANY = 0o755


class Composition:
    """The services of the file, of which some are started.

    Args:
        images: the built images, by the target that a service names; programs of other services come from this host.
        place: directory for volumes, logs and roots.
    """

    def __init__(self, images: Mapping[str, Image], place: Path) -> None:
        self._images, self._place = images, place
        self.services: dict[str, dict[str, Any]] = composed()["services"]
        self._targets = {each["image"]: each["build"]["target"] for each in self.services.values() if "build" in each}
        self.network = Network()
        self.running: dict[str, Container] = {}
        self._starts = 0

    def start(self, name: str) -> Container:
        """Start a service and wait until it is healthy; a job until it has ended well."""
        service = self.services[name]
        self._starts += 1
        made = Container(self._recipe(name, service), self.network, self._place / f"{name}-{self._starts}")
        self.running[name] = made
        check = service["healthcheck"].get("test")
        if check is None:
            assert made.wait() == 0, made.log.read_text()
        else:
            until(lambda: made.is_healthy(self._foreign(name, check)), f"{name} is healthy")
        return made

    def close(self) -> None:
        """End everything."""
        for container in self.running.values():
            container.kill()
        self.network.close()

    def volume(self, name: str) -> Path:
        """Return the directory of a named volume."""
        return self._place / "volumes" / name

    def _recipe(self, name: str, service: dict[str, Any]) -> Recipe:
        target = self._targets.get(service["image"])
        image = self._images[target] if target else None
        root = image.root if image else self._host_root(name)
        config = image.config if image else {"Env": [_PATH], "Entrypoint": _ENTRY.get(name)}
        environment = dict(pair.split("=", 1) for pair in config["Env"])
        environment |= {key: str(value) for key, value in service.get("environment", {}).items()}
        if name in MANAGERS:
            environment |= {"kvcm.service.host": ADDRESSES[name], "KVCM_MANAGER": f"http://{ADDRESSES[name]}:6492"}
        words = [*service.get("entrypoint", config.get("Entrypoint") or ()), *words_of(service)]
        extra = ["--bind", ADDRESSES["valkey"]] if name == "valkey" else []
        volumes = {each["target"]: self._mounted(each, root) for each in service["volumes"] if each["type"] != "tmpfs"}
        volumes |= {} if image else {"/usr": (Path("/usr"), False)}
        return Recipe(
            root, self._foreign(name, [*words, *extra]), service["user"], environment, service.get("group_add", ()),
            volumes,
            [*(each.split(":")[0] for each in service["tmpfs"]),
             *(each["target"] for each in service["volumes"] if each["type"] == "tmpfs")],
            ADDRESSES, config.get("WorkingDir") or "/",
        )  # fmt: skip

    def _mounted(self, volume: dict[str, Any], root: Path) -> tuple[Path, bool]:
        is_writable = not volume.get("read_only")
        if volume["type"] == "bind":
            return Path(__file__).parents[2] / volume["source"], is_writable
        directory = self.volume(volume["source"])
        if not directory.exists():
            directory.mkdir(parents=True)
            self._as_in_the_image(directory, root / volume["target"][1:])
        return directory, is_writable

    @staticmethod
    def _as_in_the_image(directory: Path, place: Path) -> None:
        """A new volume gets owner and mode of the image's directory, as Docker does it."""
        if place.exists():
            found = place.stat()
            os.chown(directory, found.st_uid, found.st_gid)
            directory.chmod(stat.S_IMODE(found.st_mode))

    def _host_root(self, name: str) -> Path:
        """Return a root with a program of this host, whose data directory belongs to the service's user."""
        root = self._place / f"root-{name}"
        if root.exists():
            return root
        uid, gid = map(int, self.services[name]["user"].split(":"))
        for part in ("proc", "dev", "tmp", "etc", "usr", "data", "prometheus"):
            (root / part).mkdir(parents=True)
        for link in ("bin", "sbin", "lib", "lib64"):
            (root / link).symlink_to(f"usr/{link}")
        for data in ("data", "prometheus"):
            os.chown(root / data, uid, gid)
        for name_of_file in ("ld.so.cache", "nsswitch.conf"):
            shutil.copy(Path("/etc") / name_of_file, root / "etc")
        root.chmod(_MODE_OF_ANY)
        return root

    @staticmethod
    def _foreign(name: str, words: Sequence[str]) -> list[str]:
        """Return words with the names that programs have on this host."""
        names = _FOREIGN.get(name, {})
        done = []
        for word in words:
            for theirs, ours in names.items():
                word = re.sub(rf"\b{theirs}\b", ours, word)
            done.append(word)
        return done
