"""The optional parts of this installation: the packages each needs, and the command that installs them."""

from __future__ import annotations

import importlib.util
import json
from importlib import metadata
from urllib.parse import unquote, urlparse

from tanghulu.errors import ConfigError

#: Extra -> its modules. As in pyproject.toml, by the names under which they are imported.
EXTRAS = {
    "worker": ("torch", "gguf", "safetensors"),
    "certs": ("cryptography",),
    "grammar": ("llguidance",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "plot": ("matplotlib",),
    "ucx": ("nixl",),
    "vllm": ("zmq",),
}
#: The purpose of each extra, in a few words.
PURPOSES = {
    "worker": "computing with a real model",
    "certs": "`tanghulu certs init`",
    "grammar": "JSON schemas and regular expressions in requests",
    "otel": "requests as OpenTelemetry's spans (--otlp-endpoint)",
    "plot": "drawings of replayed traces and of hit-rate curves",
    "ucx": "the transport ucx",
    "vllm": "following the KV events of vLLM, and publishing in their format",
}


def missing_modules(extra: str) -> list[str]:
    """Return the modules of ``extra`` that are not installed; imports only the packages around them."""
    return [each for each in EXTRAS[extra] if not _is_there(each)]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # raised for a package around it
        return False


def require(extra: str, what: str) -> None:
    """Raise ConfigError stating what to install if ``what`` needs a missing extra."""
    if missing := missing_modules(extra):
        raise ConfigError(f"{what} needs the package {missing[0]}: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs ``extra`` beside this installation, from its folder if installed from one."""
    folder = _folder()
    return f"pip install -e '{folder}[{extra}]'" if folder else f"pip install 'tanghulu[{extra}]'"


def _folder() -> str:
    """Return the folder of an editable installation; empty for one from a package index."""
    try:
        recorded = metadata.distribution("tanghulu").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return ""
    found = json.loads(recorded or "{}")
    return unquote(urlparse(found["url"]).path) if found.get("dir_info", {}).get("editable") else ""
