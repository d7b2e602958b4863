"""docker-compose.yml as the tests read it: merged, with the defaults of its variables."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

__all__ = ["COMPOSE_FILE", "JOBS", "MANAGERS", "ROOT", "bind_mounts", "composed", "settings_of", "words_of"]

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
MANAGERS = ("manager-1", "manager-2", "manager-3")
JOBS = ("setup", "keys")
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def composed() -> dict[str, Any]:
    """Return the file with its variables at their defaults, `$$` as `$`, and merge keys carried out."""
    text = _VARIABLE.sub(lambda found: found[2], COMPOSE_FILE.read_text())
    return dict(yaml.safe_load(text.replace("$$", "$")))


def settings_of(service: dict[str, Any]) -> dict[str, str]:
    """Return the settings of a manager: those of its command line, and dotted names of its environment."""
    pairs = [word.removeprefix("--env=") for word in service["command"] if word.startswith("--env=")]
    environment = {key: str(value) for key, value in service["environment"].items() if "." in key}
    return {**dict(pair.split("=", 1) for pair in pairs), **environment}


def words_of(service: dict[str, Any]) -> list[str]:
    """Return the words of a service's command, which may be one text."""
    command = service.get("command", [])
    return shlex.split(command) if isinstance(command, str) else list(command)


def bind_mounts(service: dict[str, Any]) -> dict[str, Path]:
    """Return what a service has of this tree, by the place where it finds it."""
    return {each["target"]: ROOT / each["source"] for each in service.get("volumes", ()) if each["type"] == "bind"}
