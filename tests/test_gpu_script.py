"""The GPU benchmark runs from a bare checkout, without the config library, and knows the configs of the paper."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from detr_pipeline.config import ModelConfig
from varuna_capslog.config.reading import load_config, section

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks/gpu/gpu.py"
BARE = """
import sys

class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pydantic", "rich", "typer", "pycocotools", "matplotlib", "tensorboard"):
            raise ImportError(f"{name} is not on the GPU machine")

sys.meta_path.insert(0, Bare())
sys.argv = ["gpu.py", "--help"]
import runpy
runpy.run_path(sys.path[0] + "/benchmarks/gpu/gpu.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_starts_without_what_the_gpu_machine_lacks() -> None:
    code = f"import sys; sys.path[0] = {str(ROOT)!r}\n" + textwrap.dedent(BARE)
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--device {cuda,cpu}" in done.stdout


def test_its_models_are_those_of_the_configs(script: ModuleType) -> None:
    for name in script.CONFIGS:
        config = load_config(ROOT / "configs/paper" / f"{name}.yaml")
        expected = section(ModelConfig, config.model, "model").model_dump()
        assert vars(script.model_of(name)) == expected
