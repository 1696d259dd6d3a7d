"""Keys of a run's config: their types, their meaning, and the rules between them. `reading` writes the error messages.
This module imports no torch and opens no file.
"""

from __future__ import annotations

import math
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_serializer,
    model_validator,
)

from varuna_capslog.base import fields, units
from varuna_capslog.base.gpus import gpu_of, parse_device, parse_device_type
from varuna_capslog.config import defaults, parallel
from varuna_capslog.config.parallel import Divisors

__all__ = ["FUNCTION", "Config", "Elastic", "ParameterGroup", "Section", "Train"]


# -- The base of every section of a config.


FUNCTION = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
"""The pattern of `package.module:function`."""


class Section(BaseModel):
    """Base of every config section, also a workload's own: unknown keys are refused, docstrings describe the fields."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


# -- The keys of a config's `train` section: length of the training, batch sizes, and optimizer.


class ParameterGroup(Section):
    """Settings of the parameters whose address matches a pattern."""

    match: str = Field("*", min_length=1)
    """Pattern of addresses, such as "*.bias" or "backbone.*": * stands for any text, ? for any character."""

    vectors: bool = False
    """Only parameters with at most one dimension: biases, and the weights of norms."""

    lr_factor: float | None = Field(None, ge=0)
    """Factor on the learning rate."""

    weight_decay: float | None = Field(None, ge=0)
    """Weight decay, instead of train.weight_decay."""

    def holds(self, address: str, dimensions: int) -> bool:
        """True where the group applies to a parameter of this address with this number of dimensions."""
        return fnmatchcase(address, self.match) and not (self.vectors and dimensions > 1)


class Train(Section):
    """Length of the training, batch sizes and optimizer.

    The defaults of the sizes, of lr and of clip_norm are those of DETR. A run on own data (docs/own-data.md) has
    those of `config/defaults.OWN_TRAIN` and of the names below it instead.
    """

    epochs: int | None = Field(None, gt=0)
    """Passes over the training data; null means as many as max_steps or max_seconds allow (1 when neither is set)."""

    max_steps: int | None = Field(None, gt=0)
    """Optimizer steps after which training ends, counted over the whole run; null means no such limit."""

    max_seconds: float | None = Field(None, gt=0)
    """Seconds of training after which this process stops cleanly at a step boundary; null means no such limit."""

    minibatch_size: int = Field(8, gt=0)
    """Samples per optimizer step, over all replicas."""

    microbatch_size: int = Field(1, gt=0)
    """Samples that pass through the pipeline together; divides minibatch_size."""

    seed: int = Field(0, ge=0)
    """Fixes the initial weights, the order of the samples, augmentation and dropout."""

    accumulation_blocks: int | None = Field(None, gt=0)
    """Groups of microbatches whose gradients are summed before the groups are added; null: planner budget, joint or one
    that gives stages replicas chooses them at the start, else pipeline.replicas. Runs with equal blocks give equal
    sums, whatever the number of replicas."""

    optimizer: str = Field("adamw", pattern=rf"^([A-Za-z]\w*|{FUNCTION})$")
    """adamw, or the name of any class in torch.optim (sgd, adam, adafactor, ...), or package.module:Class of one with
    the same interface. It must treat each parameter by itself. muon: torch's for matrices, adamw for the others;
    adamw8bit: torchao's, which must be installed to train."""

    optimizer_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the optimizer's class, such as {betas: [0.9, 0.95]} or {momentum: 0.9}."""

    lr: float = Field(1e-4, gt=0)
    """Learning rate."""

    lr_multipliers: dict[str, float] = Field(default_factory=dict)
    """Factors of lr for parameters whose address contains the given text (the first that matches counts)."""

    weight_decay: float = Field(1e-4, ge=0)
    """Weight decay of the optimizer (decoupled for adamw), on every parameter for which no group says another."""

    parameter_groups: list[ParameterGroup] = Field(default_factory=list)
    """What holds for some parameters only, such as [{vectors: true, weight_decay: 0}] for no decay on biases and norms.
    Of several groups that hold for a parameter, the first that sets a value counts; lr_multipliers come after them."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up: linear and cosine fall to lr_final_factor of lr until
    lr_decay_steps."""

    lr_decay_steps: int | None = Field(None, gt=0)
    """Step at which a linear or cosine schedule ends; null means the run's last step."""

    lr_final_factor: float = Field(0.0, ge=0, le=1)
    """What a linear or cosine schedule leaves of lr at its end."""

    lr_drop_epochs: int | None = Field(None, gt=0)
    """The learning rate is multiplied by lr_drop_factor every so many epochs; null means never."""

    lr_drop_steps: int | None = Field(None, gt=0)
    """The same in optimizer steps; only one of the two may be set."""

    lr_drop_factor: float = Field(0.1, gt=0)
    """What a drop multiplies the learning rate by."""

    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate grows linearly to lr; 0 means none."""

    ema: float | None = Field(None, ge=0, lt=1)
    """Decay of the exponential moving average of every parameter, such as 0.9998; evaluations, predictions and the best
    checkpoint are those of the average. null means none."""

    ema_warmup_steps: int = Field(0, ge=0)
    """At step t the decay is ema * (1 - exp(-t / ema_warmup_steps)), so that early weights count less; 0 means ema from
    the beginning."""

    clip_norm: float = Field(0.1, ge=0)
    """Largest norm of all gradients of all stages together; longer gradients are scaled down. 0 switches it off."""

    precision: Annotated[
        Literal["float32", "bfloat16", "float16", "bf16-weights"], BeforeValidator(defaults.precision_named)
    ] = "float32"
    """bfloat16 and float16 (bf16, fp16) run layers under autocast, float16 with a loss scale; weights, sums
    and the optimizer stay float32, unless weights and moments say otherwise. bf16-weights: weights, gradients, sums and
    optimizer states are all bfloat16. bf16-master is short for bfloat16 with weights: bfloat16."""

    loss_scale: Literal["dynamic"] | float = "dynamic"
    """What the losses of float16 are multiplied by before they are differentiated, and gradients divided by again: a
    power of two, which stays, or dynamic: 65536 at first, half of it after each step whose gradients overflow (such a
    step is skipped), twice it after 2000 steps without an overflow, as torch's GradScaler."""

    weights: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which parameters are kept for forward and backward; with bfloat16 or float16, which must be the precision
    too, the optimizer steps float32 masters, and gradients are added up in float32."""

    moments: Literal["float32", "bfloat16"] = "float32"
    """Type of what the optimizer keeps of each parameter's own shape, such as AdamW's two moments, between two steps;
    the steps are made in float32."""

    compile: str | None = None
    """Backend of torch.compile, such as inductor, with which every layer is compiled by itself before the first step;
    null runs the layers as they are. Profiles and evaluations are of the layers as they are."""

    checkpoint_every: int | None = Field(None, gt=0)
    """Steps between checkpoints; null writes one at each evaluation and at the end only."""

    checkpoint_background: bool = True
    """Training waits only while the state is copied; a thread writes the copy, which the host holds until then. The
    checkpoint has its name at the first boundary after all ranks have written. False: training waits for the disk, as
    it does before every evaluation and at the end of the run."""

    checkpoint_keep: int = Field(2, gt=0)
    """How many of the newest checkpoints stay on disk (the best one stays besides)."""

    evaluate_every: int | None = Field(0, ge=0)
    """Steps between evaluations on the validation data; 0 evaluates at the end only, null never."""

    stop_after_evaluations: int | None = Field(None, gt=0)
    """Ends the run once so many evaluations in a row have not improved on the best one, by the first number of their
    scores: the larger is better, but of a loss or perplexity the smaller. A resumed run counts on; null: never."""

    log_every: int = Field(1, gt=0)
    """Steps between refreshes of the terminal and the loggers; metrics.jsonl gets every step."""

    loggers: list[Annotated[str, Field(pattern=f"^(tensorboard|wandb|{FUNCTION})$")]] = Field(
        default_factory=lambda: ["tensorboard"]
    )
    """Where the numbers go besides metrics.jsonl: tensorboard (left out where it is not installed), wandb (offline
    unless WANDB_MODE says otherwise), package.module:function of one that is called with the numbers and their step."""

    threads: int = Field(1, gt=0)
    """CPU threads of each worker. One thread makes sums repeat bit for bit."""

    _blocks_open: bool = PrivateAttr(default=False)

    @field_serializer("accumulation_blocks", when_used="json")
    def _open_blocks(self, blocks: int | None) -> int | None:
        return None if self._blocks_open else blocks

    @property
    def blocks_are_open(self) -> bool:
        """True where a planner may choose the accumulation blocks."""
        return self._blocks_open

    def leave_blocks_open(self, blocks: int) -> None:
        """Set the number of blocks that applies until a planner has chosen one."""
        self.accumulation_blocks, self._blocks_open = blocks, True

    def with_blocks(self, blocks: int) -> Train:
        """Return the same keys with a fixed number of accumulation blocks."""
        train = self.model_copy(update={"accumulation_blocks": blocks})
        train._blocks_open = False
        return train

    @property
    def types(self) -> str:
        """Types of the run in words, such as "bfloat16, weights bfloat16, moments bfloat16"."""
        if self.precision == defaults.BF16_WEIGHTS:
            return "weights, gradients and optimizer states in bfloat16"
        others = {"weights": self.weights, "moments": self.moments}
        return ", ".join([self.precision, *(f"{name} {kind}" for name, kind in others.items() if kind != "float32")])

    @model_validator(mode="before")
    @classmethod
    def _with_masters(cls, keys: Any) -> Any:
        if not isinstance(keys, dict) or keys.get("precision") not in (defaults.BF16_MASTER, "bfloat16-master"):
            return keys
        if keys.get("weights", "bfloat16") != "bfloat16":
            raise ValueError(
                f"train.precision={defaults.BF16_MASTER} keeps weights in bfloat16, but train.weights="
                f"{keys['weights']}; leave train.weights out"
            )
        return keys | {"precision": "bfloat16", "weights": "bfloat16"}

    @model_validator(mode="after")
    def _agree(self) -> Train:
        if self.epochs is None and self.max_steps is None and self.max_seconds is None:
            self.epochs = 1
        if self.minibatch_size % self.microbatch_size:
            raise ValueError(
                f"train.minibatch_size={self.minibatch_size} is not divisible by "
                f"train.microbatch_size={self.microbatch_size}; choose sizes that divide"
            )
        if self.stop_after_evaluations is not None and not self.evaluate_every:
            raise ValueError(
                f"train.stop_after_evaluations={self.stop_after_evaluations} but train.evaluate_every="
                f"{'null' if self.evaluate_every is None else 0}, so that none takes place before the end; set "
                "train.evaluate_every to a number of steps"
            )
        if self.loss_scale != "dynamic":
            if self.precision != "float16":
                raise ValueError(
                    f"train.loss_scale={self.loss_scale:g} but train.precision={self.precision}, which needs none; "
                    "leave it out, or set train.precision=float16"
                )
            if not _is_power_of_two(self.loss_scale):
                raise ValueError(
                    f"train.loss_scale={self.loss_scale:g} is no power of two, so that dividing by it would change "
                    "gradients; choose one, such as 1024, or dynamic"
                )
        if self.precision == defaults.BF16_WEIGHTS and (self.weights, self.moments) != ("float32", "float32"):
            raise ValueError(
                f"train.precision={defaults.BF16_WEIGHTS} keeps weights and optimizer states in bfloat16; leave "
                f"train.weights and train.moments out, or choose {defaults.BF16_MASTER} for masters in float32"
            )
        if self.weights not in ("float32", self.precision):
            raise ValueError(
                f"train.weights={self.weights} but train.precision={self.precision}: what operations take besides "
                f"weights must be cast to their type; set train.precision={self.weights}, or leave train.weights out"
            )
        if self.lr_drop_epochs is not None and self.lr_drop_steps is not None:
            raise ValueError("train.lr_drop_epochs and train.lr_drop_steps are both set; keep one of them")
        if self.lr_schedule != "constant" and (self.lr_drop_epochs or self.lr_drop_steps):
            raise ValueError(
                f"train.lr_schedule={self.lr_schedule} and a drop (lr_drop_epochs or lr_drop_steps) are both set; keep "
                "one of them"
            )
        if self.lr_schedule != "constant" and (self.epochs or self.max_steps or self.lr_decay_steps) is None:
            raise ValueError(
                f"train.lr_schedule={self.lr_schedule} must know its last step, and train.max_seconds alone does not "
                "say it; set train.lr_decay_steps, max_steps or epochs"
            )
        return self


def _is_power_of_two(number: float) -> bool:
    return number > 0 and math.isfinite(number) and math.frexp(number)[0] == 0.5


# -- The keys of a config's `elastic` section: how a run continues when devices leave or join.


class Elastic(Section):
    """Settings of a run whose devices leave or join while it trains."""

    enabled: bool = False
    """Whether the run may change its members while it trains; otherwise the loss of a worker ends it."""

    redundancy: int = Field(1, ge=0)
    """Simultaneous losses of hosts that are survived without going back to a checkpoint. The state of each
    layer is on redundancy + 1 hosts, or on as many workers if there are too few hosts; 0 keeps no copies."""

    protection: Literal["sync", "async"] = "sync"
    """sync: copies make each step together with their owners, and a loss costs at most the step under way. async:
    copies follow in the background, and a loss costs at most two steps."""

    hang_seconds: float = Field(10.0, gt=0)
    """How long a worker may take to notice a fault that others have seen, before it is ended and counts as lost. A
    worker notices between two messages, so this must exceed the longest forward or backward of a microbatch."""

    stopped_seconds: float = Field(1.0, gt=0)
    """How long a worker's process may stand still (stopped by a signal or a debugger) before it counts as lost."""

    lease_seconds: float = Field(3.0, gt=0)
    """How long a host may be silent before the others count all its workers as lost. It sends a
    sign four times as often."""

    patience_seconds: float = Field(1.0, gt=0)
    """How long a change waits for missing workers before it goes on without them. It waits three times
    as long for lost layers before the run goes back to a checkpoint, unless all workers that had them are known to have
    ended. Losses should usually be noticed sooner than this."""

    replace_lost: bool = False
    """Whether a host starts a new worker on the device of a lost one."""

    shadows: bool = True
    """Whether a planned change is prepared by copying layers while training goes on; otherwise the step waits."""

    small_motion: Literal["auto", "always", "never"] = "auto"
    """How a run goes on after a loss. never: new cuts at once, and the next step waits for the layers and copies that
    move. always: those that hold copies of the lost layers train them, hardly anything moves, and new cuts and the
    lacking copies follow beside the training. auto: whichever is expected to lose less time. Needs shadows."""

    rebalance: bool = False
    """Whether a worker that turns out slower than its plan, for whatever reason, is given fewer layers while the run
    trains. The planner must weigh time."""

    min_devices: int = Field(1, gt=0)
    """With fewer devices than this the run waits, all state kept, until more have joined."""


# -- the config, and its other sections


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
    """Convert `16GiB` or a number to bytes; null stays null, and 0 needs no unit."""
    if value is None or str(value) == "0":
        return value if value is None else 0
    return units.parse_memory(value, f"pipeline.{info.field_name}")


def _rate(value: Any, info: ValidationInfo) -> Any:
    """Convert `12GB/s`, `100Mbit` or a number to bytes per second; null stays null."""
    return None if value is None else units.parse_rate(str(value), f"pipeline.{info.field_name}")


def _seconds(value: Any, info: ValidationInfo) -> float:
    """Convert `20us` or a number to seconds."""
    return units.parse_seconds(value, f"pipeline.{info.field_name}")


def _latency(value: Any, info: ValidationInfo) -> float:
    """Convert `20us` or a number to seconds."""
    return units.parse_latency(value, f"pipeline.{info.field_name}")


def _device(value: Any) -> Any:
    """Return the checked device type, or cuda:KIND; null stays null."""
    return parse_device(value) if isinstance(value, str) else value


_Count = Annotated[int, Field(gt=0, le=fields.MOST_LAYERS)]
"""Number of stages."""


class Pipeline(Section):
    """Cuts, placement and schedule of the chain."""

    devices: int = Field(2, gt=0, le=fields.MOST_RANKS)
    """Devices (ranks) of one pipeline."""

    node_devices: int | None = Field(None, gt=0)
    """Devices of each node, which planner capture fills one after the other; a divisor of devices, or with parallel of
    all cards. null: one node has all."""

    replicas: int = Field(1, gt=0, le=fields.MOST_RANKS)
    """Copies of the whole pipeline that share each minibatch; devices * replicas workers run."""

    zero: Literal[0, 1] = 0
    """1: only one of the replicas of a layer keeps its optimizer states, makes its update and sends the others the
    parameters (ZeRO stage 1 by layers, same bits); 0: every replica keeps them, unless planner budget finds no plan
    that fits."""

    parallel: Annotated[dict[str, int] | None, BeforeValidator(Divisors.plain)] = None
    """How another system divides each stage, for planning and export alone: tensor, context, expert, data, and zero=0
    to 3, what its replicas share; such as tensor=4,expert=8,data=2,zero=1. A stage is tensor x context x data cards.
    null: one card."""

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

    stages_per_rank: _Count | list[_Count] | Literal["auto"] | None = None
    """Stages of every rank, which the stages go round: a number, a list with one per rank, or auto: of 1, 2, 4, ... the
    number with the shortest step that fits. null: 2 for the schedule interleaved, else 1."""

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
    """Most bytes of the host tier for each worker: a size such as 64GiB, 0 (nothing is offloaded), or null for no
    limit."""

    bandwidth: Annotated[int | None, BeforeValidator(_rate)] = None
    """Bytes in a second, such as 10Gbit, of every link between two devices, for the planner alone; null: bytes take no
    time."""

    node_bandwidth: Annotated[int | None, BeforeValidator(_rate)] = None
    """Bytes in a second between two cards of one node, for the messages within a stage of parallel; null: those of
    bandwidth."""

    latency: Annotated[float, BeforeValidator(_latency)] = 0.0
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

    @field_serializer("capacity", "host_capacity", "bandwidth", "node_bandwidth", "host_bandwidth", when_used="json")
    def _with_units(self, value: Any) -> Any:
        return units.with_unit(value)

    @property
    def planner_is_default(self) -> bool:
        """True where the config leaves the planner open."""
        return self._is_default

    def settle_planner(self, name: str) -> None:
        """Name the planner that the config leaves open."""
        self.planner, self._is_default = name, True

    @property
    def divisors(self) -> Divisors | None:
        """`parallel`; None where a stage is one card."""
        return Divisors.of(self.parallel)

    @property
    def rounds(self) -> int:
        """Number of times that the stages go round the devices of a pipeline; where that is open, the default."""
        count = self.stages_per_rank
        if isinstance(count, list):
            return max(count)
        if self.cuts is not None:
            return max(1, len(self.cuts) // self.devices)
        if isinstance(count, int):
            return count
        return defaults.STAGES_PER_RANK if self.schedule == "interleaved" or count is not None else 1

    @model_validator(mode="after")
    def _agree(self) -> Pipeline:
        cuts = self.cuts
        if cuts is not None and self.plan is not None:
            raise ValueError(
                f"pipeline.cuts={cuts} and pipeline.plan={self.plan} are both given; leave one of them out"
            )
        if cuts is not None:
            fields.cut_list(cuts, None, "pipeline.cuts")
        parallel.check_stages(self.stages_per_rank, cuts, self.devices)
        parallel.check_pipeline(
            self.divisors, self.devices, self.node_devices, self.replicas, self.node_bandwidth is not None
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
    """Conditions under which the costs of the layers are measured or estimated."""

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

    grains: list[Annotated[int, Field(gt=1)]] = Field(default_factory=list)
    """Microbatches, other than 1, that a stage may take in one call (`stages[].grain` of docs/plans.md): an ordinary
    model is captured for calls of these sizes, an estimate has runs of them, and planner graphpipe chooses among them.
    Those of a pipeline.plan are added."""

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
        parallel.check_samples(self.pipeline.divisors, self.train.minibatch_size, self.train.microbatch_size)
        if self.pipeline.zero:
            parallel.check_shared_states(self.pipeline.plan, replicas, self.elastic.enabled, self.engine)
        blocks = self.train.accumulation_blocks
        if blocks is None and self.pipeline.plan is not None:
            return self  # the plan decides the blocks
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
        """Microbatches of one optimizer step, over all replicas; with pipeline.parallel, per card of its `data`."""
        divisors = self.pipeline.divisors
        return self.train.minibatch_size // (self.train.microbatch_size * (divisors.data if divisors else 1))

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
        """File from which this config was read, for error messages; None for a config made in code."""
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
