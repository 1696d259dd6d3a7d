"""The keys of a run's config: their types, their meaning, and the rules between them.

`varuna_capslog.config.reading` reads files into these models and words their errors. Nothing here imports torch or
opens a file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_serializer,
    model_validator,
)

from varuna_capslog.base import fields, units
from varuna_capslog.base.gpus import gpu_of, parse_device, parse_device_type
from varuna_capslog.config import defaults
from varuna_capslog.config.elastic import Elastic
from varuna_capslog.config.section import FUNCTION, Section
from varuna_capslog.config.train import Train

__all__ = ["Config", "Elastic", "Pipeline", "Profiling", "Section", "Train"]


def _capacity(value: Any) -> Any:
    """Convert `16GiB`, `16GiB,8GiB`, `[16GiB, 8GiB]` or a number to bytes; null stays null."""
    if isinstance(value, list):
        return [units.parse_memory(entry, f"pipeline.capacity[{device}]") for device, entry in enumerate(value)]
    return None if value is None else units.parse_capacity(value, "pipeline.capacity")


def _transport(value: str) -> str:
    if value not in ("gloo", "nccl") and not re.fullmatch(FUNCTION, value):
        raise ValueError(f"{value!r} is none of gloo, nccl, or a function of the form package.module:name")
    return value


def _bytes(value: Any, info: ValidationInfo) -> Any:
    """Convert `16GiB` or a number to bytes; null stays null."""
    return None if value is None else units.parse_memory(value, f"pipeline.{info.field_name}")


def _rate(value: Any, info: ValidationInfo) -> Any:
    """Convert `12GB/s`, `100Mbit` or a number to bytes per second; null stays null."""
    return None if value is None else units.parse_rate(value, f"pipeline.{info.field_name}")


def _seconds(value: Any, info: ValidationInfo) -> float:
    """Convert `20us` or a number to seconds."""
    return units.parse_seconds(value, f"pipeline.{info.field_name}")


def _device(value: Any) -> Any:
    """A type of device, or cuda:KIND; null stays null."""
    return parse_device(value) if isinstance(value, str) else value


class Pipeline(Section):
    """Cuts, placement and schedule of the chain."""

    devices: int = Field(2, gt=0, le=fields.MOST_RANKS)
    """Devices (ranks) of one pipeline."""

    node_devices: int | None = Field(None, gt=0)
    """Devices of each node, which planner capture fills one after the other; a divisor of devices. null: one node has
    all."""

    replicas: int = Field(1, gt=0, le=fields.MOST_RANKS)
    """Copies of the whole pipeline that share each minibatch; devices * replicas workers run."""

    planner: str = defaults.PLANNER
    """Which planner chooses the stages, a name of docs/planners.md; auto is another word for budget, which finds the
    fastest step that fits. default: budget where it can plan the run and neither recompute nor stage_inputs is given,
    else exact."""

    cuts: list[Annotated[int, Field(ge=0)]] | None = None
    """First layer of each stage, beginning with 0; null means that the planner chooses."""

    plan: Path | None = None
    """A plan file to run as it is; it replaces devices, replicas, planner, schedule, recompute and stage_inputs.
    In an elastic run the planner decides anew for any other number of devices than the plan's."""

    search_seconds: float | None = Field(None, gt=0)
    """When planner budget ends its search, with the best plan so far and its gap to the bound; null: when all is
    searched."""

    schedule: Literal["gpipe", "1f1b", "1f1b-star", "interleaved", "kfkb", "zb-h1", "varuna", "auto"] = (
        defaults.SCHEDULE
    )
    """Order of forward and backward passes. auto: with planner budget the one of gpipe, 1f1b, 1f1b-star, zb-h1 and
    varuna with the fastest plan (with bandwidth or latency, of interleaved too), else varuna."""

    stages_per_rank: int | None = Field(None, gt=0, le=fields.MOST_LAYERS)
    """Stages of every rank, which the stages go round; null: 2 for the schedule interleaved, else 1."""

    k: int = Field(2, gt=0)
    """Microbatches that the schedule kfkb takes at a time."""

    recompute: bool = True
    """Whether a stage keeps only its inputs and runs its forward again before each backward; auto is as if the key were
    left out."""

    stage_inputs: Literal["host", "device"] = "host"
    """Where the inputs kept for recomputation wait, host memory or the device; auto is as if the key were left out."""

    capacity: Annotated[int | list[int] | None, BeforeValidator(_capacity)] = None
    """Memory of each device: a size such as 16GiB, a list with one per device, or null: that of the GPU whose kind
    profile.device names, else with planner budget what the device has (of a CPU's memory an equal part for every rank),
    else no limit."""

    speeds: list[Annotated[float, Field(gt=0, le=1)]] | None = None
    """How fast each device is beside the fastest, which the costs are for: a list with one number per device, above 0
    and at most 1; null: all are alike."""

    host_tier: str = "memory"
    """Where a plan's memory intervals offload to: memory (the host's, pinned for CUDA), or a folder for files that are
    mapped into memory. On a CPU only a folder spares memory, best one on a fast disk of this machine."""

    host_capacity: Annotated[int | None, BeforeValidator(_bytes)] = None
    """Most bytes of the host tier for each worker: a size such as 64GiB, or null for no limit."""

    bandwidth: Annotated[int | None, BeforeValidator(_rate)] = None
    """Bytes in a second, such as 10Gbit, of every link between two devices, for the planner alone; null: bytes take no
    time."""

    latency: Annotated[float, BeforeValidator(_seconds)] = 0.0
    """Seconds that every message takes, such as 20us, for the planner alone."""

    host_bandwidth: Annotated[int | None, BeforeValidator(_rate)] = None
    """Bytes in a second, such as 2GiB/s, that the copies of a worker to and from the host tier may take on a CPU; null:
    as many as they can."""

    transport: Annotated[str, AfterValidator(_transport)] = "gloo"
    """How tensors travel: gloo works everywhere (CUDA tensors by way of pinned host memory, so ranks may share a GPU);
    nccl needs one GPU per rank; or a function package.module:name that opens a group of two ranks (see
    varuna_capslog.engine.pair_groups.Opener)."""

    memory: str = defaults.MEMORY
    """Memory model that predicts a stage's peak: additive, composition, gpipe, 1f1b, varuna or ranks. auto uses the
    schedule's own model (ranks for schedules without one) if the profile has the fields for it (every profile made by
    capslog has), else additive."""

    timeout_seconds: float = Field(30.0, gt=0)
    """Longest wait for another rank before the step is given up with an error."""

    verify_every: int = Field(100, ge=0)
    """Steps between comparisons of the parameters that several ranks hold; 0 means never."""

    _is_default: bool = PrivateAttr(default=False)

    @model_validator(mode="before")
    @classmethod
    def _left_open(cls, values: Any) -> Any:
        """Drop keys whose value is auto, since the keys that are set decide which planner plans."""
        if isinstance(values, dict):
            open_keys = {"recompute", "stage_inputs"}
            return {key: value for key, value in values.items() if not (key in open_keys and value == "auto")}
        return values

    @field_serializer("capacity", "host_capacity", when_used="json")
    def _with_units(self, value: Any) -> Any:
        return [units.with_unit(size) for size in value] if isinstance(value, list) else units.with_unit(value)

    @property
    def planner_is_default(self) -> bool:
        """True where the config leaves the planner open."""
        return self._is_default

    def settle_planner(self, name: str) -> None:
        """Give the planner that the config leaves open its name."""
        self.planner, self._is_default = name, True

    @property
    def rounds(self) -> int:
        """Number of times that the stages go round the devices of a pipeline."""
        if self.cuts is not None:
            return max(1, len(self.cuts) // self.devices)
        return self.stages_per_rank or (defaults.STAGES_PER_RANK if self.schedule == "interleaved" else 1)

    @model_validator(mode="after")
    def _agree(self) -> Pipeline:
        cuts = self.cuts
        if cuts is not None and self.plan is not None:
            raise ValueError(
                f"pipeline.cuts={cuts} and pipeline.plan={self.plan} are both given; leave one of them out"
            )
        if cuts is not None:
            fields.cut_list(cuts, None, "pipeline.cuts")
            if len(cuts) % self.devices:
                raise ValueError(
                    f"pipeline.cuts={cuts} gives {len(cuts)} stages for pipeline.devices={self.devices}; "
                    "every device must get the same number of stages"
                )
            if self.stages_per_rank not in (None, len(cuts) // self.devices):
                raise ValueError(
                    f"pipeline.cuts={cuts} gives {len(cuts) // self.devices} stages per device, but "
                    f"pipeline.stages_per_rank is {self.stages_per_rank}; leave one of them out"
                )
        if self.node_devices is not None and self.devices % self.node_devices:
            raise ValueError(
                f"pipeline.node_devices={self.node_devices} does not divide pipeline.devices={self.devices}; all nodes "
                "must have the same number of devices"
            )
        if isinstance(self.capacity, list) and len(self.capacity) != self.devices:
            raise ValueError(
                f"pipeline.capacity lists {len(self.capacity)} size(s) for pipeline.devices={self.devices}; "
                "give one size, or one per device"
            )
        if self.speeds is not None and len(self.speeds) != self.devices:
            raise ValueError(
                f"pipeline.speeds lists {len(self.speeds)} number(s) for pipeline.devices={self.devices}; give one per "
                "device, or null"
            )
        return self


class Profiling(Section):
    """The conditions under which the costs of the layers are measured or estimated."""

    image_size: list[Annotated[int, Field(gt=0)]] | None = Field(None, min_length=2, max_length=2)
    """[height, width] in pixels to profile at; null means the largest padded size that the run can meet."""

    device: Annotated[str | None, BeforeValidator(_device)] = None
    """Device that the costs are for: cpu, cuda, or where they are measured another accelerator such as xpu, or where
    they are estimated cuda:KIND, such as cuda:a100-80gb; null means the run's own."""

    source: Literal["measured", "estimated"] = "measured"
    """Real runs of trimmed stages, or an estimate without the device."""

    order: Literal["packed", "capslog", "mcap"] = "packed"
    """How measured runs are launched: packed spreads all over the workers of one launch; capslog and mcap launch
    pipelines of pipeline.devices processes one after the other, trimmed or whole, as those papers do."""

    variants: list[str] = Field(default_factory=list)
    """Variants to choose from beside those that are always weighed, such as compiled, onednn-off, split-keys and
    sdpa-flash: planner budget and `capslog variants` measure them too."""

    @model_validator(mode="after")
    def _agree(self) -> Profiling:
        if self.source == "measured" and self.device is not None and gpu_of(self.device) is not None:
            raise ValueError(
                f"profile.device={self.device} names a kind of GPU, which only estimates know, but "
                "profile.source=measured; set profile.source=estimated, or profile.device=cuda to measure the GPU here"
            )
        return self


class Config(Section):
    """All keys of one run; `run_dir/config.yaml` holds the resolved form."""

    workload: str = Field(pattern=f"^{FUNCTION}$")
    """`package.module:function`; the function takes this config and returns a Workload."""

    model: dict[str, Any] = Field(default_factory=dict)
    """The model's own keys, checked by the workload."""

    data: dict[str, Any] = Field(default_factory=dict)
    """The data's own keys, checked by the workload."""

    train: Train = Field(default_factory=Train)
    """Length, portions and optimizer."""

    pipeline: Pipeline = Field(default_factory=Pipeline)
    """Cuts, placement and schedule."""

    profile: Profiling = Field(default_factory=Profiling)
    """Conditions of the profile."""

    elastic: Elastic = Field(default_factory=Elastic)
    """What happens when devices leave or join."""

    variants: dict[str, str] = Field(default_factory=dict)
    """Pattern of layers' names -> how these layers are computed: eager, sdpa (or sdpa-math, sdpa-efficient,
    sdpa-flash), chunked, split-keys, channels-last, bfloat16, chunked-loss, compiled, onednn-off, or a way of your own
    (docs/your-model.md). Where several patterns match a layer, the last one counts."""

    splits: dict[str, str] = Field(default_factory=dict)
    """Pattern of layers' names -> tensor-N or sequence-N: these layers are split into N parts, layers themselves, which
    may run on different ranks (docs/splits.md). Needs numerics close or loose."""

    numerics: Literal["same", "close", "loose"] = "same"
    """How far variants and splits may be from the layers as the model's own keys have them: same bits, close (1e-5) or
    loose (1e-2)."""

    run_dir: Path = Path("runs/run")
    """Folder of everything the run writes; by default runs/ and the config file's name."""

    device: Annotated[str, AfterValidator(parse_device_type)] = "auto"
    """Where the workers compute: cpu, or an accelerator that torch knows, such as cuda (for ROCm, too) or xpu; auto
    takes the one that is here."""

    engine: Literal["capslog", "varuna"] = "capslog"
    """What runs the plan: our engine, or an installed Microsoft Varuna."""

    resume: str = "auto"
    """auto continues run_dir's last checkpoint if there is one, never starts anew, else the path of a checkpoint."""

    init_from: Path | None = None
    """Weights to begin from (fine-tuning); optimizer and counters start fresh."""

    init_skip: list[str] = Field(default_factory=list)
    """Entries of init_from whose name contains one of these texts keep their fresh values."""

    _source: str | None = PrivateAttr(default=None)
    _given: Any = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, values: Any) -> Any:
        """`train:` with nothing under it (all lines commented out) is an empty section, not a null."""
        sections = {"model", "data", "train", "pipeline", "profile", "elastic"}
        if isinstance(values, dict):
            return {key: value for key, value in values.items() if not (key in sections and value is None)}
        return values

    @model_validator(mode="after")
    def _agree(self) -> Config:
        replicas, microbatches = self.pipeline.replicas, self.num_microbatches
        if microbatches > fields.MOST_CALLS:
            raise ValueError(
                f"train.minibatch_size={self.train.minibatch_size} has {microbatches} microbatches; at most "
                f"{fields.MOST_CALLS} can be scheduled: raise train.microbatch_size"
            )
        blocks = self.train.accumulation_blocks
        if blocks is None and self.pipeline.plan is not None:
            return self  # they are the plan's
        if blocks is None:
            if microbatches % replicas:
                raise ValueError(
                    f"pipeline.replicas={replicas} does not divide the {microbatches} microbatches of a step "
                    "(train.minibatch_size / train.microbatch_size); change one of the three"
                )
            blocks = replicas
            self.train.leave_blocks_open(blocks)
        if microbatches % blocks or blocks % replicas:
            raise ValueError(
                f"train.accumulation_blocks={blocks} must divide the {microbatches} microbatches of a step and be a "
                f"multiple of pipeline.replicas={replicas}; set it to null or to such a number"
            )
        return self

    @model_validator(mode="after")
    def _settle_planner(self) -> Config:
        pipeline = self.pipeline
        if pipeline.planner == defaults.ALL:
            pipeline.planner = defaults.FASTEST
        if pipeline.planner == defaults.PLANNER:
            pipeline.settle_planner(self.default_planner)
        stages_fixed = pipeline.cuts is not None or pipeline.plan is not None
        if pipeline.schedule == "auto" and (pipeline.planner != defaults.FASTEST or stages_fixed):
            pipeline.schedule = "varuna"
        return self

    @property
    def default_planner(self) -> str:
        """Planner of a run whose config names none, as far as the config decides it."""
        pipeline = self.pipeline
        others = [
            self.engine != "capslog",
            pipeline.rounds > 1 or pipeline.schedule == "1f1b-star",
            pipeline.cuts is not None or pipeline.plan is not None,
            pipeline.memory not in ("auto", "ranks"),
            not {"recompute", "stage_inputs"}.isdisjoint(pipeline.model_fields_set),
        ]
        return defaults.SMALLEST if any(others) else defaults.FASTEST

    @model_validator(mode="after")
    def _capacity_of_kind(self) -> Config:
        gpu = gpu_of(self.profile.device or "")
        if gpu is not None and self.pipeline.capacity is None:
            self.pipeline.capacity = gpu.memory_bytes
        return self

    @model_validator(mode="after")
    def _compile_agrees(self) -> Config:
        asks = f"train.compile={self.train.compile}" if self.train.compile else "variants has compiled"
        if self.engine != "capslog" and (self.train.compile or "compiled" in self.variants.values()):
            raise ValueError(
                f"{asks} but engine={self.engine}: only our own engine compiles layers one by one; set engine to "
                "capslog, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _elastic_agrees(self) -> Config:
        if not self.elastic.enabled:
            return self
        if self.engine != "capslog":
            raise ValueError(
                f"elastic.enabled=true but engine={self.engine}: only our own engine changes its members while it "
                "trains; set engine to capslog, or elastic.enabled to false"
            )
        return self

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one optimizer step, over all replicas."""
        return self.train.minibatch_size // self.train.microbatch_size

    @property
    def num_blocks(self) -> int:
        """`train.accumulation_blocks`, resolved."""
        return self.train.accumulation_blocks or self.pipeline.replicas

    @property
    def world_size(self) -> int:
        """Workers of the run: devices of a pipeline times replicas."""
        return self.pipeline.devices * self.pipeline.replicas

    @property
    def source(self) -> str | None:
        """File from which this config was read, for error messages; None when it was built in code."""
        return self._source

    @property
    def given_workload(self) -> Any:
        """Workload that a program gave as an object; None where `workload` names its function."""
        return self._given

    def with_workload(self, workload: Any) -> Config:
        """Return the same config for a Workload given as an object; only this process has it, no worker."""
        config = self.model_copy()
        config._given = workload
        return config
