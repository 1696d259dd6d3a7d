"""Seconds of operators and whole models that this project measured on an H200 (h200.json), with their counted work."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from layers import unfilled
from torch import Tensor, nn
from torch.nn import functional as F
from tracing import Cache, Trace, count, trace
from truths import Row, huggingface, image_step, speed_of_card, text_trace

__all__ = ["FILE", "model_rows", "operator_rows"]

FILE = Path(__file__).with_name("h200.json")
CARD = "h200"
_aten = torch.ops.aten
_TYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHORTEST = 15e-6
"""Of operators that constants are fitted to: below, a kernel hardly takes longer than its start."""
_LIMITED_BY_MEMORY = frozenset({"ew", "cast", "cp", "bn", "gn", "pool", "up", "sm", "red", "ln", "rms", "emb", "ce"})
_OF_START = 0.3
"""Part of the time of a launch that they need in a CUDA graph, in which short kernels were measured: 2 us."""
_OF_HOST = 0.6
"""Part of a step that the host needs to launch it, above which constants are not fitted to it."""

Operator = Callable[[], object]


def _table(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for row in value["rows"]:
        yield dict(zip(value["columns"], row, strict=True))


# -- operators


def operator_rows(cache: Cache) -> Iterator[Row]:
    """Yield a row for each operator, with the seconds of its kernels. Constants were fitted only to matrix products and
    to convolutions in 16 bits and TF32.
    """
    speed = speed_of_card(CARD)
    for kind, table in json.loads(FILE.read_text())["operators"].items():
        rows = list(_table(table))
        traced = cache.of(f"h200 {kind}", lambda kind=kind, rows=rows: [_traced(kind, row) for row in rows])
        for row, operator_trace in zip(rows, traced, strict=True):
            tf32 = row.get("dt") == "tf32"
            work = count(speed, operator_trace, tf32=tf32, tf32_images=tf32)
            if kind in _LIMITED_BY_MEMORY:
                work["launch"] *= _OF_START
            family, name = _family(kind, row), f"{kind} {[value for key, value in row.items() if key != 'seconds']}"
            learnt = kind in ("mm", "bmm") or kind.startswith("conv")
            fits = learnt and row["seconds"] >= _SHORTEST and not (kind.startswith("conv") and row["dt"] == "fp32")
            yield Row("h200 operators", name, family, CARD, row["seconds"], work, fits=fits)


def _family(kind: str, row: Mapping[str, Any]) -> str:
    if kind.startswith("conv"):
        shape = "depthwise" if row["g"] == row["ci"] else "grouped" if row["g"] > 1 else "dense"
        return f"{shape} convolution, {row['dt']} {row['fmt']}"
    if kind in ("mm", "addmm", "bmm", "flash", "efficient", "cudnn_attn", "grouped_mm"):
        return f"{_WORDS[kind]}, {row['dt']}"
    return _WORDS[kind]


_WORDS = {
    "mm": "products", "addmm": "products with a bias", "bmm": "batched products", "flash": "flash attention",
    "efficient": "memory-efficient attention", "cudnn_attn": "cuDNN's attention", "grouped_mm": "grouped products",
    "ew": "elementwise", "cp": "copies", "cast": "casts", "sm": "softmax", "red": "reductions", "bn": "batch norm",
    "gn": "group norm", "ln": "layer norm", "rms": "RMS norm", "pool": "pooling", "up": "interpolation",
    "emb": "embeddings, gathers, scatters", "ce": "cross entropy", "optim": "optimizers and clipping",
}  # fmt: skip


def _traced(kind: str, row: Mapping[str, Any]) -> Trace:
    """Return the operators of one measured call, traced under `no_grad` as it was measured."""
    if kind in ("flash", "efficient", "cudnn_attn", "grouped_mm"):
        return [[_described(kind, row), 1]]

    def step(call: Operator) -> None:
        with torch.no_grad():
            call()

    return trace(lambda: _call(kind, row), step, CARD, builds_model=False)


def _tensor(shape: Sequence[int], dtype: str) -> list[Any]:
    steps = [1]
    for size in reversed(shape[1:]):
        steps.insert(0, steps[0] * size)
    return ["tensor", list(shape), dtype, steps]


def _described(kind: str, row: Mapping[str, Any]) -> list[Any]:
    """Describe a call of a kernel that only CUDA has."""
    dtype = str(_TYPES[row["dt"]]).removeprefix("torch.")
    if kind == "grouped_mm":
        groups, rows, inner, columns = row["g"], row["t"], row["d"], row["f"]
        sides = [_tensor([rows, inner], dtype), _tensor([groups, inner, columns], dtype)]
        return ["aten::_grouped_mm.", sides, {}, _tensor([rows, columns], dtype)]
    heads = _tensor([row["b"], row["h"], row["s"], row["d"]], dtype)
    sums = _tensor([row["b"], row["h"], row["s"]], "float32")
    name = {"flash": "flash", "efficient": "efficient", "cudnn_attn": "cudnn"}[kind]
    name = f"aten::_scaled_dot_product_{name}_attention"
    if row.get("op") == "b":
        extra = [heads, sums, None, None, row["s"], row["s"], 0.0, row["causal"]]
        if kind == "efficient":
            extra = [None, heads, sums, None, None, 0.0, ["list", [True, True, True, False]], row["causal"]]
        return [f"{name}_backward.", [heads, heads, heads, heads, *extra], {}, ["list", [heads] * 3]]
    settings = {"flash": [0.0, row["causal"], False], "efficient": [None, True, 0.0, row["causal"]]}
    extra = settings.get(kind, [None, True, 0.0, row["causal"], False])
    return [f"{name}.", [heads, heads, heads, *extra], {}, ["list", [heads, sums]]]


def _call(kind: str, row: Mapping[str, Any]) -> Operator:
    dtype = _TYPES[row.get("dt", "fp32")]

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    if kind in ("mm", "bmm"):
        many, m, n, k = [row["b"]] if kind == "bmm" else [], row["m"], row["n"], row["k"]
        lhs = new(*many, k, m).transpose(-1, -2) if row["lay"] == "tn" else new(*many, m, k)
        # batched scores were measured with transposed keys
        sideways = row["lay"] == "nt" or (kind == "bmm" and m == n and row["lay"] is None)
        rhs = new(*many, n, k).transpose(-1, -2) if sideways else new(*many, k, n)
        return lambda: lhs @ rhs if kind == "mm" else torch.bmm(lhs, rhs)
    if kind == "addmm":
        x, w, bias = new(row["m"], row["k"]), new(row["n"], row["k"]), new(row["n"])
        return lambda: F.linear(x, w, bias)
    if kind.startswith("conv"):
        return _convolution(kind, row, new)
    if kind == "optim":
        return _optimizer(row["op"], [new(row["size"]) for _ in range(row["n"])])
    return _of_memory(kind, row, new)


def _convolution(kind: str, row: Mapping[str, Any], new: Callable[..., Tensor]) -> Operator:
    side, window, stride, groups = row["side"], row["k"], row["s"], row["g"]
    x, w = new(row["n"], row["ci"], side, side), new(row["co"], row["ci"] // groups, window, window)
    if row["fmt"] == "nhwc":
        x, w = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, w))
    pad = window // 2 if stride < window else 0
    settings = [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], groups
    if kind == "conv":
        return lambda: _aten.convolution(x, w, None, *settings)
    out = (side + 2 * pad - window) // stride + 1
    y = new(row["n"], row["co"], out, out)
    y = y.contiguous(memory_format=torch.channels_last) if row["fmt"] == "nhwc" else y
    mask = [kind == "conv_dx", kind == "conv_dw", False]
    return lambda: _aten.convolution_backward(y, x, w, None, *settings, mask)


def _optimizer(name: str, tensors: list[Tensor]) -> Operator:
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    if name == "clip":
        return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
    if name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter)
        return optimizer.step
    optimizer = torch.optim.AdamW(parameters, foreach=name == "foreach", fused=name == "fused")
    for parameter in parameters:
        moments = {"exp_avg": torch.empty_like(parameter), "exp_avg_sq": torch.empty_like(parameter)}
        optimizer.state[parameter] |= {"step": torch.tensor(1.0), **moments}
    return optimizer.step


def _of_memory(kind: str, row: Mapping[str, Any], new: Callable[..., Tensor]) -> Operator:
    name, shape = row["op"], row["shape"]
    if kind in ("emb", "ce") or name in ("topk", "argmax"):
        return _of_vocabulary(kind, name, shape, new)
    x, y, last = new(*shape), new(*shape), {}
    if len(shape) == 4 and (row.get("fmt") == "nhwc" or name in ("nhwc_nchw", "add_mixed")):
        last = {"memory_format": torch.channels_last}
    if name in ("nhwc_nchw", "add_mixed"):
        y = y.contiguous(**last)
    elif last:
        x, y = x.contiguous(**last), y.contiguous(**last)
    if kind in ("bn", "gn", "pool", "up"):
        return _of_images(kind, name, x, y)
    mask, width = torch.empty(shape, dtype=torch.bool), shape[-1]
    other_dtype = torch.float32 if x.dtype != torch.float32 else torch.bfloat16
    bias = new(shape[1]).view(1, -1, 1, 1) if len(shape) == 4 else new(width)
    square, weight = torch.empty(width, width, dtype=torch.bool), new(width)
    stats = torch.empty(*shape[:-1], 1)
    calls: dict[str, Operator] = {
        "ew add": lambda: x + y, "ew add_": lambda: y.add_(x), "ew mul_s": lambda: x * 2.0,
        "ew gelu": lambda: F.gelu(x), "ew relu": lambda: F.relu(x),
        "ew silu": lambda: F.silu(x), "ew sigmoid": lambda: torch.sigmoid(x),
        "ew gelu_b": lambda: _aten.gelu_backward(x, y), "ew relu_b": lambda: _aten.threshold_backward(x, y, 0),
        "ew hardswish": lambda: F.hardswish(x), "ew pow3": lambda: x.pow(3.0), "ew tanh": lambda: torch.tanh(x),
        "ew where": lambda: torch.where(mask, x, y), "ew masked_fill": lambda: x.masked_fill(mask, 0.0),
        "ew masked_fill_b": lambda: x.masked_fill(square, 0.0),
        "ew dropout": lambda: _aten.native_dropout(x, 0.1, True), "ew zeros": lambda: torch.zeros_like(x),
        "ew fill_": lambda: y.fill_(1.0), "ew add_bias": lambda: x + bias, "ew mul_scale": lambda: x * bias,
        "ew add_mixed": lambda: x + y, "cast cast": lambda: x.to(other_dtype), "cp clone": lambda: x.clone(),
        "cp cat0": lambda: torch.cat([x, y]), "cp cat1": lambda: torch.cat([x, y], 1),
        "cp transpose01": lambda: x.transpose(0, 1).contiguous(),
        "cp transpose_last": lambda: x.transpose(-1, -2).contiguous(),
        "cp transpose12": lambda: x.transpose(*((1, 2) if len(shape) > 2 else (0, 1))).contiguous(),
        "cp roll": lambda: x.roll(3, 1), "cp flip": lambda: x.flip(-1), "cp pad": lambda: F.pad(x, (1, 1)),
        "cp nchw_nhwc": lambda: x.contiguous(memory_format=torch.channels_last), "cp nhwc_nchw": lambda: y.contiguous(),
        "ln f": lambda: _aten.native_layer_norm(x, [width], weight, weight, 1e-5),
        "ln b": lambda: _aten.native_layer_norm_backward(
            y, x, [width], stats, stats, weight, weight, [True, True, True]
        ),
        "rms f": lambda: F.rms_norm(x, [width], weight), "sm f": lambda: _aten._softmax(x, -1, False),
        "sm b": lambda: _aten._softmax_backward_data(y, x, -1, x.dtype),
        "sm log_f": lambda: _aten._log_softmax(x, -1, False),
        "sm log_b": lambda: _aten._log_softmax_backward_data(y, x, -1, x.dtype), "red sum": lambda: x.sum(),
        "red sum0": lambda: x.sum(0), "red sum_last": lambda: x.sum(-1), "red amax_last": lambda: x.amax(-1),
        "red norm": lambda: torch.linalg.vector_norm(x),
        "red norm64": lambda: torch.linalg.vector_norm(x, dtype=torch.float64), "red cumsum": lambda: x.cumsum(-1),
        "red sum_rows": lambda: x.sum(tuple(range(x.dim() - 1))),
    }  # fmt: skip
    return calls[f"{kind} {name}"]


def _of_images(kind: str, name: str, x: Tensor, y: Tensor) -> Operator:
    samples, channels = x.shape[:2]
    w, mean = torch.empty(channels), torch.empty(channels)
    like, grouped = w.to(x.dtype), torch.empty(samples, 32)
    pixels, made = x[0, 0].numel(), [True, True, True]
    if kind == "pool" and name == "max_b":
        out, places = _aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
        settings = [3, 3], [2, 2], [1, 1], [1, 1], False, places
        return lambda: _aten.max_pool2d_with_indices_backward(out, x, *settings)
    calls: dict[str, Operator] = {
        "bn f": lambda: _aten.native_batch_norm(x, w, w, mean, mean, True, 0.1, 1e-5),
        "bn f_cudnn": lambda: F.batch_norm(x, mean, mean, w, w, True),
        "bn b": lambda: _aten.native_batch_norm_backward(y, x, w, mean, mean, mean, mean, True, 1e-5, made),
        "bn eval": lambda: F.batch_norm(x, mean, mean, w, w, False),
        "gn f": lambda: _aten.native_group_norm(x, like, like, samples, channels, pixels, 32, 1e-5),
        "gn b": lambda: _aten.native_group_norm_backward(
            y, x, grouped, grouped, like, samples, channels, pixels, 32, made
        ),
        "pool max": lambda: F.max_pool2d(x, 3, 2, 1), "pool avg": lambda: F.avg_pool2d(x, 2),
        "pool gap": lambda: F.adaptive_avg_pool2d(x, 1), "pool mean": lambda: x.mean((2, 3)),
        "up nearest": lambda: F.interpolate(x, scale_factor=2),
        "up bilinear": lambda: F.interpolate(x, scale_factor=2, mode="bilinear"),
    }  # fmt: skip
    return calls[f"{kind} {name}"]


def _of_vocabulary(kind: str, name: str, shape: Sequence[int], new: Callable[..., Tensor]) -> Operator:
    words, width, tokens = shape
    table, gradient, ids = new(words, width), new(tokens, width), torch.empty(tokens, dtype=torch.long)
    scores, wanted = new(4096, words), torch.empty(4096, dtype=torch.long)
    first = torch.empty(min(tokens, words), width, dtype=torch.long)
    calls: dict[str, Operator] = {
        "emb f": lambda: F.embedding(ids, table),
        "emb b": lambda: _aten.embedding_dense_backward(gradient, ids, words, -1, False),
        "emb index_select": lambda: table.index_select(0, ids), "emb index": lambda: table[ids],
        "emb index_put": lambda: _aten.index_put(table, [ids], gradient, True),
        "emb gather": lambda: torch.gather(table[:tokens], 1, first), "ce f": lambda: F.cross_entropy(scores, wanted),
        "ce nll": lambda: F.nll_loss(scores, wanted), "ce log_f": lambda: _aten._log_softmax(scores, -1, False),
        "red topk": lambda: scores.topk(8), "red argmax": lambda: scores.argmax(-1),
    }  # fmt: skip
    return calls[f"{kind} {name}"]


# -- whole models

_LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8}
_CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "llama-8b-4": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "num_hidden_layers": 4, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
            "max_position_embeddings": 8192, **_LLAMA,
        },
    ),
    "llama-1b": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32000, **_LLAMA,
        },
    ),
    "bert": ("BertConfig", "BertForMaskedLM", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "opt-350m-like": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "num_hidden_layers": 24, "hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16,
            "word_embed_proj_dim": 1024, "vocab_size": 50304, "dropout": 0.0, "layerdrop": 0.0,
        },
    ),
}  # fmt: skip
"""Of transformers; every other name is one of torchvision's."""


def model_rows(cache: Cache) -> Iterator[Row]:
    """Yield rows of forward, loss and backward of whole models. The mode is the precision: bf16 and fp16 in autocast,
    wbf16 and wfp16 with weights of that type, tf32, fp32 (whose convolutions may use TF32, torch's default).
    """
    speed = speed_of_card(CARD)
    for row in _table(json.loads(FILE.read_text())["models"]):
        precision = row["mode"].partition("-")[0]
        half = torch.float16 if "fp16" in precision else torch.bfloat16
        key = f"{row['model']} {row['mode']} {row['batch']} x {row['size'] or row['seq']}"
        vision = row["model"].startswith("tv:")
        if vision and precision in ("fp16", "tf32"):  # the same operators
            traced_as = key.replace("fp16", "bf16").replace("tf32", "fp32")
        else:
            traced_as = key
        traced = cache.of(f"h200 {traced_as}", lambda row=row: _of_images_model(row) if row["size"] else _of_text(row))
        work = count(speed, traced, half, precision == "tf32")
        fits = row["host"] <= _OF_HOST * row["step"]
        yield Row("h200 models", key, row["model"], CARD, row["step"], work, row["host"], fits)


def _of_images_model(row: Mapping[str, Any]) -> Trace:
    try:
        import torchvision
    except ImportError:
        raise SystemExit("the models of the H200 need torchvision: pip install torchvision") from None
    last = row["mode"].endswith("nhwc")

    def make() -> nn.Module:
        model = getattr(torchvision.models, row["model"].removeprefix("tv:"))(weights=None).train()
        return model.to(memory_format=torch.channels_last) if last else model

    return trace(make, image_step(row["batch"], row["size"], row["mode"][:4] in ("bf16", "fp16"), last, False), CARD)


def _of_text(row: Mapping[str, Any]) -> Trace:
    transformers = huggingface()
    precision, _, attention = row["mode"].partition("-")
    config_name, model_name, fields = _CONFIGS[row["model"]]

    def make() -> nn.Module:
        config = getattr(transformers, config_name)(**fields)
        config._attn_implementation, config.use_cache = attention, False
        dtype = torch.bfloat16 if precision in ("wbf16", "wfp16") else torch.float32
        model = unfilled(lambda: getattr(transformers, model_name)(config), dtype)
        model.tie_weights()
        return model

    def step(model: nn.Module) -> None:
        ids = torch.empty(row["batch"], row["seq"], dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision in ("bf16", "fp16")):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return text_trace(make, step, CARD)
