"""Calls to torch about a device, on stand-ins for its accelerator modules; no code bypasses `accelerator`."""

from __future__ import annotations

import ast
import functools
import re
import types
from pathlib import Path

import pytest
import torch

from tests.accelerators import torch_has
from tests.source_trees import nodes_of
from varuna_capslog import accelerator
from varuna_capslog.base.fork_server import accelerator_started
from varuna_capslog.config.reading import Config, section
from varuna_capslog.profiling.launches import devices_of, free_bytes
from varuna_capslog.start.ordinary import OrdinaryModel, ordinary_config, with_default_capacity

ROOT = Path(__file__).parents[1]
CPU, FIRST, SECOND = torch.device("cpu"), torch.device("xpu", 0), torch.device("xpu", 1)


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Module of torch for two accelerators; tests set its functions."""
    module = types.SimpleNamespace()
    torch_has(monkeypatch, "xpu", 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_a_cpu_is_asked_nothing() -> None:
    accelerator.select(CPU)
    accelerator.synchronize(CPU)
    assert accelerator.all_devices("cpu") == [CPU]
    assert accelerator.why_unusable("cpu") is None
    assert accelerator.counts_memory(CPU)
    assert not accelerator.pins_memory("cpu")


def test_devices_are_those_of_the_type_that_torch_uses(xpu: types.SimpleNamespace) -> None:
    assert accelerator.auto_type() == "xpu"
    assert accelerator.all_devices("xpu") == [FIRST, SECOND]
    assert accelerator.all_devices("cuda") == []
    assert devices_of("xpu", 3) == [FIRST, SECOND, FIRST]
    assert devices_of("cpu", 2) == [CPU, CPU]


def test_the_whole_memory_is_asked_of_the_properties(
    xpu: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's neutral call opens the device, and the process that plans would keep some hundred MiB of each of them."""
    sizes = {0: 64 << 30, 1: 48 << 30}
    xpu.get_device_properties = lambda number: types.SimpleNamespace(total_memory=sizes[number])
    assert accelerator.total_bytes(SECOND) == 48 << 30
    config = {"workload": "a:b", "pipeline": {"devices": 2}}
    for device in ("auto", "xpu"):
        assert with_default_capacity(section(Config, config | {"device": device}, "")).pipeline.capacity == 48 << 30
    elsewhere = section(Config, config | {"device": "cuda"}, "")
    assert with_default_capacity(elsewhere).pipeline.capacity is None
    model = OrdinaryModel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), torch.zeros(1, 2))
    planned = ordinary_config(model, {"devices": 2})
    assert (planned.profile.device, planned.pipeline.capacity) == ("xpu", 64 << 30)
    del xpu.get_device_properties
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (1 << 30, 32 << 30))
    assert accelerator.total_bytes(SECOND) == 32 << 30
    assert free_bytes(SECOND) == 1 << 30


def test_only_the_generator_of_the_device_is_seeded(xpu: types.SimpleNamespace) -> None:
    xpu.default_generators = [torch.Generator(), torch.Generator()]
    before = torch.get_rng_state()
    accelerator.seed(SECOND, 7)
    assert [generator.initial_seed() == 7 for generator in xpu.default_generators] == [False, True]
    assert torch.equal(torch.get_rng_state(), before)
    accelerator.seed(CPU, 8)
    assert torch.default_generator.initial_seed() == 8
    del xpu.default_generators  # a backend that has no more than torch asks of every one
    seeds: list[int] = []
    xpu.manual_seed_all = seeds.append
    accelerator.seed(SECOND, 9)
    assert seeds == [9]


def test_an_accelerator_whose_bytes_nobody_counts(xpu: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> dict[str, int]:
        raise RuntimeError("Allocator for xpu is not a DeviceAllocator")

    monkeypatch.setattr(torch.accelerator, "memory_stats", refuse)
    assert not accelerator.counts_memory(FIRST)
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: {})
    assert accelerator.counts_memory(FIRST)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", refuse)  # as torch 2.11 before the first tensor
    accelerator.reset_peak(FIRST)


def test_a_process_that_uses_an_accelerator_is_known(xpu: types.SimpleNamespace) -> None:
    assert not accelerator_started()  # a module that does not say
    for started in (False, True):
        xpu.is_initialized = lambda started=started: started
        assert accelerator_started() is started


# -- who may ask -------------------------------------------------------------------------------------------------------

CUDAS_OWN = re.compile(r"cuda(:.*)?|is_cuda|.*nccl.*", re.IGNORECASE)


@functools.cache
def said_in(text: str) -> set[str]:
    """Return which of `torch.accelerator`, `torch.cuda` and CUDA's own words occur in a module's code."""
    words: set[str] = set()
    nodes = nodes_of(text)
    remarks = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name):
                words |= {f"{node.value.id}.{node.attr}"} & {"torch.accelerator", "torch.cuda"}
            words |= {node.attr} if CUDAS_OWN.fullmatch(node.attr) else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in remarks:
            words |= {node.value} if CUDAS_OWN.fullmatch(node.value) else set()
    return words


def modules_that_say(*words: str) -> set[str]:
    """Return the library's modules that contain one of `words`; if none are given, one of CUDA's own words."""
    folder = ROOT / "varuna_capslog"
    words_of = {
        path.relative_to(folder).with_suffix("").as_posix(): said_in(path.read_text()) for path in folder.rglob("*.py")
    }
    return {
        name
        for name, module_words in words_of.items()
        if (module_words.intersection(words) if words else module_words - {"torch.accelerator"})
    }


def test_all_modules_ask_torch_through_one() -> None:
    """`base/fork_server` does not import torch: it uses the module if the process has imported it."""
    assert modules_that_say("torch.cuda") == set()
    assert modules_that_say("torch.accelerator") == {"accelerator", "base/fork_server"}


def test_the_page_names_every_module_that_knows_cuda_alone() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    table = page.split("## What is CUDA's own", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|", table, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    modules = modules_that_say()
    assert [module for module in sorted(modules) if not module.startswith(tuple(named))] == []
    assert [name for name in named if not any(module.startswith(name) for module in modules)] == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("torch.cuda.synchronize()", {"torch.cuda", "cuda"}),
        ("torch.accelerator.synchronize()", {"torch.accelerator"}),
        ("x.is_cuda", {"is_cuda"}),
        ("device.type == 'cuda'", {"cuda"}),
        ("dist.ProcessGroupNCCL()", {"ProcessGroupNCCL"}),
        ("'''torch.cuda'''", set()),
    ],
)
def test_words_of_cuda_are_found(code: str, words: set[str]) -> None:
    assert said_in(code) == words
