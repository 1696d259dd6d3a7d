"""Every entry of the table of device quirks, by its name. For CPU kernels see also test_kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.profiling.workloads import Equal, Megabytes
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.probe import PeakProbe
from varuna_capslog.engine.replicated import norm_of, piece_of
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import StageEstimator
from varuna_capslog.profiling.estimation.lifetimes import Lifetimes
from varuna_capslog.profiling.estimation.quirks import QUIRKS, Quirks

N = 1 << 16
MATH, EFFICIENT = SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION


def peak(device: str, program: Callable[[], object], gpu: str = "") -> tuple[int, set[str]]:
    """Return the peak bytes of a program as on a device, and its operators."""
    seen: set[str] = set()
    quirks = Quirks(device, gpu)
    with FakeTensorMode(allow_non_fake_inputs=True), quirks.dispatch(), Lifetimes(quirks.temporary) as lifetimes:
        lifetimes.observer = lambda func, *_: seen.add(func.overloadpacket.__name__)
        program()
    return lifetimes.peak_bytes, seen


def fused_dropout() -> None:
    x = torch.empty(N, requires_grad=True)
    on_cpu, _ = peak("cpu", lambda: F.dropout(x, 0.1))
    on_cuda, seen = peak("cuda", lambda: F.dropout(x, 0.1))
    assert on_cpu == 2 * 4 * N  # a mask of floats and the result
    assert on_cuda == (4 + 1) * N  # a mask of bools
    assert "native_dropout" in seen
    # also if a captured graph calls it by its operator, and never in evaluation
    assert peak("cuda", lambda: torch.ops.aten.dropout(x, 0.1, True))[0] == 5 * N
    assert peak("cuda", lambda: F.dropout(x, 0.1, training=False))[0] == 0


def fused_rms_norm() -> None:
    x = torch.empty(N // 64, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(64, dtype=torch.bfloat16, requires_grad=True)
    norm = functools.partial(F.rms_norm, x, (64,), weight)
    on_cpu, _ = peak("cpu", norm)
    assert on_cpu > 3 * 4 * N  # copies in float32
    on_cuda, seen = peak("cuda", norm)
    assert on_cuda == 2 * N + 2 * 2 * N // 64  # the result, and two numbers for each row
    assert "native_layer_norm" in seen
    _, seen = peak("cuda", lambda: norm().sum().backward())
    assert "native_layer_norm_backward" in seen


def softmax_backward_product() -> None:
    grad, out = torch.empty(64, N // 64), torch.empty(64, N // 64)
    backward = torch.ops.aten._softmax_backward_data
    assert peak("cpu", lambda: backward(grad, out, -1, torch.float32))[0] == 4 * N
    assert peak("cuda", lambda: backward(grad, out, -1, torch.float32))[0] == 2 * 4 * N


def fused_attention() -> None:
    q = torch.empty(1, 4, 512, 32, requires_grad=True)
    mask = torch.empty(1, 1, 1, 512, dtype=torch.bool)
    maps = 4 * 512 * 512 * 4
    on_cpu, seen = peak("cpu", lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1))
    assert on_cpu > maps
    assert "_safe_softmax" in seen
    for seen_keys in (None, mask):
        attend = functools.partial(F.scaled_dot_product_attention, q, q, q, attn_mask=seen_keys, dropout_p=0.1)
        on_cuda, seen = peak("cuda", attend)
        assert on_cuda < maps / 8
        assert "_scaled_dot_product_efficient_attention" in seen
    for backends, taken in (([MATH, EFFICIENT], "_scaled_dot_product_efficient_attention"), ([MATH], "_safe_softmax")):
        with sdpa_kernel(backends):
            assert taken in peak("cuda", functools.partial(F.scaled_dot_product_attention, q, q, q))[1]
    half = q.detach().bfloat16().requires_grad_()
    # without a dimension of heads; it was taken for a size that a fused kernel supports, and refused
    for alone in (q[0], half[0]):
        out = functools.partial(F.scaled_dot_product_attention, alone, alone, alone)
        assert "_safe_softmax" in peak("cuda", lambda out=out: out().sum().backward())[1]
    _, seen = peak("cuda", lambda: F.scaled_dot_product_attention(half, half, half).sum().backward())
    assert "_scaled_dot_product_flash_attention_backward" in seen
    # values narrower than keys, as in latent attention; flash attention's result would be as wide as the keys
    wide = torch.empty(1, 4, 512, 192, dtype=torch.bfloat16, requires_grad=True)
    assert (
        "_scaled_dot_product_efficient_attention"
        in peak("cuda", lambda: F.scaled_dot_product_attention(wide, wide, half).sum().backward())[1]
    )
    # two query heads for each key head
    few = half[:, :2]
    _, seen = peak("cuda", lambda: F.scaled_dot_product_attention(half, few, few, enable_gqa=True))
    assert "_scaled_dot_product_flash_attention" in seen


def copies_of_norms() -> None:
    x, scale = torch.empty(N // 64, 64), torch.empty(64)
    norm = torch.ops.aten.native_layer_norm
    in_rows, _ = peak("cpu", lambda: norm(x, [64], scale, scale, 1e-5))
    on_its_side = x.view(64, N // 64).T
    assert peak("cpu", lambda: norm(on_its_side, [64], scale, scale, 1e-5))[0] == in_rows + 4 * N
    assert peak("cuda", lambda: norm(on_its_side, [64], scale, scale, 1e-5))[0] == in_rows


def autocast_to_float32() -> None:
    x = torch.empty(8, 64, dtype=torch.bfloat16)
    dtypes: dict[str, list[torch.dtype]] = {}
    for device in ("cpu", "cuda"):

        def program(device: str = device) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                dtypes[device] = [x.softmax(-1).dtype, F.layer_norm(x, [64]).dtype, (x @ x.t()).dtype]

        peak(device, program)
    assert dtypes["cpu"] == [torch.bfloat16] * 3
    assert dtypes["cuda"] == [torch.float32, torch.float32, torch.bfloat16]
    # nothing stays registered
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.ones(2, 2, dtype=torch.bfloat16).softmax(-1).dtype == torch.bfloat16


def cublas_workspace() -> None:
    quirks = Quirks("cuda")
    with FakeTensorMode(), Lifetimes(quirks.temporary):
        w = torch.empty(8, 8, requires_grad=True)
        y = w @ w @ w
        assert quirks.lasting == [8519680]  # 8.125 MiB, once for this thread
        y.sum().backward()
        assert quirks.lasting == 2 * [8519680]  # and once for autograd's
    for kind, size in (("a4000", 8519680), ("h200", 32 << 20)):
        kind_quirks = Quirks("cuda", kind)
        with FakeTensorMode(), Lifetimes(kind_quirks.temporary):
            torch.empty(8, 8) @ torch.empty(8, 8)
        assert kind_quirks.lasting == [size], kind

    # a bias takes another workspace, once
    biased = Quirks("cuda", "a4000")
    with FakeTensorMode(), Lifetimes(biased.temporary):
        layer = torch.nn.Linear(8, 8)
        layer(layer(torch.empty(2, 8)))
    assert biased.lasting == [8519680, 1 << 20]


def attention_workspace() -> None:
    query = torch.empty(8, 12, 512, 64, dtype=torch.bfloat16, requires_grad=True)
    most = {}
    for kind, operator in (
        ("h200", "_scaled_dot_product_cudnn_attention"),
        ("a4000", "_scaled_dot_product_flash_attention"),
    ):
        peak_bytes, seen = peak(
            "cuda", lambda: F.scaled_dot_product_attention(query, query, query).sum().backward(), kind
        )
        assert operator in seen
        most[kind] = peak_bytes
    # both sum the gradient of the queries in float32; flash attention copies two tensors besides
    assert most["a4000"] - most["h200"] == pytest.approx(2 * query.nbytes, rel=0.01)


def reduction_buffer() -> None:
    gradient = torch.empty(16384, 768)
    # read off an H200: twice the gradient, for the sums of 256 blocks of 128 columns each
    assert peak("cuda", lambda: gradient.sum(0), "h200")[0] == 100663296 + 24 + 768 * 4
    assert peak("cpu", lambda: gradient.sum(0))[0] == 768 * 4


def embedding_backward() -> None:
    table, gradient = torch.empty(30000, 768), torch.empty(8192, 768)
    for count, taken in ((3072, 0), (8192, (819 + 8192) * 768 * 4 + 6 * 8192 * 8)):
        tokens = torch.zeros(count, dtype=torch.long)
        backward = functools.partial(
            torch.ops.aten.embedding_dense_backward, gradient[:count], tokens, len(table), -1, False
        )
        assert peak("cuda", backward)[0] == table.nbytes + taken


def convolution_workspace() -> None:
    x, w = torch.empty(32, 64, 56, 56), torch.empty(64, 64, 3, 3)
    convolve = functools.partial(torch.conv2d, x, w, padding=1)
    assert peak("cuda", convolve)[0] == x.nbytes + 2 * x.nbytes + w.nbytes
    lying = [tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, w)]
    assert peak("cuda", lambda: torch.conv2d(*lying, padding=1))[0] == x.nbytes


def foreach_update() -> None:
    # weights far larger than activations: the update decides the peak
    cpu = StageEstimator(Equal(length=3, width=1024)).stage(1, 2)
    cuda = StageEstimator(Equal(length=3, width=1024), RunConditions(device="cuda")).stage(1, 2)
    weight = 1024 * 1024 * 4
    assert cuda.peak_bytes - 2 * 8519680 - (1 << 20) - cuda.static_bytes == pytest.approx(2 * weight, rel=0.02)
    assert cpu.peak_bytes - cpu.static_bytes == pytest.approx(2 * weight, rel=0.02)  # the norm's copy in both


def host_staging() -> None:
    host = StageEstimator(Megabytes(), RunConditions(device="cuda", microbatch_size=16)).stage(3, 4)
    device = StageEstimator(Megabytes(), RunConditions(device="cuda", microbatch_size=16, stage_inputs="device")).stage(
        3, 4
    )
    crossing = 16 * 96 * (192 * 4 + 1)  # the activations and the mask of the waiting microbatch
    assert device.peak_bytes - host.peak_bytes == pytest.approx(crossing, rel=0.5)
    cpu = StageEstimator(Megabytes(), RunConditions(microbatch_size=16)).stage(3, 4)
    assert cpu.peak_bytes > host.peak_bytes - 2 * 8519680


def caching_allocator() -> None:
    stage = StageEstimator(Equal(length=3, width=10), RunConditions(device="cuda")).stage(1, 2)
    cpu = StageEstimator(Equal(length=3, width=10)).stage(1, 2)
    assert stage.peak_bytes % 512 == 0
    assert stage.peak_bytes - 2 * 8519680 > 4 * cpu.peak_bytes / 3


def reduction_in_another_type() -> None:
    x = torch.empty(N)
    for device in ("cpu", "cuda"):
        assert peak(device, lambda: torch.linalg.vector_norm(x, dtype=torch.float64))[0] == 8 * N + 8
        assert peak(device, lambda: torch.linalg.vector_norm(x))[0] == 4
    large = torch.zeros(2 * piece_of("cuda") + 1)
    assert peak("cuda", lambda: norm_of(large))[0] >= 8 * piece_of("cuda")
    with PeakProbe(torch.device("cpu")) as actual:
        norm_of(large)
    assert peak("cpu", lambda: norm_of(large))[0] - large.nbytes == actual.peak_bytes  # its flat form is a new fake
    half = x.bfloat16()
    assert peak("cpu", lambda: half.sum(dtype=torch.float32))[0] == 4 * N + 4
    assert peak("cuda", lambda: half.sum(dtype=torch.float32))[0] == 4


def promotion_of_operands() -> None:
    x, half = torch.empty(N), torch.empty(N, dtype=torch.bfloat16)
    assert peak("cpu", lambda: x + half)[0] == 2 * 4 * N
    assert peak("cuda", lambda: x + half)[0] == 4 * N
    assert peak("cpu", lambda: x + x)[0] == 4 * N


def unfit_matrices() -> None:
    result, spread = 128 * 32 * 4, 64 * 32 * 4
    for device in ("cpu", "cuda"):
        bytes_held, _ = peak(device, lambda: torch.mm(torch.empty(128, 64), torch.empty(1).expand(64, 32)))
        assert bytes_held == 128 * 64 * 4 + 4 + result + spread
        bytes_held, _ = peak(device, lambda: torch.mm(torch.empty(128, 64), torch.empty(32, 64).t()))
        assert bytes_held == 128 * 64 * 4 + spread + result


def bfloat16_packing() -> None:
    x, w = torch.empty(512, 64, dtype=torch.bfloat16), torch.empty(64, 256, dtype=torch.bfloat16)
    result, copied = 512 * 256 * 2, w.nbytes if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 0
    assert result + copied <= peak("cpu", lambda: x @ w)[0] <= result + copied + 8192
    assert peak("cuda", lambda: x @ w)[0] == result


def onednn_convolution() -> None:
    x, w = torch.empty(1, 64, 40, 40), torch.empty(64, 64, 3, 3)
    assert peak("cpu", lambda: torch.conv2d(x, w, padding=1))[0] == 2 * x.nbytes + w.nbytes
    pointwise = torch.empty(64, 64, 1, 1)
    assert peak("cpu", lambda: torch.conv2d(x, pointwise))[0] == x.nbytes


def parts_of_attention() -> None:
    x = torch.empty(2, 4, 512, 16)
    bytes_held, seen = peak("cpu", lambda: F.scaled_dot_product_attention(x, x, x))
    assert "_scaled_dot_product_flash_attention_for_cpu" in seen
    sums, part = 2 * 4 * 512 * 4, 64
    assert bytes_held == x.nbytes + sums + 4 * part * (512 + 2 + 16)


def convolution_columns() -> None:
    x, w = torch.empty(1, 8, 20, 20), torch.empty(8, 8, 3, 3)
    assert peak("cpu", lambda: torch.conv2d(x, w, padding=1))[0] == x.nbytes * (1 + 9)


CHECKS: dict[str, Callable[[], None]] = {
    name.replace("_", " "): check
    for name, check in globals().items()
    if callable(check) and getattr(check, "__module__", None) == __name__ and name.replace("_", " ") in QUIRKS
}


@pytest.mark.parametrize("name", QUIRKS)
def test_every_quirk_does_what_it_says(name: str) -> None:
    CHECKS[name]()


def test_the_cpu_sees_none_of_cudas() -> None:
    library = torch.ones(4)
    with Quirks("cuda").dispatch():
        pass
    torch.manual_seed(0)
    first: Tensor = F.dropout(library, 0.5)
    torch.manual_seed(0)
    assert torch.equal(first, library * torch.empty(4).bernoulli_(0.5) / 0.5)


def test_other_devices_are_refused() -> None:
    with pytest.raises(CapslogError, match="estimates know cpu, cuda and cuda:KIND, but the device is mps; measure"):
        Quirks("mps")
