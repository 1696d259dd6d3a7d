"""The keys of a config's `train` section: how long, in which portions, and how the parameters are stepped."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, field_serializer, model_validator

from varuna_capslog.config.section import FUNCTION, Section

__all__ = ["ParameterGroup", "Train"]


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
        """Return whether the group applies to a parameter of this address with this number of dimensions."""
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
    the same interface. It must treat each parameter by itself."""

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

    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """bfloat16 and float16 run layers under autocast, float16 with a loss scale; weights, sums and the optimizer stay
    float32, unless weights and moments say otherwise."""

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
        others = {"weights": self.weights, "moments": self.moments}
        return ", ".join([self.precision, *(f"{name} {kind}" for name, kind in others.items() if kind != "float32")])

    @model_validator(mode="after")
    def _agree(self) -> Train:
        if self.epochs is None and self.max_steps is None and self.max_seconds is None:
            self.epochs = 1
        if self.minibatch_size % self.microbatch_size:
            raise ValueError(
                f"train.minibatch_size={self.minibatch_size} is not divisible by "
                f"train.microbatch_size={self.microbatch_size}; choose sizes that divide"
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
