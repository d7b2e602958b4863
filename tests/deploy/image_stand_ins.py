"""Images in the place of those that registries have: of Debian's packages, under the names that our files give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from composed import composed
from docker_engine import DockerEngine
from materials import PIP_CONF, SERVER_EXTRAS, base_archive, base_name, debian_archive, fetch_packages

__all__ = ["import_stand_ins"]

_PATH = "ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class _Service:
    suite: str
    packages: tuple[str, ...]
    hooks: tuple[str, ...]
    changes: tuple[str, ...]


# Users, directories and entry points are those of the real ones.
_SERVICES: Mapping[str, _Service] = {
    "valkey": _Service(
        "trixie",
        ("valkey-server",),
        ("install -d -o 999 -g 999 $1/data",),
        ("VOLUME /data", "WORKDIR /data", 'CMD ["valkey-server"]'),
    ),
    "prometheus": _Service(
        "sid",
        ("prometheus", "wget"),
        ("install -d -o 65534 -g 65534 $1/prometheus",),
        ("USER nobody", "VOLUME /prometheus", "WORKDIR /prometheus", 'ENTRYPOINT ["/bin/prometheus"]'),
    ),
    # Debian has no package of Grafana: this stand-in only answers the health check.
    "grafana": _Service(
        "bookworm",
        ("python3", "wget"),
        ("install -d -o 472 -g 0 $1/var/lib/grafana", "install -d $1/srv/api", "echo '{}' > $1/srv/api/health"),
        ("USER 472", 'ENTRYPOINT ["python3", "-m", "http.server", "3000", "--directory", "/srv"]'),
    ),
}


def import_stand_ins(engine: DockerEngine, directory: Path) -> None:
    """Give a daemon the images that our files name and that are not built.

    Args:
        engine: the daemon.
        directory: for archives, and for the packages of Python that builds install.
    """
    archive = directory / "image.tar"
    for name, service in _SERVICES.items():
        tag = composed()["services"][name]["image"]
        if not engine.has_image(tag):
            debian_archive(archive, service.suite, service.packages, *service.hooks)
            engine.import_image(archive, tag, (_PATH, *service.changes))
    _import_base(engine, directory, archive)
    archive.unlink()


def _import_base(engine: DockerEngine, directory: Path, archive: Path) -> None:
    """Every time: what builds install follows the constraints of the commit."""
    wheels, pip_conf = directory / "wheels", directory / "pip.conf"
    fetch_packages(wheels, (*SERVER_EXTRAS, "engine"))
    pip_conf.write_text(PIP_CONF)
    base_archive(archive, f"copy-in {wheels} /", f"upload {pip_conf} /etc/pip.conf")
    engine.import_image(archive, base_name(), (_PATH, 'CMD ["python"]'))
    engine.run("docker", "image", "prune", "--force", seconds=600)  # those of earlier commits
