"""Variants on this machine: checked against the plain layers before a run uses them, and measured for a profile."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.layers import CompiledForward
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.signature import Signatures, layer_signature
from varuna_capslog.model.trace import ShapeTable, call_on, fake_operands
from varuna_capslog.model.workload import Workload
from varuna_capslog.profiles.conditions import JOINED
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiles.runs import PLAIN, text_of, variant_pairs
from varuna_capslog.profiling.estimate import StageEstimator, key_of_range, row_of
from varuna_capslog.profiling.trim import dummy_inputs, real_tensors, skeleton
from varuna_capslog.variants.registry import (
    NUMERICS,
    TOLERANCES,
    Difference,
    Variant,
    apply_variants,
    difference,
    drop_unread_work,
    known_variants,
    matched,
    variant_named,
)
from varuna_capslog.variants.wrapped import backend_of

__all__ = [
    "VariantRun",
    "allowed_variants",
    "check_variants",
    "checked_choices",
    "joined_variants",
    "plain_chain",
    "variant_runs",
    "with_variant_rows",
]


# -- The check of variants against the plain layers.
#
# `start/choices` calls `checked_choices` once, where a run starts; the workers get the variants that passed. Of equal
# layers one is checked, on the CPU, with the shapes of the run, or with smaller inputs where the run's take too long.


_MOST_WORK = 2e9
"""Most multiplications and additions of a layer's forward for a check with the shapes of the run: some tenths of a
second."""
_LEAST_SIZE = 64
"""Smaller inputs keep sizes that would fall below this: those of batches and channels, hardly images or sequences."""
_LEAST_LIMIT = 8
_PARTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class VariantCheck:
    """Result of one check, for all layers with equal work.

    layers, names: indices and names of these layers. variant: name of their variant.
    inputs: shapes of the layer's inputs in the check, as text. smaller: True where these are smaller than in the run.
    fault: reason why the variant breaks its promise; empty where it keeps the promise.
    """

    layers: tuple[int, ...]
    names: tuple[str, ...]
    variant: str
    inputs: str
    smaller: bool
    fault: str

    def sentence(self) -> str:
        """Return a sentence for the user about the check and its result."""
        promise = NUMERICS[known_variants()[self.variant].numerics]
        where = f"on {self.inputs}{', smaller than the run' if self.smaller else ''}"
        subject = f"{self.names[0]!r}" + (f" and {len(self.names) - 1} like it" if len(self.names) > 1 else "")
        if self.fault:
            return (
                f"variant {self.variant!r} of layer {subject} promises {promise}, but {self.fault} ({where}); the "
                "plain layer is used"
            )
        return f"variant {self.variant!r} of layer {subject} keeps its promise, {promise} ({where})"


def plain_chain(workload: Workload) -> Chain:
    """Return the chain of a workload without its variants and without memory for parameters, in training mode. Raises
    CapslogError where its layers come from factories, which no variant can change.
    """
    plain = copy.copy(workload)
    plain.variants = {}
    with torch.random.fork_rng(devices=[]):
        chain = skeleton(plain, evaluates=True)
    if chain.factories is not None:
        workload.chosen_chain()  # raises
    return chain


def checked_choices(workload: Workload, microbatch_size: int) -> tuple[dict[str, str], list[VariantCheck]]:
    """Return the workload's `variants` without the layers whose variant fails its check, and all checks.

    If no variant fails, the patterns are unchanged; else they are the numbers of the remaining layers, such as `#3`.
    Raises CapslogError as `registry.apply_variants`.
    """
    chain = plain_chain(workload)
    copies = [(layer.name, copy.deepcopy(layer.module)) for layer in chain.layers]
    apply_variants(copies, workload.variants, workload.numerics)  # refuses what is not allowed
    chosen = matched([layer.name for layer in chain.layers], workload.variants)
    checks = check_variants(chain, chosen, workload.profile_inputs(microbatch_size))
    failed = {layer for check in checks if check.fault for layer in check.layers}
    if not failed:
        return dict(workload.variants), checks
    passed = {layer for check in checks for layer in check.layers} - failed
    return {f"#{layer}": chosen[layer] for layer in sorted(passed)}, checks


def check_variants(chain: Chain, chosen: Mapping[int, str], inputs: Mapping[str, TensorSpec]) -> list[VariantCheck]:
    """Check the chosen variants of a plain chain, which is not changed; skip layers that their variant cannot change.

    chain: its parameters may have shapes only. chosen: layer -> variant. inputs: specs of the run's inputs.
    """
    sizes = _Sizes(chain, inputs)
    alike: dict[object, list[int]] = {}
    for layer, variant in sorted(chosen.items()):
        key = variant, layer_signature(chain.layers[layer]), sizes.read(layer, 1)
        alike.setdefault(key, []).append(layer)
    checks = []
    for (variant, *_), layers in zip(_keys(alike), alike.values(), strict=True):
        check = _check(chain.layers[layers[0]], variant, sizes, layers[0])
        if check is not None:
            checks.append(replace(check, layers=tuple(layers), names=tuple(chain.layers[at].name for at in layers)))
    return checks


def _keys(alike: Mapping[object, list[int]]) -> Iterator[tuple[str, object, object]]:
    for key in alike:
        assert isinstance(key, tuple)
        yield key


class _Sizes:
    """Specs of the tensors that layers read, for the run's inputs (part 1) or inputs `part` times smaller."""

    def __init__(self, chain: Chain, inputs: Mapping[str, TensorSpec]) -> None:
        self._chain, self._inputs, self._table = chain, inputs, ShapeTable(chain)
        self._cuts: dict[int, list[dict[str, TensorSpec]] | None] = {}

    def read(self, layer: int, part: int) -> tuple[TensorSpec, ...] | None:
        """Return the specs that the layer reads; None where the chain cannot run on smaller inputs."""
        if part not in self._cuts:
            self._cuts[part] = self._boundaries(part)
        cuts = self._cuts[part]
        return None if cuts is None else tuple(cuts[layer][name] for name in self._chain.layers[layer].reads)

    def unread(self, layer: int) -> list[str]:
        """Return names of the tensors that the layer writes and that neither another layer nor the loss reads."""
        return [name for name in self._chain.layers[layer].writes if (name, layer) not in self._chain.readers]

    def _boundaries(self, part: int) -> list[dict[str, TensorSpec]] | None:
        if part == 1:
            return self._table.boundaries(self._inputs)
        shapes = {
            name: tuple(size // part if size // part >= _LEAST_SIZE else size for size in spec.shape)
            for name, spec in self._inputs.items()
        }
        if shapes == {name: spec.shape for name, spec in self._inputs.items()}:
            return None
        try:
            return self._table.boundaries(
                {name: TensorSpec(shape, self._inputs[name].dtype) for name, shape in shapes.items()}
            )
        except CapslogError:  # captured for one size
            return None


def _check(layer: Layer, name: str, sizes: _Sizes, number: int) -> VariantCheck | None:
    variant = known_variants()[name]
    read, part = sizes.read(number, 1), 1
    assert read is not None, "the run's own shapes"
    try:
        for smaller in _PARTS:
            specs = sizes.read(number, smaller)
            if specs is not None:
                read, part = specs, smaller
                if _work(layer, specs) <= _MOST_WORK:
                    break
        shapes = ", ".join(
            f"{tensor_name}{list(spec.shape)}" for tensor_name, spec in zip(layer.reads, read, strict=True)
        )
        report = VariantCheck((), (), name, shapes, part > 1, "")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            plain = copy.deepcopy(layer.module, real_tensors([layer]))
            rewritten = copy.deepcopy(plain)
            if variant.rewrite(rewritten) is None:
                return None
            unread, writes = sizes.unread(number), layer.writes
            drop_unread_work([rewritten], [writes], {(name, 0): (1,) for name in writes if name not in unread})
            compare = functools.partial(
                _difference, plain, rewritten, variant, [at for at, name in enumerate(writes) if name in unread]
            )
            try:
                worst = compare(list(_arguments(read, drawn=True)))
            except (IndexError, RuntimeError, ValueError):  # drawn integers may be too large, such as for class numbers
                worst = compare(list(_arguments(read, drawn=False)))
    except Exception as error:  # a variant may be third-party code
        reason = " ".join(str(error).split()) or type(error).__name__
        return VariantCheck((), (), name, "the shapes of the run", False, f"it cannot be checked: {reason}")
    if worst.part <= TOLERANCES[variant.numerics]:
        return report
    return replace(report, fault=f"{worst.what} differs by {worst.part:.1e} of the largest value")


def _difference(
    plain: nn.Module, rewritten: nn.Module, variant: Variant, unread: Collection[int], arguments: list[Tensor]
) -> Difference:
    """Compare in float32; the gradients of a `close` variant in float64, if the layers can run in float64.

    The gradients of a layer with a ReLU jump where a value crosses 0: two correct orders of summation in float32 may
    give values on both sides of 0.
    """
    compare = functools.partial(difference, unread=unread)
    if variant.numerics != "close":
        return compare(plain, rewritten, arguments, call=_code_of(rewritten))
    wide = [
        tensor.detach().double().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
        for tensor in arguments
    ]
    wide_other, code = copy.deepcopy(rewritten).double(), _code_of(rewritten)
    try:
        wide_difference = compare(copy.deepcopy(plain).double(), wide_other, wide, call=_code_of(wide_other))
    except RuntimeError:  # the layer's code or graph has fixed dtypes
        return compare(plain, rewritten, arguments, call=code)
    narrow = compare(plain, rewritten, arguments, gradients=False, call=code)
    return max(wide_difference, narrow, key=lambda tensor: tensor.part)


def _code_of(layer: nn.Module) -> CompiledForward | None:
    """Return the compiled forward that a run calls, for a layer that its variant compiles; else None."""
    backend = backend_of(layer)
    return None if backend is None else CompiledForward(layer, backend)


def _work(layer: Layer, read: Sequence[TensorSpec]) -> int:
    """Return the multiplications and additions of a forward."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), FlopCounterMode(display=False) as counter:
        state, arguments = fake_operands(layer, tuple(read), "cpu")
        call_on(layer, state, arguments)
    return int(counter.get_total_flops())


def _arguments(read: Sequence[TensorSpec], drawn: bool) -> Iterator[Tensor]:
    """Yield arguments: floats around 0; bools that are True in the last quarter, as masks hide, or show, a part;
    integers from 1 to the smallest size of at least `_LEAST_LIMIT` if they are `drawn`, else ones.
    """
    limit = min((size for spec in read for size in spec.shape if size >= _LEAST_LIMIT), default=1)
    for spec in read:
        value = dummy_inputs({"": spec})[""]
        if spec.dtype.is_floating_point:
            value.normal_()
        elif spec.dtype == torch.bool and value.dim():
            value[..., value.shape[-1] - value.shape[-1] // 4 :] = True
        elif spec.dtype != torch.bool and drawn:
            value.random_(1, limit + 1)
        yield value.requires_grad_(spec.requires_grad)


# -- The runs that give the costs of variants: each layer with each variant, and every two neighbours with each pair.
#
# The runs are those of any profile, for a chain in which one or two layers are rewritten, and pass on the same tensors
# as the plain layers. `measure` makes them with the runs of the plain layers, and `with_variant_rows` estimates them.


def allowed_variants(numerics: str, more: Sequence[str] = ()) -> list[Variant]:
    """Return the variants that planners may choose and that are at least as strict as `numerics`.

    more: names of variants that planners may choose only if the config names them (`profile.variants`). Raises
        CapslogError for a name in `more` that is unknown or of a weaker class.
    """
    classes, all_variants = list(NUMERICS), known_variants().values()
    for variant in map(variant_named, more):
        if classes.index(variant.numerics) > classes.index(numerics):
            raise CapslogError(
                f"profile.variants names {variant.name!r}, which promises {NUMERICS[variant.numerics]}, but "
                f"numerics={numerics} allows {NUMERICS[numerics]} at most; leave it out, or set "
                f"numerics={variant.numerics}"
            )
    allowed = [variant for variant in all_variants if classes.index(variant.numerics) <= classes.index(numerics)]
    return [variant for variant in allowed if variant.searched or variant.name in more]


@dataclass(frozen=True)
class VariantRun:
    """Run of one or two layers, at least one of which has a variant.

    first: the first layer. names: the variant of each layer.
    chain: the chain, with these layers rewritten; it shares the other layers and all parameters with the plain chain.
    """

    first: int
    names: tuple[str, ...]
    chain: Chain

    @property
    def end(self) -> int:
        """Index after the last layer."""
        return self.first + len(self.names)

    def work(self, specs: Sequence[Mapping[str, TensorSpec]]) -> object:
        """Return a key that is equal for runs with equal work, of which one is made. specs: across the cuts 0 .. L."""
        signatures = Signatures(self.chain.layers)
        key = key_of_range(self.chain, self.first, self.end, specs[self.first : self.end + 1], signatures)
        return key, self.first > 0, self.end < len(self.chain)


def variant_runs(chain: Chain, variants: Sequence[Variant]) -> list[VariantRun]:
    """Return the runs of all variants that change a layer; `chain` has the plain layers, and is not changed."""
    rewritten = _rewritten(chain, variants)
    alternatives: dict[int, list[str]] = {}
    for layer, name in rewritten:
        alternatives.setdefault(layer, []).append(name)
    runs = []
    for first, names in variant_pairs(alternatives, len(chain)):
        modules = {first + place: rewritten[first + place, name] for place, name in enumerate(names) if name != PLAIN}
        runs.append(VariantRun(first, names, _with_modules(chain, modules)))
    return runs


def joined_variants(runs: Sequence[VariantRun]) -> dict[str, list[str]]:
    """Return the condition `JOINED` of a profile with these runs; {} if none of the variants is joined."""
    names = {name for run in runs for name in run.names if name != PLAIN and known_variants()[name].joined}
    return {JOINED: sorted(names)} if names else {}


def with_variant_rows(profile: Profile, estimator: StageEstimator, variants: Sequence[Variant]) -> Profile:
    """Return the profile, of the estimator's workload, with rows of all `variant_runs` that can be estimated."""
    rows, runs = [], variant_runs(estimator.chain, [variant for variant in variants if variant.estimated])
    for run in runs:
        row = row_of(estimator.of_chain(run.chain), run.first, run.end)
        rows.append(dataclasses.replace(row, variant=text_of(run.names)))
    conditions = {**profile.conditions, **joined_variants(runs)}
    return dataclasses.replace(profile, observations=(*profile.observations, *rows), conditions=conditions)


def _rewritten(chain: Chain, variants: Sequence[Variant]) -> dict[tuple[int, str], nn.Module]:
    """Return (layer, variant) -> the layer's module with the variant, where the variant changes the layer."""
    modules: dict[tuple[int, str], nn.Module] = {}
    hopeless: set[object] = set()
    for number, layer in enumerate(chain.layers):
        signature = layer_signature(layer)
        for variant in variants:
            if (signature, variant.name) in hopeless:
                continue
            # the parameters are not copied, so that shared parameters stay shared
            held: dict[int, Any] = {
                id(tensor): tensor for tensor in (*layer.module.parameters(), *layer.module.buffers())
            }
            module = copy.deepcopy(layer.module, held)
            if variant.rewrite(module):
                modules[number, variant.name] = module
            else:
                hopeless.add((signature, variant.name))
    return modules


def _with_modules(chain: Chain, modules: Mapping[int, nn.Module]) -> Chain:
    copies = {number: _copy(module) for number, module in modules.items()}  # since `drop_unread_work` sets attributes
    layers = [
        dataclasses.replace(layer, module=copies.get(number, layer.module)) for number, layer in enumerate(chain.layers)
    ]
    drop_unread_work([layer.module for layer in layers], [layer.writes for layer in layers], chain.readers)
    return Chain(layers, chain.inputs, chain.outputs, chain.name)


def _copy(module: nn.Module) -> nn.Module:
    """Return a shallow copy of the same class; `copy.copy` would turn a rewritten module into a plain graph."""
    copied = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    return copied
