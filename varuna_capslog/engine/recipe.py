"""Constants of a run: `EngineOptions`, all that a step depends on besides model, data and layout, and its `Recipe`."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError, ConfigError
from varuna_capslog.base.functions import import_function
from varuna_capslog.engine.offload import TierOptions
from varuna_capslog.model.hollow import ReadNumbers
from varuna_capslog.schedules import RunShape

if TYPE_CHECKING:
    from varuna_capslog.config.settings import ParameterGroup, Train

__all__ = ["AVERAGE", "AdamW8bit", "EngineOptions", "LearningRate", "LossScale", "Muon", "Recipe", "in_parts"]


class _AdamW(torch.optim.AdamW):
    """torch's AdamW without the decorators that exclude these two methods from torch.compile: at their first call they
    import the compiler, which takes a second.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


# -- Optimizers with a short name in the config that `torch.optim` does not have in this form: `muon` and `adamw8bit`.


_MUON = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
"""Arguments of torch's Muon that AdamW does not have."""


class Muon(torch.optim.Optimizer):
    """torch's Muon for matrices and AdamW for all other parameters, with one learning rate.

    Updates of matrices are scaled to the size of AdamW's updates (`adjust_lr_fn`), so that one rate suits both.

    Args:
        momentum, nesterov, ns_coefficients, ns_steps, adjust_lr_fn: of `torch.optim.Muon`. betas, eps: of AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **muon: Any,
    ) -> None:
        if unknown := sorted(set(muon) - set(_MUON)):
            raise ConfigError(f"muon takes no argument {unknown[0]}; it takes {', '.join(('betas', 'eps', *_MUON))}")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        muon = {"adjust_lr_fn": "match_rms_adamw", **muon}
        self._parts: list[tuple[dict[str, Any], torch.optim.Optimizer]] = []
        for group in self.param_groups:
            matrices = [row for row in group["params"] if row.dim() == 2 and not row.is_complex()]
            others = [row for row in group["params"] if not any(row is matrix for matrix in matrices)]
            if matrices:
                self._parts.append((group, torch.optim.Muon(matrices, **muon)))
            if others:
                self._parts.append((group, torch.optim.AdamW(others, betas=betas, eps=eps)))
        for _, part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient."""
        for group, part in self._parts:
            part.param_groups[0].update(lr=group["lr"], weight_decay=group["weight_decay"])
            part.step()


_BLOCK, _LEAST = 256, 4096
"""Elements per scale, and fewest elements that are kept in 8 bits (bitsandbytes 0.50.2, `optim/optimizer.py`)."""


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose two states have 8 bits per element and a float32 scale per 256 elements, as in bitsandbytes; states
    of fewer than 4,096 elements have 32 bits. It has only the sizes, for estimates; `torchao` has one that trains.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Allocate the states of fake parameters. Raises ConfigError for real parameters."""
        rows: list[nn.Parameter] = [row for group in self.param_groups for row in group["params"]]
        for row in rows:
            if not is_fake(row):
                raise ConfigError(
                    "train.optimizer=adamw8bit trains with torchao, which is not installed; run pip install torchao"
                )
            if row.grad is not None and row not in self.state:
                self.state[row].update(
                    {f"{part}{number}": state for number in (1, 2) for part, state in _moments_of_blocks(row)}
                )


def _moments_of_blocks(parameter: Tensor) -> list[tuple[str, Tensor]]:
    if parameter.numel() < _LEAST:
        return [("state", torch.empty_like(parameter, dtype=torch.float32))]
    scales = parameter.new_empty(-(-parameter.numel() // _BLOCK), dtype=torch.float32)
    return [("state", torch.empty_like(parameter, dtype=torch.uint8)), ("absmax", scales)]


def _adamw_in_8_bits() -> type[torch.optim.Optimizer]:
    """Return torchao's class, which trains, if it is installed; else the class for estimates."""
    if importlib.util.find_spec("torchao") is None:
        return AdamW8bit
    from torchao.optim import AdamW8bit as Trained

    return cast("type[torch.optim.Optimizer]", Trained)


NAMED: dict[str, Callable[[], type[torch.optim.Optimizer]]] = {"adamw8bit": _adamw_in_8_bits, "muon": lambda: Muon}
"""Functions that return the class of a short name."""


# A recipe is plain values, the same on every rank. Each rank builds an optimizer from it for its own parameters, and so
# does each copy of a layer. Therefore an optimizer must step every parameter independently; `check` tests this.


# -- The learning rate: a function of the step alone, so that it has no state.


@dataclass(frozen=True)
class LearningRate:
    """Learning rate by optimizer step: linear warm-up, then `decay`, times `drop_factor` every `drop_steps` steps.

    Attributes:
        base: learning rate after the warm-up. warmup_steps: steps of the linear rise, 0 = none.
        drop_steps: steps between two drops, None = no drop (DETR: 200 epochs). drop_factor: factor of each drop.
        decay: "constant", "linear" (a straight line) or "cosine" (half a wave; Loshchilov & Hutter 2017, eq. 5, without
            restarts). The last two fall from `base` to `final_factor * base` at step `decay_steps`, and stay there.
    """

    base: float
    warmup_steps: int = 0
    drop_steps: int | None = None
    drop_factor: float = 0.1
    decay: str = "constant"
    decay_steps: int = 0
    final_factor: float = 0.0

    def at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 1."""
        rate = self.base
        if self.drop_steps:
            rate *= self.drop_factor ** ((step - 1) // self.drop_steps)
        if step < self.warmup_steps:
            rate *= step / self.warmup_steps
        elif self.decay != "constant":
            rate *= self.final_factor + (1 - self.final_factor) * self._left(step)
        return rate

    def _left(self, step: int) -> float:
        """Remaining share of the decay: 1 at its beginning, 0 at its end."""
        done = min(1.0, (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps))
        return 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2


# -- the optimizer and its settings


AVERAGE = "ema"
"""Key of a parameter's average, besides the keys of its optimizer state."""

_FUSED = ("adamw", "adam", "sgd", "adagrad")
"""Optimizers of torch with a fused CPU kernel: one call per parameter instead of a dozen."""


@dataclass(frozen=True)
class Recipe:
    """Optimizer and its settings; see the keys of the same names in the config's `train` section.

    Attributes:
        optimizer: name of a class in `torch.optim`, in any case; a name in `NAMED`; or `package.module:Class` of a
            class with the interface of `torch.optim.Optimizer`.
        arguments: further arguments of this class. weight_decay: of parameters for which no group sets another.
        groups: the first group that matches a parameter and sets a value counts.
        ema: decay of the moving average of each parameter over the steps, None = no average.
        ema_warmup_steps: the decay of step t is `ema * (1 - exp(-t / ema_warmup_steps))`; 0: always `ema`.
        moments: "bfloat16": between two steps, optimizer state of its parameter's shape is rounded to bfloat16.
    """

    rate: LearningRate = field(default_factory=lambda: LearningRate(1e-4))
    optimizer: str = "adamw"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    weight_decay: float = 1e-4
    groups: Sequence[ParameterGroup] = ()
    ema: float | None = None
    ema_warmup_steps: int = 0
    moments: str = "float32"

    @classmethod
    def of_config(cls, train: Train, rate: LearningRate | None = None) -> Recipe:
        """Recipe of the config's `train` section. rate: None: its constant lr, which suffices for sizes of states."""
        from varuna_capslog.config.settings import ParameterGroup

        factors = train.lr_multipliers.items()
        multiplied = [ParameterGroup(match=f"*{escape(text)}*", lr_factor=factor) for text, factor in factors]
        return cls(
            rate=rate or LearningRate(train.lr),
            optimizer=train.optimizer,
            arguments=train.optimizer_args,
            weight_decay=train.weight_decay,
            groups=[*train.parameter_groups, *multiplied],
            ema=train.ema,
            ema_warmup_steps=train.ema_warmup_steps,
            moments=train.moments,
        )

    def __str__(self) -> str:
        """Optimizer with its further arguments, such as `sgd(momentum=0.9)`, and `+bfloat16 moments` and `+ema`."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        moments = f"+{self.moments} moments" if self.rounds_moments else ""
        return f"{self.optimizer}{f'({arguments})' if arguments else ''}{moments}{'' if self.ema is None else '+ema'}"

    def described(self, parameters: Iterable[Tensor]) -> dict[str, Any]:
        """Recipe's entries in a profile's conditions.

        "optimizer"; "optimizer_copies", the bytes of optimizer state per byte of the trained `parameters`, except for
        plain AdamW, which has 2; and "moments" where they are rounded.
        """
        if self.is_plain_adamw and self.ema is None and not self.rounds_moments:
            return {"optimizer": str(self)}
        sizes = [
            (sum(self.kept(parameter).values()), parameter.nbytes)
            for parameter in parameters
            if parameter.requires_grad
        ]
        copies = sum(kept for kept, _ in sizes) / max(1, sum(size for _, size in sizes))
        moments = {"moments": self.moments} if self.rounds_moments else {}
        return {"optimizer": str(self), "optimizer_copies": round(copies, 4), **moments}

    @functools.cached_property
    def kind(self) -> Any:
        """Optimizer's class. Raises ConfigError where there is none."""
        if ":" in self.optimizer:
            return import_function(self.optimizer, f"train.optimizer={self.optimizer!r}")
        kinds = {
            name.lower(): kind
            for name, kind in vars(torch.optim).items()
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
        }
        name = self.optimizer.lower()
        fields.refuse_unknown([name], sorted({*kinds, *NAMED}), "train.optimizer")
        return NAMED[name]() if name in NAMED else kinds[name]

    @property
    def is_plain_adamw(self) -> bool:
        """True for torch's AdamW with no other arguments than betas and eps."""
        return self.kind is torch.optim.AdamW and set(self.arguments) <= {"betas", "eps"}

    @property
    def rounds_moments(self) -> bool:
        """True where moments are rounded to another type between steps."""
        return self.moments != "float32"

    def rounded(
        self, parameter: Tensor, kept: Mapping[str, Any], places: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """State of a parameter for the time between two steps, by key: with `rounds_moments`, moments are rounded to
        the nearest bfloat16. places: tensors of an earlier step that receive them; None: new tensors.
        """
        rounded = dict(kept)
        for key, value in self._moments_in(parameter, kept).items():
            place = None if places is None else places.get(key)
            rounded[key] = value.to(torch.bfloat16) if place is None else place.copy_(value)
        return rounded

    def widened(self, parameter: Tensor, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Kept state of a parameter, prepared for a step: its moments get the parameter's type."""
        moments = self._moments_in(parameter, kept)
        return {**kept, **{key: value.to(parameter.dtype) for key, value in moments.items()}}

    def _moments_in(self, parameter: Tensor, kept: Mapping[str, Any]) -> dict[str, Tensor]:
        """State to round: floating-point tensors of the parameter's shape, except step counts and average."""
        tensors = (
            {key: value for key, value in kept.items() if isinstance(value, Tensor)} if self.rounds_moments else {}
        )
        return {
            key: value
            for key, value in tensors.items()
            if key not in ("step", AVERAGE) and value.is_floating_point() and value.shape == parameter.shape
        }

    def settings(self, address: str, dimensions: int) -> tuple[float, float]:
        """Learning-rate factor and weight decay of the parameter with this address and number of dimensions."""
        groups = [group for group in self.groups if group.holds(address, dimensions)]
        factor = next((group.lr_factor for group in groups if group.lr_factor is not None), 1.0)
        decay = next((group.weight_decay for group in groups if group.weight_decay is not None), self.weight_decay)
        return factor, decay

    def build(self, parameters: Mapping[str, nn.Parameter], on_cpu: bool) -> torch.optim.Optimizer:
        """Optimizer over these parameters by address; each of its groups has a key `lr_factor`.

        on_cpu: the parameters are on the CPU, where torch's fused kernels take a third of the time. Raises ConfigError
        where the class refuses the arguments, or a parameter.
        """
        shared: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
        for address, parameter in parameters.items():
            key = *self.settings(address, parameter.dim()), parameter.is_complex()
            shared.setdefault(key, []).append(parameter)
        shared = shared or {(1.0, self.weight_decay, False): []}  # torch accepts no empty list of groups
        takes = inspect.signature(self.kind).parameters
        decays = "weight_decay" in takes
        arguments = {"lr": self.rate.base, **self.arguments}
        fuses = on_cpu and self.optimizer.lower() in _FUSED
        fuses &= not {"fused", "foreach", "differentiable"} & set(arguments)
        groups = [
            {
                "params": group,
                "lr_factor": factor,
                **({"weight_decay": decay} if decays else {}),
                **({"fused": not is_complex} if fuses else {}),  # fused kernels have no complex numbers
            }
            for (factor, decay, is_complex), group in shared.items()
        ]
        try:
            kind = _AdamW if self.is_plain_adamw else self.kind
            built: torch.optim.Optimizer = kind(groups, **arguments)
        except Exception as error:
            shown = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
            raise ConfigError(
                f"train.optimizer={self.optimizer} refuses {shown or 'its arguments'} or one of the parameters "
                f"({error}); see train.optimizer_args and the documentation of {self.kind.__name__}"
            ) from error
        return built

    def average_decay(self, step: int) -> float:
        """Decay of the average at optimizer step `step`, counted from 1; 0 without an average."""
        decay = self.ema or 0.0
        return decay * (1 - math.exp(-step / self.ema_warmup_steps)) if self.ema_warmup_steps else decay

    def fresh(self, parameter: Tensor) -> dict[str, Any]:
        """State kept of a fake parameter after its first step, by key, with shapes and dtypes but no values."""
        if self.is_plain_adamw:  # equal to the other branch, but faster: estimates have thousands of parameters
            kept = {name: torch.empty_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            kept["step"] = torch.empty(())
        else:
            kept = in_parts(self._stepped(parameter))
        kept = self.rounded(parameter, kept)
        if self.ema is not None:
            kept[AVERAGE] = torch.empty_like(parameter)
        return kept

    def _stepped(self, parameter: Tensor) -> dict[str, Any]:
        """Optimizer's own state of a fake parameter after its first step. Raises ConfigError for an optimizer that
        cannot step fake tensors, or has state that no checkpoint can keep.
        """
        stepped, name = nn.Parameter(parameter.detach()), f"train.optimizer={self.optimizer}"
        stepped.grad = torch.empty_like(stepped)
        try:
            with ReadNumbers(), self.uncompiled():
                built = self.build({"": stepped}, on_cpu=True)
                built.step()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{name} cannot step tensors without memory ({_text(error)}), from which is known what it keeps; name "
                "an optimizer that computes with torch's operators"
            ) from error
        state = dict(built.state[stepped])
        for key, value in in_parts(state).items():
            if isinstance(value, Tensor):
                keepable = type(value) in (type(parameter), Tensor, nn.Parameter)
            else:
                keepable = value is None or isinstance(value, (int, float))
            if not keepable:
                raise ConfigError(
                    f"{name} keeps {key!r} of a parameter as a {type(value).__name__}, but checkpoints and moves keep "
                    "tensors, numbers, and tensors that __tensor_flatten__ takes apart; name another optimizer"
                )
        return state

    def uncompiled(self) -> contextlib.AbstractContextManager[object]:
        """Context in which a user's optimizer runs uncompiled, as it must on fake tensors."""
        compiled = ":" in self.optimizer or self.optimizer.lower() in NAMED
        return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()

    def joined(self, parameter: Tensor, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Optimizer's own state of a parameter, from its parts: the reverse of `in_parts`."""
        if not any("." in key for key in parts):
            return dict(parts)
        shape, arguments = tuple(parameter.shape), _hashable(self.arguments)
        return _joined(parts, _example(self.optimizer, arguments, shape, parameter.dtype))

    def kept(self, parameter: Tensor) -> dict[str, int]:
        """Bytes of optimizer state and average of a parameter after its first step, by key."""
        shape, arguments = tuple(parameter.shape), _hashable(self.arguments)
        return dict(_kept(self.optimizer, arguments, self.ema is not None, self.moments, shape, parameter.dtype))

    def check_kept(self, address: str, parameter: Tensor, kept: Mapping[str, Any]) -> None:
        """Raise CapslogError where `kept`, a parameter's state by key, is of another optimizer."""
        wanted = set(self.kept(parameter)) - {AVERAGE}
        present = {key for key, value in kept.items() if isinstance(value, Tensor)} - {AVERAGE}
        if wanted != present:
            raise CapslogError(
                f"of {address!r} an optimizer kept {sorted(present)}, but train.optimizer={self.optimizer} keeps "
                f"{sorted(wanted)}; set train.optimizer and train.optimizer_args back, or begin a new run with "
                "init_from"
            )

    def check(self, parameters: Mapping[str, int]) -> None:
        """Raise ConfigError where a run cannot use the recipe: as `check_optimizer`, or for a group that matches no
        parameter. parameters: number of dimensions by address, of the whole model.
        """
        self.check_optimizer()
        for group in self.groups:
            if not any(group.holds(address, dimensions) for address, dimensions in parameters.items()):
                those = " with at most one dimension" if group.vectors else ""
                addresses = list(parameters)
                raise ConfigError(
                    f"train.parameter_groups has the pattern {group.match!r}, which matches no parameter{those}; their "
                    f"addresses look like {', '.join(map(repr, addresses[:: max(1, len(addresses) // 3)][:3]))}"
                )

    def check_optimizer(self) -> None:
        """Raise ConfigError for an unknown optimizer, or one that does not step each parameter independently."""
        kind, name = self.kind, f"train.optimizer={self.optimizer}"
        if self.is_plain_adamw:
            return
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise ConfigError(f"{name} is not a class with the interface of torch.optim.Optimizer; name such a class")
        closure = inspect.signature(kind.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(f"{name} must compute the loss several times a step, which no pipeline can; name another")
        try:
            both = self._tried(("first", "second"))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{name} failed in a step of small parameters ({_text(error)}); name another") from error
        if [tensor for name in ("first", "second") for tensor in self._tried((name,))] != both:
            raise ConfigError(
                f"{name} steps a parameter otherwise beside another one than alone, so that the cuts would change the "
                "result; name an optimizer that treats each parameter by itself"
            )
        self.kept(torch.empty(64, 128))  # some optimizers keep other state of large parameters
        takes = inspect.signature(kind).parameters
        if "weight_decay" not in takes and any(group.weight_decay for group in self.groups):
            raise ConfigError(f"{name} knows no weight decay, but train.parameter_groups sets one; leave it out there")

    def _tried(self, names: Iterable[str]) -> list[list[float]]:
        """Values of small parameters after two joint steps. Raises ConfigError where the second step adds state."""
        values = {"first": torch.linspace(-1, 1, 6).reshape(2, 3), "second": torch.linspace(2, -3, 12).reshape(4, 3)}
        parameters = {name: nn.Parameter(values[name].clone()) for name in names}
        optimizer, keys = self.build(parameters, on_cpu=True), []
        for step in (1, 2):
            for name, parameter in parameters.items():
                parameter.grad = values[name].flip(0) * step
            optimizer.step()
            keys.append({key for parameter in parameters.values() for key in optimizer.state.get(parameter, ())})
        if keys[0] != keys[1]:
            raise ConfigError(
                f"train.optimizer={self.optimizer} keeps {sorted(keys[0])} of a parameter after its first step and "
                f"{sorted(keys[1])} after the second, but plans and checkpoints need what it keeps from the first on; "
                "name another, or let it make all of its state at once"
            )
        return [parameter.detach().flatten().tolist() for parameter in parameters.values()]


def in_parts(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizer state with wrapper tensors split into their inner, live tensors: `exp_avg.codes`, `exp_avg.scale`."""
    parts: dict[str, Any] = {}
    for key, value in kept.items():
        if type(value) is not Tensor and is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            parts |= in_parts({f"{key}.{name}": getattr(value, name) for name in names})
        else:
            parts[key] = value
    return parts


def _joined(parts: Mapping[str, Any], example: Mapping[str, Any]) -> dict[str, Any]:
    """Reverse of `in_parts`; the state `example` shows which parts form a wrapper tensor."""
    joined = dict(parts)
    for key, template in example.items():
        if is_traceable_wrapper_subclass(template):
            names, context = template.__tensor_flatten__()
            inner = {part.removeprefix(f"{key}."): joined.pop(part) for part in parts if part.startswith(f"{key}.")}
            inner = _joined(inner, {name: getattr(template, name) for name in names})
            joined[key] = type(template).__tensor_unflatten__(inner, context, template.size(), template.stride())
    return joined


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@functools.lru_cache(maxsize=4096)
def _example(
    optimizer: str, arguments: tuple[tuple[str, Any], ...], shape: tuple[int, ...], dtype: torch.dtype
) -> Mapping[str, Any]:
    """State of a fake parameter after its first step, computed once per shape."""
    with FakeTensorMode():
        return Recipe(optimizer=optimizer, arguments=dict(arguments))._stepped(torch.empty(shape, dtype=dtype))


@functools.lru_cache(maxsize=4096)
def _kept(
    optimizer: str,
    arguments: tuple[tuple[str, Any], ...],
    averaged: bool,
    moments: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[tuple[str, int], ...]:
    """Items of `Recipe.kept`, from a step on a fake parameter, computed once per shape."""
    ema = 0.0 if averaged else None
    recipe = Recipe(optimizer=optimizer, arguments=dict(arguments), ema=ema, moments=moments)
    device = "meta" if recipe.is_plain_adamw else "cpu"  # a fake tensor would import torch's compiler
    with contextlib.nullcontext() if recipe.is_plain_adamw else FakeTensorMode():
        kept = recipe.fresh(torch.empty(shape, dtype=dtype, device=device))
        return tuple((key, value.nbytes) for key, value in kept.items() if isinstance(value, Tensor))


def _hashable(arguments: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in arguments.items())


# -- The loss scale of a float16 run at one boundary, and its change by each step.
#
# Small gradients of float16 activations would underflow to zero, so the loss of each microbatch, and with it every
# gradient, is multiplied by a scale (Micikevicius et al., "Mixed Precision Training", Sec. 3.2). The scale is a power
# of two, so that dividing by it is exact. A step whose gradients overflow is skipped. Rules and numbers are those of
# `torch.amp.GradScaler`; ours is plain data, since every rank and every copy of a layer computes it.


_GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale doubles."""
_LARGEST = 2.0**127
"""The largest power of two that the gradient of a float32 loss can hold."""
_MOST_SKIPPED = 24
_SMALLEST = 2.0**-8
"""Scale after `_MOST_SKIPPED` skipped steps in a row from the first scale, 2^16. A scale below 1 causes no overflow, so
a gradient that still overflows does so in the model itself."""


@dataclass(frozen=True)
class LossScale:
    """Scale of the next step's loss, a power of two.

    streak: steps in a row without an overflow since the last change of scale; if negative, skipped steps in a row.
    dynamic: False: the scale never changes.
    """

    scale: float = 65536.0
    streak: int = 0
    dynamic: bool = True

    def after(self, applied: bool) -> LossScale:
        """Scale after a step that was applied, or (False) skipped."""
        if not applied:
            return replace(self, scale=self.scale / 2 if self.dynamic else self.scale, streak=min(self.streak, 0) - 1)
        streak = max(self.streak, 0) + 1
        if self.dynamic and streak == _GROWTH_STEPS:
            return replace(self, scale=min(2 * self.scale, _LARGEST), streak=0)
        return replace(self, streak=streak)

    @property
    def exhausted(self) -> bool:
        """True where the next overflow ends the run, instead of another skipped step."""
        return self.scale <= _SMALLEST or -self.streak >= _MOST_SKIPPED


# -- the constants of a run


@dataclass(frozen=True)
class EngineOptions(RunShape):
    """Constants of a run, the same on every rank. The `RunShape` is that of the whole step, over all replicas.

    Attributes:
        transport: see the config's `pipeline` section. clip_norm: largest global gradient norm, 0 = no clipping.
        tier: for memory intervals that offload. compile: backend of torch.compile for every layer, None = none.
        refuses: refuse steps that are not finite; False for a profiler that uses dummy values.
        weights: dtype in which parameters are kept for forward and backward.
        loss_scale: of step 1; None: the loss is not scaled, and a step whose gradients are not finite is refused.
    """

    num_microbatches: int
    transport: str = "gloo"
    precision: str = "float32"
    weights: str = "float32"
    seed: int = 0
    clip_norm: float = 0.0
    recipe: Recipe = field(default_factory=Recipe)
    actions: tuple[tuple[str, ...], ...] | None = None
    tier: TierOptions = field(default_factory=TierOptions)
    compile: str | None = None
    refuses: bool = True
    loss_scale: LossScale | None = None
