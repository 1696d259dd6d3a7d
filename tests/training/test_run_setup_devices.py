"""Checks of a worker's device before it builds anything.

No GPU is here: what torch answers is replaced where a test needs one, so that these tests show the sentences, not that
CUDA and NCCL behave as their manuals say.
"""

from __future__ import annotations

import pytest
import torch

from tests.accelerators import torch_has
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.training.run_setup import check_devices, check_nccl_variables, check_room, choose_device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
INTERFACES = ["lo", "eth0", "docker0"]


def test_an_accelerator_that_cannot_be_used_has_torchs_own_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update it.\nmore")

    torch_has(monkeypatch, "cuda")
    monkeypatch.setattr(torch.cuda, "init", init)
    assert choose_device("auto", 0) == choose_device("cpu", 0) == CPU
    with pytest.raises(
        CapslogError, match=r"use no such device here \(The NVIDIA driver .* \(found version 11040\)\); set device=cpu"
    ):
        choose_device("cuda", 0)
    with pytest.raises(CapslogError, match=r"device=xpu, .* \(torch \S+ was built for cuda\); set device=cpu or auto"):
        choose_device("xpu", 0)
    torch_has(monkeypatch, None)
    with pytest.raises(CapslogError, match=r"\(torch \S+ was built for the CPU alone\)"):
        choose_device("cuda", 0)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "privateuseone"])
def test_workers_take_the_accelerators_of_the_machine_in_turn(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    torch_has(monkeypatch, kind, 2)
    selected: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", selected.append)
    taken = [choose_device(wish, rank) for wish in ("auto", kind) for rank in range(3)]
    assert taken == selected == [torch.device(kind, number) for number in (0, 1, 0)] * 2
    assert choose_device("cpu", 1) == CPU
    assert len(selected) == 6


def test_an_accelerator_without_float64_is_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` must not take the GPU of a Mac: the first norm would fail there."""
    torch_has(monkeypatch, "mps", 1)
    assert choose_device("auto", 0) == CPU
    with pytest.raises(CapslogError, match=r"device=mps, .* \(it has no float64, .*\); set device=cpu or auto"):
        choose_device("mps", 0)


@pytest.mark.parametrize(
    ("device", "local_rank", "words"),
    [(CPU, 0, "worker 0 of this machine runs on cpu, and there are 2 GPUs"), (GPU, 2, "worker 2 .* there are 2 GPUs")],
)
def test_nccl_without_a_gpu_for_each_worker(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, local_rank: int, words: str
) -> None:
    torch_has(monkeypatch, "cuda", 2)
    check_devices("gloo", device, local_rank)
    check_devices("nccl", GPU, 1)
    with pytest.raises(CapslogError, match=f"{words}; set pipeline.transport=gloo, or start fewer workers"):
        check_devices("nccl", device, local_rank)


@pytest.mark.parametrize("wanted", ["eth", "eth0", "=eth0", "^docker", "ib,eth", "^=docker0", ""])
def test_interfaces_that_nccl_may_meet_over(wanted: str) -> None:
    check_nccl_variables({"NCCL_SOCKET_IFNAME": wanted}, INTERFACES)


@pytest.mark.parametrize("wanted", ["ib0", "=eth", "^lo,eth,docker", "wlan,ib"])
def test_no_interface_left(wanted: str) -> None:
    with pytest.raises(CapslogError) as caught:
        check_nccl_variables({"NCCL_SOCKET_IFNAME": wanted}, INTERFACES)
    assert str(caught.value) == (
        f"NCCL_SOCKET_IFNAME={wanted} leaves none of this machine's network interfaces (docker0, eth0, lo), so that "
        "NCCL cannot meet the other ranks; change or unset it, or set pipeline.transport=gloo"
    )


def test_variables_that_forbid_every_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    check_nccl_variables(slow, INTERFACES)  # sockets are left
    check_nccl_variables(slow | {"NCCL_NET": "Socket"}, INTERFACES)
    check_nccl_variables({"NCCL_NET": "IB", "NCCL_IB_DISABLE": "0"}, INTERFACES)
    wrong = slow | {"NCCL_NET": "IB"}
    with pytest.raises(CapslogError) as caught:
        check_nccl_variables(wrong, INTERFACES)
    assert str(caught.value) == (
        "NCCL_NET=IB and NCCL_IB_DISABLE=1 leave NCCL no network (NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1 forbid the "
        "rest); unset one of the two, or set pipeline.transport=gloo"
    )
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    torch_has(monkeypatch, "cuda", 1)
    with pytest.raises(CapslogError, match="leave NCCL no network"):
        check_devices("nccl", GPU, 0)
    check_devices("gloo", GPU, 0)


def test_a_gpu_that_other_processes_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (3 << 30, 80 << 30))
    check_room(CPU, 1 << 50, "rank 1")
    check_room(GPU, None, "rank 1")
    check_room(GPU, 3 << 30, "rank 1")
    with pytest.raises(CapslogError) as caught:
        check_room(GPU, 10 << 30, "rank 1")
    assert str(caught.value) == (
        "rank 1 needs 10 GiB of cuda:0, but only 3 GiB of its 80 GiB are free: other processes fill it; end them, "
        "choose another device (of CUDA's with CUDA_VISIBLE_DEVICES), or plan for what is free with pipeline.capacity"
    )
