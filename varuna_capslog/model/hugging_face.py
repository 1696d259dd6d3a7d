"""Builds Hugging Face models from a local folder, for `--hf PATH`: from config.json alone, on the meta device.

No code of the folder runs, no weights are read. transformers is imported when a model is built. Only `folder_of`
contacts the hub, for a config.json.
"""

from __future__ import annotations

import inspect
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError, needed
from varuna_capslog.model.capture.opaque import OpaqueCalls
from varuna_capslog.model.capture.trial import try_model
from varuna_capslog.model.prediction import with_predictions
from varuna_capslog.model.quantised import BASES, QuantisedLinear

__all__ = ["FACTORY", "folder_of", "keep_no_cache", "model", "most_tokens"]

FACTORY = f"{__name__}:model"
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""Pattern of a model's name on the hub."""

_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForPreTraining",
    "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForObjectDetection",
    "AutoModelForSemanticSegmentation",
    "AutoModelForImageTextToText",
    "AutoModel",
)
_TOKENS = 1024
"""Default number of tokens of a sequence, for models that take as many."""


def model(
    path: str,
    sequence: int | None = None,
    dtype: str | None = None,
    trains: bool = True,
    example: bool = True,
    lora: int | None = None,
    base: str | None = None,
    predicts: bool = False,
    **changes: Any,
) -> tuple[nn.Module, dict[str, Any]]:
    """Build the model that `config.json` in a folder describes, without memory for its weights, and its example inputs.

    Args:
        sequence: tokens of a sequence; None: 1024, or as many as the model takes.
        dtype: dtype of the weights; None: the config's, or float32.
        trains: True: labels are among the inputs; False: logits of the last token only, as in `generate`.
        example: False: return no example inputs, since the caller has its own.
        lora: rank of peft's adapters of all linear layers, which are trained instead of the weights; None: no adapters.
        base: storage format of the frozen weights below adapters, one of `quantised.BASES`; None: the weights' dtype.
        predicts: True: add the config's layers for multi-token prediction, for plans (`model/prediction`); ignored with
            adapters, or where `trains` is False.
        changes: keys of the config that are replaced, such as `num_hidden_layers=4`.

    Raises:
        CapslogError: transformers, or peft for adapters, is not installed; no such folder; a config that transformers
            cannot read or build from without code of the folder; inputs that are neither tokens nor pictures.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        problem = "holds no config.json" if folder.is_dir() else "is no folder"
        raise CapslogError(f"--hf {path} {problem}; give the local folder of a Hugging Face model")
    with needed("--hf"):
        import transformers
    config = _config(transformers, folder, changes)
    chosen = _class(transformers, config)
    size = dtype if dtype is not None else getattr(config, "dtype", None) or torch.float32
    try:
        with torch.device("meta"):
            made = chosen.from_config(config, dtype=getattr(torch, size) if isinstance(size, str) else size)
    except Exception as error:  # whatever the model's own code raises
        raise CapslogError(f"--hf {path}: transformers cannot build the model ({_first_line(error)})") from error
    if base is not None:
        fields.choice(base, "--base", BASES)
        if lora is None:
            raise CapslogError(
                f"--base {base} holds the weights below adapters in few bits; give their rank, --lora 16"
            )
    if lora is not None:
        _add_adapters(made, lora, base)
    if trains:
        keep_no_cache(made)
    inputs = _example(path, made, sequence, trains) if example else {}
    made.not_parted = _not_parted(made)
    if predicts and trains and lora is None:
        return with_predictions(made), inputs
    constants = {"logits_to_keep": 1} if not trains and "logits_to_keep" in _names(made) else {}
    return made, {**inputs, **constants}


def keep_no_cache(model: nn.Module) -> None:
    """Switch off the key-value caches of a model and of the models inside it."""
    for part in model.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def _not_parted(model: nn.Module) -> dict[str, str]:
    """Map each module that no cut may separate from the part before it -> the reason. By the config, these are decoder
    blocks that attend to positions chosen by an earlier block (`indexer_types`), blocks up to the last whose router
    reads token ids (`mlp_layer_types`), and a tower with the first blocks, if it adds its features to these.
    """
    config: Any = model.config
    text, tower = config.get_text_config(), getattr(config, "vision_config", None)
    parts, count = dict(model.named_modules()), getattr(text, "num_hidden_layers", 0)
    lists = (path for path, part in parts.items() if isinstance(part, nn.ModuleList) and len(part) == count)
    blocks = next((path for path in lists if path.endswith("layers")), None)
    if blocks is None:
        return {}
    kinds = enumerate(getattr(text, "indexer_types", None) or ())
    chosen = [number for number, kind in kinds if kind == "shared"]
    routers = enumerate(getattr(text, "mlp_layer_types", None) or ())
    hashed = range(max((number + 1 for number, kind in routers if kind == "hash_moe"), default=0))
    features = range(len(getattr(tower, "deepstack_visual_indexes", None) or ()))
    rules: list[tuple[Sequence[int], str]] = [
        (features, "since a tower adds its features to them (deepstack_visual_indexes)"),
        (hashed, "since routers read the token ids (mlp_layer_types)"),
        (chosen, "which attends to places that its first block has chosen (indexer_types)"),
    ]
    whys = {f"{blocks}.{number}": why for numbers, why in rules for number in numbers}
    towers = tuple(f"{path}." for path, part in parts.items() if features and getattr(part, "config", None) is tower)
    return whys | {path: rules[0][1] for path in parts if path.startswith(towers)}


def _add_adapters(model: nn.Module, rank: int, base: str | None) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise CapslogError(
            "adapters (--lora) are those of peft, which is not installed; run pip install peft"
        ) from error
    with torch.device("meta"):
        inject_adapter_in_model(LoraConfig(r=rank, target_modules="all-linear"), model)
        for module in list(model.modules()):
            if base is not None and isinstance(linear := getattr(module, "base_layer", None), nn.Linear):
                module.base_layer = QuantisedLinear(linear, base)


def folder_of(name: str) -> str:
    """Return the folder of a model with config.json, given as a folder or by its name on the Hugging Face hub.

    Raises CapslogError where it is neither, or the hub cannot be reached.
    """
    if Path(name).is_dir() or not _NAME.fullmatch(name):
        return name  # `model` reports what is missing in the folder
    with needed("a model of the Hugging Face hub"):
        from transformers.utils import cached_file
    online = _hub_has_an_address()
    try:
        file = cached_file(name, "config.json", local_files_only=not online)
    except Exception as error:  # no such model, no permission
        why = _first_line(error) if online else "there is no network, and no copy of it on this machine"
        raise CapslogError(
            f"{name} is no folder here, and the Hugging Face hub does not give its config.json ({why}); give a folder "
            "with config.json, or package.module:function"
        ) from error
    return str(Path(str(file)).parent)


def _hub_has_an_address() -> bool:
    """False where the hub cannot be reached; a request would fail only after half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    host = urllib.parse.urlsplit(constants.ENDPOINT).hostname
    try:
        return bool(urllib.request.getproxies() or socket.getaddrinfo(host, 443))
    except OSError:
        return False


def most_tokens(path: str, changes: Mapping[str, Any]) -> int | None:
    """Return the longest sequence in tokens, None without a limit. `changes` and errors as in `model`."""
    with needed("--hf"):
        import transformers
    return _most_tokens(_config(transformers, Path(path), dict(changes)))


def _most_tokens(config: Any) -> int | None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _config(transformers: Any, folder: Path, changes: dict[str, Any]) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the config's own code raises
        raise CapslogError(f"--hf {folder}: transformers cannot read config.json ({_first_line(error)})") from error
    for key, value in changes.items():
        if not hasattr(config, key):
            raise CapslogError(f"--model-arg {key}: config.json of a {config.model_type} has no such key")
        try:
            setattr(config, key, value)
        except Exception as error:  # the config's own checks raise it
            raise CapslogError(
                f"--model-arg {key}={value!r}: transformers refuses it ({_first_line(error)})"
            ) from error
    return config


def _class(transformers: Any, config: Any) -> Any:
    """Return the Auto class of the config's architecture; without architecture, the first for the config's type."""
    wanted = (getattr(config, "architectures", None) or [None])[0]
    others = [name for name in dir(transformers.models.auto.modeling_auto) if name.startswith("Auto")]
    classes = [getattr(transformers.models.auto.modeling_auto, name) for name in dict.fromkeys([*_CLASSES, *others])]
    classes = [auto_class for auto_class in classes if hasattr(auto_class, "_model_mapping")]
    fitting = [auto_class for auto_class in classes if type(config) in auto_class._model_mapping]
    for auto_class in fitting:
        made = auto_class._model_mapping[type(config)]
        if wanted in [part.__name__ for part in (made if isinstance(made, (tuple, list)) else (made,))]:
            return auto_class
    if not fitting or wanted is not None:
        raise CapslogError(
            f"no Auto class of transformers {transformers.__version__} makes {wanted or config.model_type}, which "
            "config.json names; give a function that builds it with --model"
        )
    return fitting[0]


def _example(path: str, made: nn.Module, sequence: int | None, trains: bool) -> dict[str, Any]:
    """Return inputs of one sample: tokens, and pictures or sound for every tower; whole numbers are 0 or 1, valid for
    any vocabulary.
    """
    config: Any = made.config
    names = _names(made)
    main = getattr(made, "main_input_name", "input_ids")
    dtype = next((parameter.dtype for parameter in made.parameters()), torch.float32)
    inputs: dict[str, Tensor] = {}
    if main == "input_ids" or "input_ids" in names:
        inputs["input_ids"] = _tokens(path, made, sequence, strict=main == "input_ids")
    if main == "pixel_values":
        inputs["pixel_values"] = torch.zeros(1, _channels(config), *_image_size(path, config), dtype=dtype)
    elif trains and "pixel_values" in names and (size := _size_of_pictures(config)):
        inputs |= _pictures_that_run(made, inputs, torch.zeros(1, _channels(config), *size, dtype=dtype))
    elif main == "input_features" and getattr(config, "num_mel_bins", None) and _frames(config):
        inputs[main] = torch.zeros(1, config.num_mel_bins, _frames(config), dtype=dtype)
    elif main == "input_values" and getattr(config, "conv_stride", None):
        inputs[main] = torch.zeros(1, _SOUND, dtype=dtype)
    elif main not in ("input_ids", "pixel_values"):
        raise CapslogError(f"--hf {path}: {type(made).__name__} takes {main!r}; describe its inputs with --input")
    labels = _labels(type(made).__name__, inputs) if trains and "labels" in names else None
    if labels is not None:
        inputs["labels"] = labels
    elif "decoder_input_ids" in names and (main != "input_ids" or not trains):
        inputs["decoder_input_ids"] = _tokens(path, made, sequence, strict=False)
    return dict(inputs)


_SOUND = 16_000
"""Samples of a sound: one second at the usual rate."""


def _names(made: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(made.forward).parameters


def _pictures_that_run(made: nn.Module, inputs: dict[str, Tensor], pictures: Tensor) -> dict[str, Tensor]:
    """Return the pictures as input, with the shape that the model takes beside tokens: [1, C, H, W] or [1, 1, C, H, W].
    Return {} where the model takes neither, or selects pictures by their values."""
    for tried in (pictures, pictures[:, None]):
        try:
            try_model(made, (), {**inputs, "pixel_values": tried}, OpaqueCalls({}))
        except DataDependentOutputException:
            pass  # the model's code counts the picture tokens here, but not during a capture
        except Exception:  # any error of the model's code for a wrong shape
            continue
        return {"pixel_values": tried}
    return {}


_TOWERS = ("vision_config", "backbone_config")


def _frames(config: Any) -> int:
    """Return the frames of a spectrum, which the first layers halve to the encoder's positions; 0 where unknown."""
    return 2 * (getattr(config, "max_source_positions", None) or 0)


def _channels(config: Any) -> int:
    for part in _picture_configs(config):
        channels = getattr(part, "num_channels", getattr(part, "in_channels", None))
        if isinstance(channels, int):
            return channels
    return 3


def _picture_configs(config: Any) -> list[Any]:
    return [config, *(part for key in _TOWERS if (part := getattr(config, key, None)) is not None)]


def _tokens(path: str, made: nn.Module, sequence: int | None, strict: bool = True) -> Tensor:
    """Return token ids of one sequence. strict: True: refuse a `sequence` that is too long; False: shorten it."""
    limit = _most_tokens(made.config)
    if sequence is not None and limit is not None and sequence > limit and strict:
        raise CapslogError(
            f"--sequence is {sequence}, but the model in {path} takes {limit} tokens (max_position_embeddings); give "
            f"at most that, or raise it with --model-arg max_position_embeddings={sequence}"
        )
    return torch.ones(1, min(sequence or _TOKENS, limit or sequence or _TOKENS), dtype=torch.int64)


def _size_of_pictures(config: Any) -> tuple[int, int] | None:
    for part in _picture_configs(config):
        size = getattr(part, "image_size", None)
        if isinstance(size, int):
            return size, size
        if isinstance(size, (list, tuple)) and len(size) == 2:
            return int(size[0]), int(size[1])
    return None


def _image_size(path: str, config: Any) -> tuple[int, int]:
    size = _size_of_pictures(config)
    if size is None:
        raise CapslogError(
            f"--hf {path}: config.json has no image_size; give the pictures with --input pixel_values=float32[1,3,H,W]"
        )
    return size


def _labels(name: str, inputs: dict[str, Tensor]) -> Tensor | None:
    if name.endswith(("ForImageClassification", "ForSequenceClassification")):
        return torch.ones(1, dtype=torch.int64)
    if name.endswith(
        ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration")
    ):
        return inputs["input_ids"].clone() if "input_ids" in inputs else None
    return None


def _first_line(error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= 300 else f"{line[:297]}..."
