"""Systems to which plans are exported: what each form needs, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.parallel import Divisors
from varuna_capslog.model.names import ModelNames
from varuna_capslog.planning.export.layer_counts import (
    diffusion_pipe,
    megatron,
    megatron_parts,
    primus,
    sglang,
    slime,
    verl,
    vllm,
    vllm_ascend,
)
from varuna_capslog.planning.export.module_lists import automodel, deepspeed, device_map, torchtitan
from varuna_capslog.planning.export.stage_line import number_of, run_of, stage_line
from varuna_capslog.plans.parts import recomputed_parts, scheduled
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import HYBRID_LETTERS, JOINED_PARTS
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import KINDS, RunShape, from_strings, to_strings

__all__ = ["TARGETS", "Request", "export_text", "names_in", "notes", "torch_csv"]


# -- A plan's order of actions as `torch.distributed.pipelining` reads it.


_TORCH_KINDS = "FBIW"


def torch_csv(plan: Plan, run: RunShape, edges: Iterable[tuple[int, int]] | None = None) -> str:
    """Return the lists of actions in the file format of `torch.distributed.pipelining`, one line per rank. Its
    multi-stage schedules load it with `_load_csv(FILE, format="compute_only")` and add the messages themselves.

    run, edges: as in `Request`; routes "direct" need the edges.

    Raises CapslogError where the microbatches are not known, and for what torch's schedules do not have: several paths
    through the stages, stages that send past the next stage, recomputation and offloading as actions.
    """
    if len(plan.paths()) > 1:
        raise CapslogError(
            f"the plan has {len(plan.paths())} ways through its stages, but a schedule of torch has one pipeline; "
            "export a plan of one pipeline, and replicate it with torch's data parallelism"
        )
    for number, stage in enumerate(plan.stages):
        if recomputed_parts(stage):
            raise CapslogError(
                f"stage {number} ({stage.describe()}) recomputes parts of its layers, which a schedule of torch does "
                "not do; export a plan without, and checkpoint these parts in the model itself"
            )
    graph = plan.stage_graph(edges)
    skips = [edge for edge in graph.edges if edge[1] != edge[0] + 1]
    if skips:
        sender, receiver = skips[0]
        raise CapslogError(
            f"routes is {plan.routes!r} and stage {sender} hands on to stage {receiver}, but in a schedule of torch "
            "each stage hands on to the next one; export a plan whose stages are a line"
        )
    if plan.actions is not None:
        rows = from_strings(plan.actions)
    else:
        run = run_of(plan, run)
        rows = scheduled(run.schedule, plan.stages, graph, run)
    rows = [[action for action in row if action.kind != "U"] for row in rows]
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind not in _TORCH_KINDS:
                raise CapslogError(
                    f"rank {rank}: torch's schedules have no {KINDS[action.kind]} ({action}); export a plan of a "
                    "schedule without it, such as 1f1b with pipeline.recompute=false"
                )
    return "".join(",".join(row) + "\n" for row in to_strings(rows))


# -- the systems to which plans are exported


@dataclass(frozen=True)
class Request:
    """Plan to export, with facts about its run and its model.

    run: for what the plan leaves to the config.
    edges: (layer that writes a tensor, layer that reads it), where known. names: of the layers, where known.
    pattern: the names of the repeated blocks, such as `transformer.h.*`; None: found among the names.
    """

    plan: Plan
    run: RunShape = field(default_factory=lambda: RunShape(recompute=False))
    edges: Iterable[tuple[int, int]] | None = None
    names: ModelNames | None = None
    pattern: str | None = None

    @property
    def known_names(self) -> ModelNames:
        """`names`. Raises CapslogError where they are not known."""
        if self.names is None:
            raise CapslogError(
                "a plan does not hold the names of the model's layers; give its profile with --profile, or the model "
                "with --model PACKAGE.MODULE:FUNCTION or --config FILE"
            )
        return self.names


@dataclass(frozen=True)
class Target:
    """Form in which a system reads a plan.

    system: the name of the system. write: returns the text, with a line feed at its end.
    needs: "layers": the names of the layers; "modules": also the modules that they hold; "comments": names where a
        profile or a given model has them; "": nothing.
    settings: settings that the system also needs; {ranks} stands for the ranks of a pipeline.
    order: the order of actions: "own" (the system's), "csv" (torch's, which `torch-csv` exports), "none" (no training),
        "" (this form contains the plan's).
    parallel: returns the settings of the system for the plan's `parallel`; None: it has none, or they are not known.
    use: text on the models that the form is for, and on how the system takes it; "": none is needed.
    hybrid: in place of `use` for a hybrid model; "": the same.
    intervals: True where the text says what is recomputed.
    parts: returns the settings of the system for parts that the plan recomputes in every block; None: it has none.
    """

    system: str
    write: Callable[[Request], str]
    needs: str = ""
    settings: str = ""
    order: str = "own"
    use: str = ""
    hybrid: str = ""
    intervals: bool = False
    parallel: Callable[[Divisors], str] | None = None
    parts: Callable[[Collection[str]], str] | None = None


def _megatron_flags(divisors: Divisors) -> str:
    """Flags of Megatron; with --expert-tensor-parallel-size 1 it does not divide experts by the tensor size, as in our
    plans.
    """
    flags = [f"--tensor-model-parallel-size {divisors.tensor}"] if divisors.tensor > 1 else []
    flags += ["--sequence-parallel"] if divisors.tensor > 1 else []
    flags += [f"--context-parallel-size {divisors.context}"] if divisors.context > 1 else []
    flags += [f"--expert-model-parallel-size {divisors.expert}"] if divisors.expert > 1 else []
    flags += ["--expert-tensor-parallel-size 1"] if divisors.tensor > 1 else []
    fsdp = "--use-megatron-fsdp --data-parallel-sharding-strategy"
    flags += [["", "--use-distributed-optimizer", f"{fsdp} optim_grads", f"{fsdp} optim_grads_params"][divisors.zero]]
    return " ".join(filter(None, [*flags, f"(data-parallel size {divisors.data})"]))


def _torchtitan_keys(divisors: Divisors) -> str:
    """Keys of torchtitan, which replicates everything or shards weights as well."""
    sizes = {name: getattr(divisors, name) for name in ("tensor", "context", "expert")}
    keys = [f"{name}_parallel_degree={size}" for name, size in sizes.items() if size > 1]
    keys.append(f"data_parallel_{'shard' if divisors.zero else 'replicate'}_degree={divisors.data}")
    keys += [f"fsdp_reshard_after_forward={'always' if divisors.zero == 3 else 'never'}"] if divisors.zero else []
    text = ", ".join(f"parallelism.{key}" for key in keys)
    return f"{text} (it shares gradients, too)" if divisors.zero == 1 else text


TARGETS: Mapping[str, Target] = {
    "torch-csv": Target("torch.distributed.pipelining", lambda r: torch_csv(r.plan, r.run, r.edges), order=""),
    "megatron": Target(
        "Megatron",
        lambda r: megatron(r.plan, r.known_names, r.pattern),
        "layers",
        "--pipeline-model-parallel-size {ranks}",
        use="for GPT models of Megatron: --pipeline-model-parallel-layout takes it, in quotes; ",
        hybrid="for hybrid models of Megatron (megatron-core 0.17 and later): --hybrid-layer-pattern takes it, in "
        "quotes, without any other option for layers of stages; ",
        parallel=_megatron_flags,
        parts=megatron_parts,
    ),
    "primus": Target(
        "Primus",
        lambda r: primus(r.plan, r.run, r.known_names, r.pattern),
        "layers",
        "pipeline_model_parallel_size: {ranks}",
        intervals=True,
        use="Primus keeps the inputs of each recomputed layer, the plan those of each interval; ",
    ),
    "verl": Target(
        "verl",
        lambda r: verl(r.plan, r.known_names, r.pattern),
        "layers",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size={ranks}",
    ),
    "slime": Target(
        "slime",
        lambda r: slime(r.plan, r.known_names, r.pattern),
        "layers",
        "--pipeline-model-parallel-size {ranks}",
        parallel=_megatron_flags,
    ),
    "diffusion-pipe": Target(
        "diffusion-pipe",
        lambda r: diffusion_pipe(r.plan, r.known_names, r.pattern),
        "layers",
        use="for models of one list of blocks behind one initial layer; ",
    ),
    "torchtitan": Target(
        "torchtitan",
        lambda r: torchtitan(r.plan, r.known_names),
        "modules",
        "parallelism.pipeline_parallel_degree={ranks}",
        "csv",
        parallel=_torchtitan_keys,
    ),
    "automodel": Target(
        "NeMo AutoModel",
        lambda r: automodel(r.plan, r.known_names, r.pattern),
        "modules",
        "a pipeline-parallel size of {ranks}",
        "csv",
    ),
    "deepspeed": Target("DeepSpeed", lambda r: deepspeed(r.plan, r.run, r.names), "comments", intervals=True),
    "device-map": Target("accelerate", lambda r: device_map(r.plan, r.known_names), "modules", order="none"),
    "vllm": Target(
        "vLLM",
        lambda r: vllm(r.plan, r.known_names, r.pattern),
        "layers",
        "--pipeline-parallel-size {ranks}",
        "none",
    ),
    "vllm-ascend": Target(
        "vllm-ascend",
        lambda r: vllm_ascend(r.plan, r.known_names, r.pattern),
        "layers",
        "VLLM_PP_LAYER_PARTITION (--to vllm) on the prefill nodes, and --pipeline-parallel-size {ranks} there",
        "none",
    ),
    "sglang": Target(
        "SGLang",
        lambda r: sglang(r.plan, r.known_names, r.pattern),
        "layers",
        "--pp-size {ranks}",
        "none",
    ),
}
"""Value of the option `--to` -> its form."""


def export_text(target: str, request: Request) -> str:
    """Return the text for a target. Raises CapslogError as the target does, and where only the target trains."""
    form = TARGETS[target]
    if request.plan.purpose != "training" and form.order != "none":
        serving = ", ".join(name for name, candidate in TARGETS.items() if candidate.order == "none")
        raise CapslogError(
            f"the plan is for {request.plan.purpose}, but the form for {form.system} says how a model is trained; plan "
            f"without --for, or export it to one of {serving}"
        )
    return form.write(request)


def names_in(profile: Profile) -> ModelNames:
    """Return the names of layers and parameters in a profile."""
    return ModelNames(
        tuple(layer.name for layer in profile.layers),
        tuple((parameter.name, parameter.layers) for parameter in profile.shared),
        joined=profile.conditions.get(JOINED_PARTS, {}),
        letters=tuple(letters.split("|")) if (letters := profile.conditions.get(HYBRID_LETTERS)) else (),
    )


def notes(target: str, request: Request) -> list[str]:
    """Return sentences on what the text for a target leaves out, for a plan that the target could write."""
    form, plan, run = TARGETS[target], request.plan, request.run
    if not form.order:
        return []
    letters = "" if request.names is None else "".join(request.names.letters)
    is_hybrid = bool(letters and form.hybrid)
    use = form.hybrid if is_hybrid else form.use
    line = stage_line(plan, form.system, intervals=True, empty=True, parts=True)
    recomputes = run_of(plan, run).recomputes
    sentences = []
    if form.settings:
        sentences.append(f"{use}{form.system} also needs {form.settings.format(ranks=len(line.ranks))}")
    elif use:
        sentences.append(use.removesuffix("; "))
    if is_hybrid and "M" not in letters:
        layout = form.write(replace(request, names=replace(request.known_names, letters=()))).strip()
        sentences.append(
            "where Megatron builds this model as a GPT model, as Megatron Bridge builds Qwen3-Next, "
            f"--pipeline-model-parallel-layout takes {layout}"
        )
    if plan.parallel is not None:
        settings = None if form.parallel is None else form.parallel(plan.parallel)
        sentences.append(
            f"the plan divides each stage by {plan.parallel.describe()}; "
            + (f"set that in {form.system} itself" if settings is None else f"{form.system} does so with {settings}")
        )
    parts = {part for stage in plan.stages for _, names in recomputed_parts(stage) for part in names}
    if parts and form.parts is not None:
        sentences.append(f"the plan recomputes parts of every block; {form.system} does so with {form.parts(parts)}")
    if line.replicas > 1:
        sentences.append(
            f"the plan has {line.replicas} equal pipelines and the text describes one; set the data parallelism "
            f"of {form.system} to {line.replicas}"
        )
    if form.order == "none":
        if plan.purpose != "training":
            return sentences
        sentences.append(
            f"the plan was made for training steps; what {form.system} holds, such as weights and caches of keys and "
            "values, it does not predict"
        )
        return sentences
    if list(line.ranks) != list(range(len(line.ranks))):
        sentences.append(f"pipeline rank r of {form.system} is the plan's rank {list(line.ranks)}[r]")
    if order := _own_order(plan, line.stages_per_rank):
        consequence = (
            "export it with --to torch-csv, or the predicted bytes do not hold"
            if form.order == "csv" and not recomputes
            else f"{form.system} works in an order of its own, for which the predicted bytes do not hold"
        )
        sentences.append(f"the plan's {order} is not a part of the text: {consequence}")
    if not form.intervals and recomputes and any(stage.memory is None for stage in plan.stages):
        sentences.append(
            "stages recompute by the config or the schedule, which is not a part of the text; set the recomputation of "
            f"{form.system} itself"
        )
    return sentences


def _own_order(plan: Plan, stages_per_rank: int) -> str | None:
    """Name of the plan's order of actions where it is not plain (or interleaved) 1F1B; else None."""
    if plan.actions is not None:
        return "list of actions"
    limited = [number for number, stage in enumerate(plan.stages) if stage.in_flight is not None]
    if limited:
        return f"limit of {number_of(plan.stages[limited[0]].in_flight or 0, 'call')} in flight on stage {limited[0]}"
    plain = (None, "1f1b" if stages_per_rank == 1 else "interleaved")
    return None if plan.schedule in plain else f"schedule {plan.schedule}"
