"""Configs: which load, which are refused and with which message, and that every shipped config is valid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_capslog.base.errors import ConfigError
from varuna_capslog.config.reading import Config, dump_config, load_config, section
from varuna_capslog.config.settings import Elastic, Section
from varuna_capslog.model.workload import load_workload

GIB = 2**30
CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text("workload: a.b:c\n" + text)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_follow_the_reference_training(tmp_path):
    config = load_config(write(tmp_path, ""))
    assert (config.train.lr, config.train.weight_decay, config.train.clip_norm) == (1e-4, 1e-4, 0.1)
    assert (config.pipeline.planner, config.pipeline.schedule, config.pipeline.stage_inputs) == (
        "budget",
        "auto",
        "host",
    )
    assert config.pipeline.recompute is True
    assert config.run_dir == Path("runs/run")
    assert config.source == str(tmp_path / "run.yaml")


def test_overrides_are_yaml_and_the_last_one_counts(tmp_path):
    path = write(tmp_path, "train: {lr: 1e-4}\n")
    config = load_config(
        path,
        [
            "train.lr=5e-4",
            "train.epochs=3",
            "train.epochs=4",
            "pipeline.cuts=[0, 4]",
            "pipeline.recompute=false",
            "model.backbone=resnet18",
            "model.deep.key=null",
            "init_skip=[class_embed]",
            "run_dir=/tmp/x=y",
        ],
    )
    assert (config.train.lr, config.train.epochs) == (5e-4, 4)
    assert (config.pipeline.cuts, config.pipeline.recompute) == ([0, 4], False)
    assert config.model == {"backbone": "resnet18", "deep": {"key": None}}
    assert (config.init_skip, config.run_dir) == (["class_embed"], Path("/tmp/x=y"))


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("1E3", 1000.0), ("2.5e+2", 250.0), (".5", 0.5), ("1.", 1.0), ("2", 2.0)]
)
def test_numbers_are_read_as_people_write_them(tmp_path, text, value):
    assert load_config(write(tmp_path, f"train: {{lr: {text}}}\n")).train.lr == value


@pytest.mark.parametrize("text", ["2001-1-1", "12:30", "12:30.5", "010", "1_000", "0x10", "1e", "e3"])
def test_what_yaml_of_old_took_for_numbers_and_dates_is_text(tmp_path, text):
    assert load_config(write(tmp_path, f"model: {{key: {text}}}\n")).model == {"key": text}


@pytest.mark.parametrize(
    "text", ["1e3", "12:30", "2001-01-01", "010", "null", "yes", "", "a: b", "\u0085", "\n x", "ü"]
)
def test_text_that_looks_like_something_else_survives_a_dump(tmp_path, text):
    """The resolved config of a run did not read back: U+0085 came back as a space, "1e3" as a number."""
    path = tmp_path / "config.yaml"
    path.write_text(
        dump_config(section(Config, {"workload": "a:b", "model": {"key": text, text: 1}}, "")), encoding="utf-8"
    )
    assert load_config(path).model == {"key": text, text: 1}


@pytest.mark.parametrize("key", ["recompute", "stage_inputs"])
def test_a_key_that_says_auto_means_what_leaving_it_out_means(tmp_path, key):
    """The documented defaults of both keys were refused. A value, also the one that auto stands for, still decides
    which planner is used. A small capacity in bytes survives a dump.
    """
    auto = load_config(write(tmp_path, f"pipeline: {{{key}: auto, capacity: 9B, host_capacity: 2kB}}\n"))
    plain = load_config(write(tmp_path, "pipeline: {capacity: 9B, host_capacity: 2kB}\n"))
    assert auto == plain
    assert (auto.pipeline.planner, auto.pipeline.planner_is_default) == ("budget", True)
    value = getattr(auto.pipeline, key)
    bound = load_config(write(tmp_path, f"pipeline: {{{key}: {str(value).lower()}}}\n"))
    assert bound.pipeline.planner == "exact"
    assert load_config(write(tmp_path, f"pipeline: {{{key}: auto}}\n"), [f"pipeline.{key}={value}"]).pipeline == (
        bound.pipeline
    )
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(auto))
    assert load_config(path).model_dump() == auto.model_dump()


def test_sections_whose_lines_are_commented_out_are_empty(tmp_path):
    config = load_config(write(tmp_path, "train:\n#  epochs: 3\nmodel:\nelastic:\n"))
    assert (config.train.epochs, config.elastic) == (1, Elastic())


def test_what_only_a_run_with_changing_members_needs_is_asked_of_no_other(tmp_path):
    text = "engine: varuna\npipeline: {transport: nccl}\nelastic: {redundancy: 2, protection: async}\n"
    config = load_config(write(tmp_path, text))
    assert (config.elastic.enabled, config.elastic.redundancy, config.elastic.protection) == (False, 2, "async")


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("train: {epoch: 3}", "train.epoch is not a known key; did you mean train.epochs?"),
        ("trian: {epochs: 3}", "trian is not a known key; did you mean train?"),
        ("minibatch_size: 4", "minibatch_size is not a known key; did you mean train.minibatch_size?"),
        ("pipeline: {device: 2}", "pipeline.device is not a known key; did you mean pipeline.devices or device?"),
        ("pipeline: {capacity: 16}", "pipeline.capacity is 16, without a unit; write 16GiB or 16MiB, or 16B for bytes"),
        ("pipeline: {host_capacity: '64'}", "pipeline.host_capacity is 64, without a unit; write 64GiB"),
        ("train: {capacity: 1GiB}", "train.capacity is not a known key; did you mean pipeline.capacity?"),
        ("zzz: 1", "zzz is not a known key; known keys: workload, model, data, train"),
        (
            "train: {epochs: three}",
            'train.epochs is "three" but must be a valid integer (Passes over the training data',
        ),
        ("train: {epochs: '3'}", 'train.epochs is "3" but must be a valid integer'),
        ("train: {epochs: true}", "train.epochs is true but must be a valid integer"),
        ("train: {epochs: 2.5}", "train.epochs is 2.5 but must be a valid integer"),
        ("train: {epochs: 0}", "train.epochs is 0 but must be greater than 0"),
        ("train: {lr: .nan}", "train.lr is NaN but must be a finite number"),
        ("train: {lr_multipliers: {backbone: x}}", 'train.lr_multipliers.backbone is "x" but must be a valid number'),
        ("train: 3", "train is 3 but must be a section of keys"),
        ("pipeline: {recompute: 1}", "pipeline.recompute is 1 but must be a valid boolean"),
        ("pipeline: {schedule: 1f1c}", "pipeline.schedule is \"1f1c\" but must be 'gpipe', '1f1b', '1f1b-star', 'in"),
        ("pipeline: {cuts: [0, x]}", 'pipeline.cuts[1] is "x" but must be a valid integer'),
        ("pipeline: {cuts: [1, 2]}", "pipeline.cuts is [1, 2]; it must begin with 0"),
        ("pipeline: {cuts: [0, 2, 2, 3]}", "pipeline.cuts is [0, 2, 2, 3]; 2 follows 2, but cuts must rise"),
        ("pipeline: {cuts: [0, 2, 5]}", "3 stages for pipeline.devices=2"),
        ("pipeline: {capacity: 16G}", "16GiB"),
        ("pipeline: {capacity: [1GiB, huge]}", "pipeline.capacity[1] is 'huge'"),
        ("pipeline: {capacity: [1GiB]}", "lists 1 size(s) for pipeline.devices=2"),
        ("pipeline: {speeds: [1]}", "pipeline.speeds lists 1 number(s) for pipeline.devices=2; give one per device"),
        ("pipeline: {speeds: [1, 0]}", "pipeline.speeds[1] is 0"),
        ("pipeline: {speeds: [1, 1.5]}", "pipeline.speeds[1] is 1.5"),
        ("pipeline: {devices: 4, node_devices: 3}", "pipeline.node_devices=3 does not divide pipeline.devices=4"),
        ("pipeline: {replicas: 3}", "pipeline.replicas=3 does not divide the 8 microbatches"),
        ("profile: {image_size: [800]}", "profile.image_size is [800] but must have 2 entries"),
        ("profile: {image_size: [800, 0]}", "profile.image_size[1] is 0 but must be greater than 0"),
        ("elastic: {redundancy: -1}", "elastic.redundancy is -1 but must be greater than or equal to 0"),
        ("elastic: {protection: none}", "elastic.protection is \"none\" but must be 'sync' or 'async'"),
        ("elastic: {hang_seconds: 0}", "elastic.hang_seconds is 0 but must be greater than 0"),
        ("elastic: {min_devices: 0}", "elastic.min_devices is 0 but must be greater than 0"),
        ("elastic: {enabled: 1}", "elastic.enabled is 1 but must be a valid boolean"),
        ("elastic: {lease_second: 1}", "elastic.lease_second is not a known key; did you mean elastic.lease_seconds?"),
        ("engine: varuna\nelastic: {enabled: true}", "elastic.enabled=true but engine=varuna"),
        ("pipeline: {transport: ncl}", "'ncl' is none of gloo, nccl, or a function"),
        (
            "device: gpu",
            "device=gpu is no type of device; choose auto, cpu, cuda or another accelerator of torch such as",
        ),
        ("device: cuda:0", "such as xpu, without a number: workers take the devices of a"),
        ("train: {minibatch_size: 9, microbatch_size: 2}", "train.minibatch_size=9 is not divisible by"),
        ("train: {minibatch_size: 1000000000}", "train.minibatch_size=1000000000 has 1000000000 microbatches; at most"),
        ("train: {accumulation_blocks: 1000000000}", "train.accumulation_blocks=1000000000 must divide the 8"),
        ("train: {accumulation_blocks: 3}", "train.accumulation_blocks=3 must divide the 8 microbatches"),
        ("train: {accumulation_blocks: 1}\npipeline: {replicas: 2}", "a multiple of pipeline.replicas=2"),
        ("train: {lr_drop_epochs: 1, lr_drop_steps: 1}", "are both set; keep one"),
        ("train: {lr_schedule: cosine, lr_drop_steps: 1}", "train.lr_schedule=cosine and a drop"),
        ("train: {lr_schedule: linear, max_seconds: 1}", "must know its last step"),
        ("train: {weights: bfloat16}", "train.weights=bfloat16 but train.precision=float32: what operations take"),
        ("train: {weights: float16, precision: bfloat16}", "set train.precision=float16, or leave train.weights out"),
        ("train: {moments: float16}", "train.moments is \"float16\" but must be 'float32' or 'bfloat16'"),
        ("train: {loss_scale: 1024}", "train.loss_scale=1024 but train.precision=float32, which needs none"),
        ("train: {precision: float16, loss_scale: 1000}", "train.loss_scale=1000 is no power of two"),
        ("train: {loss_scale: big}", "train.loss_scale is \"big\" but must be 'dynamic' or be a valid number"),
        (
            "train: {parameter_groups: [{match: a}, {matches: b}]}",
            "train.parameter_groups[1].matches is not a known key; did you mean train.parameter_groups[1].match?",
        ),
        ("train: {parameter_groups: [{vectors: 3}]}", "train.parameter_groups[0].vectors is 3 but must be a valid"),
        ("train: {lr: 1}\ntrain: {lr: 2}", "the key 'train' is there twice (line 3, column 1)"),
        ("1: 2", "the key 1 is not text"),
        ("train: [", "not valid YAML"),
        ("model: !!int x", "'x' is not of the type int, or beyond 64 bits (line 2, column 8); mend that line"),
        ("model: !!int ''", "'' is not of the type int, or beyond 64 bits"),
        ("model: !!bool x", "'x' is not of the type bool"),
        ("model: !!float ''", "'' is not of the type float"),
        ("model: {x: 1e400}", "'1e400' is not of the type float, or beyond 64 bits (line 2, column 12)"),
        ("model: {x: 9223372036854775808}", "'9223372036854775808' is not of the type int, or beyond 64 bits"),
        (f"train: {{max_steps: {'9' * 5000}}}", "9' is not of the type int, or beyond 64 bits (line 2, column 20)"),
        ("model: !!timestamp x", "the tag 'tag:yaml.org,2002:timestamp' is unknown or does not fit"),
        ("model: !!map abc", "the tag 'tag:yaml.org,2002:map' is unknown or does not fit"),
        ("model: !!binary aGk=", "the tag 'tag:yaml.org,2002:binary' is unknown"),
        ("model: !!set {a}", "the tag 'tag:yaml.org,2002:set' is unknown"),
        ("model: !!omap [a: 1]", "the tag 'tag:yaml.org,2002:omap' is unknown"),
        ("model: !!python/object/apply:os.system [id]", "the tag 'tag:yaml.org,2002:python/object/apply:os.system'"),
        ("? [a]\n: 1", "the key [...] is not text (line 2, column 3)"),
        ('data: {root: "a\\0b"}', "a NUL character or half of a surrogate pair, which is no text (line 2, column 14)"),
        ('data: {root: "\\ud800"}', "half of a surrogate pair, which is no text (line 2, column 14)"),
        ("data: {root: \x07}", "unacceptable character #x0007"),
        ("model: " + "[" * 101 + "]" * 101, "nested more than 100 deep (line 2, column"),
        ("model: " + "[" * 1000, "nested more than 100 deep"),
        ("model: &a [*a]", "an alias stands inside what it stands for (line 2, column 12)"),
        ("model: *a", "found undefined alias 'a' (line 2, column 8)"),
        ("model: {<<: 5}", "<< merges something without keys (line 2, column 13)"),
        ("model: {<<: [5]}", "<< merges something without keys (line 2, column 14)"),
        ("pipeline: {capacity: 1e30}", "it must be at least one byte, and below 2^63"),
        ("pipeline: {capacity: 1GiB*1000000000}", "behind * must stand how many devices, 1 to 100000"),
        ("pipeline: {devices: 1000000000}", "pipeline.devices is 1000000000 but must be less than or equal to 100000"),
    ],
)
def test_every_mistake_in_a_file_is_one_sentence_naming_file_key_and_rule(tmp_path, yaml, expected):
    path = write(tmp_path, yaml + "\n")
    message = refusal(path)
    assert message.startswith(f"{path}: ")
    assert expected in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.epoch=3", "override 'train.epoch=3': train.epoch is not a known key; did you mean train.epochs?"),
        ("train.epochs=x", "override 'train.epochs=x': train.epochs is \"x\" but must be a valid integer"),
        ("pipeline.capacity=1GiB,x", "override 'pipeline.capacity=1GiB,x'"),
        ("train.minibatch_size=9", "train.minibatch_size=9 is not divisible by train.microbatch_size=2"),
        ("train.epochs", "override 'train.epochs': write key=value"),
        ("=3", "override '=3': write key=value"),
        ("train..epochs=3", "write key=value"),
        ("train.lr.x=3", "train.lr is 0.5, not a section"),
        ("pipeline=4", "pipeline is a section; write a key of it, such as pipeline.devices=4"),
        ("pipeline.bandwidth=1", "pipeline.bandwidth is 1, without a unit; write 1Gbit/s or 1GB/s, or 1B/s"),
        ("model={", "override 'model={': no valid YAML value"),
        (
            "model=!!int ''",
            "no valid YAML value: '' is not of the type int, or beyond 64 bits (line 1, column 1); quote it",
        ),
        ("model={a: &a [*a]}", "no valid YAML value: an alias stands inside what it stands for (line 1, column 9)"),
        ("model." + "a." * 900 + "b=1", "write key=value"),
        ("model.a=" + "[" * 99 + "]" * 99, "no valid YAML value: nested more than 100 deep (line 1, column"),
        ("data.x=\udcff", "no valid YAML value: unacceptable character #xdcff"),
        ("data.\udcff=x", "write key=value"),
    ],
)
def test_a_mistake_in_an_override_names_the_override_not_the_file(tmp_path, override, expected):
    path = write(tmp_path, "train: {lr: 0.5, microbatch_size: 2}\n")
    message = refusal(path, "train.seed=1", override)
    assert expected in message
    assert message.startswith("override ")


def test_of_two_overrides_of_one_key_the_one_that_counts_is_named(tmp_path):
    assert refusal(write(tmp_path, ""), "train.epochs=3", "train.epochs=x").startswith("override 'train.epochs=x'")


def test_aliases_and_merges_are_read_and_stay_apart_from_each_other(tmp_path):
    """A merge was refused as a tag; an override of one key changed every other key that shared its alias."""
    path = write(
        tmp_path,
        "model: {a: &a {x: {y: 1}, z: 1}, b: &b {<<: *a, z: 2}, c: *a}\ndata:\n  <<: [*b, {z: 3, v: 3}]\n  w: 4\n",
    )
    config = load_config(path, ["model.a.x.y=5"])
    assert config.model == {"a": {"x": {"y": 5}, "z": 1}, "b": {"x": {"y": 1}, "z": 2}, "c": {"x": {"y": 1}, "z": 1}}
    assert config.data == {"x": {"y": 1}, "z": 2, "v": 3, "w": 4}


@pytest.mark.parametrize("levels", [7, 9, 40])
def test_what_aliases_stand_for_is_counted(tmp_path, levels):
    """403 bytes took 3.3 GiB and 12 s (seven levels), and one such load ended the process inside pydantic (nine)."""
    rows = [f"  a{n}: &a{n} [{', '.join(9 * [f'*a{n - 1}'])}]\n" for n in range(1, levels)]
    path = write(tmp_path, "model:\n  a0: &a0 [lol]\n" + "".join(rows))
    assert "more than 20000 keys and values, with what aliases stand for (line " in refusal(path)


def test_a_mistake_of_the_file_is_not_blamed_on_an_override(tmp_path):
    path = write(tmp_path, "train: {lr: x}\n")
    assert refusal(path, "train.lr_drop_steps=3").startswith(f"{path}: train.lr is")


def test_files_that_cannot_be_read(tmp_path):
    assert "No such file or directory" in refusal(tmp_path / "none.yaml")
    assert "Is a directory" in refusal(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refusal(tmp_path / "bytes.yaml")
    (tmp_path / "long.yaml").write_text("#" * 300_000)
    assert "holds more than 256 KiB" in refusal(tmp_path / "long.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert "holds a list" in refusal(tmp_path / "list.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert "workload is missing" in refusal(tmp_path / "empty.yaml")


@pytest.mark.parametrize("workload", ["detr", "a.b:", ":c", "a b:c", "a:b:c"])
def test_a_workload_is_module_and_function(tmp_path, workload):
    path = tmp_path / "run.yaml"
    path.write_text(f"workload: {workload!r}\n")
    assert "workload is" in refusal(path)


def test_capacity_has_units_and_one_entry_per_device(tmp_path):
    def capacity(text):
        return load_config(write(tmp_path, "pipeline: {devices: 3}"), [f"pipeline.capacity={text}"]).pipeline.capacity

    assert capacity("16GiB") == 16 * GIB
    assert capacity("16GiB*2,8GiB") == [16 * GIB, 16 * GIB, 8 * GIB]
    assert capacity("[16GiB, 1000B, 2000000]") == [16 * GIB, 1000, 2_000_000]
    assert capacity("null") is None


def test_the_constants_of_a_run_are_resolved(tmp_path):
    path = write(tmp_path, "train: {minibatch_size: 16, microbatch_size: 2}\npipeline: {devices: 3, replicas: 2}\n")
    config = load_config(path)
    assert (config.num_microbatches, config.num_blocks, config.world_size) == (8, 2, 6)
    assert config.train.accumulation_blocks == 2
    assert load_config(path, ["train.accumulation_blocks=4"]).num_blocks == 4


@pytest.mark.parametrize(
    ("train", "epochs"), [("{}", 1), ("{max_steps: 5}", None), ("{max_seconds: 5}", None), ("{epochs: 2}", 2)]
)
def test_a_run_without_any_length_is_one_epoch(tmp_path, train, epochs):
    assert load_config(write(tmp_path, f"train: {train}\n")).train.epochs == epochs


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_we_ship_loads_and_its_dump_loads_equal(path, tmp_path):
    config = load_config(path)
    dumped = tmp_path / "config.yaml"
    dumped.write_text(dump_config(config))
    assert load_config(dumped).model_dump() == config.model_dump()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_we_ship_has_known_model_and_data_keys(path):
    from detr_pipeline.config import ModelConfig
    from detr_pipeline.data import DataConfig
    from detr_pipeline.rt_detr.chain import RtDetrModel

    config = load_config(path)
    model = {"detr_pipeline:workload": ModelConfig, "detr_pipeline.rt_detr:workload": RtDetrModel}[config.workload]
    section(model, config.model, "model")
    section(DataConfig, config.data, "data")


PAPER = {
    "rn50_e6": ("resnet50", 6, False),
    "rn50_d_e6": ("resnet50", 6, True),
    "rn101_e6": ("resnet101", 6, False),
    "rn101_d_e6": ("resnet101", 6, True),
    "rn101_e12": ("resnet101", 12, False),
    "rn101_d_e12": ("resnet101", 12, True),
}


def test_the_paper_configs_fix_what_decides_memory():
    configs = {path.stem: load_config(path) for path in CONFIGS if path.parent.name == "paper"}
    assert configs.keys() == PAPER.keys()
    for name, config in configs.items():
        model = config.model
        assert (model["backbone"], model["encoder_layers"], model["dilation"]) == PAPER[name]
        assert (model["decoder_layers"], model["num_classes"]) == (6, 91)
        assert (model["attention"], model["cut_points"]) == ("eager", "heads_last")
        assert (config.profile.image_size, config.profile.device) == ([1333, 1333], "cuda")
        assert (config.train.minibatch_size, config.train.microbatch_size) == (8, 1)
        assert (config.train.precision, config.pipeline.recompute) == ("float32", True)
        assert (config.pipeline.devices, config.pipeline.stage_inputs) == (8, "host")


TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)


@settings(deadline=None, max_examples=50)  # a busy machine is no defect
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "lr": st.floats(1e-12, 1e3),
            "seed": st.integers(0, 2**40),
            "lr_multipliers": st.dictionaries(TEXT, st.floats(-1e3, 1e3, allow_subnormal=False), max_size=3),
            "precision": st.sampled_from(["float32", "bfloat16", "float16"]),
            "max_seconds": st.none() | st.floats(0.1, 1e6),
        },
    ),
    st.dictionaries(TEXT, st.none() | st.booleans() | st.integers(-(2**62), 2**62) | TEXT, max_size=4),
)
def test_any_config_survives_the_way_through_a_file(tmp_path_factory, train, model):
    config = section(Config, {"workload": "a:b", "train": train, "model": model}, "")
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path).model_dump() == config.model_dump()


class Inner(Section):
    """A subsection of a workload's own section."""

    width: int = 1
    """Channels."""


class Outer(Section):
    """A workload's own section."""

    depth: int
    """Number of blocks."""

    root: Path | None = None
    sizes: tuple[int, int] = (1, 2)
    inner: Inner | None = None


def test_a_workload_checks_its_section_in_the_same_words():
    assert section(Outer, {"depth": 2, "root": "/x", "sizes": [3, 4]}, "data") == Outer(
        depth=2, root=Path("/x"), sizes=(3, 4)
    )
    for values, expected in (
        ({"dept": 2}, "data.dept is not a known key; did you mean data.depth?"),
        ({"depth": "2"}, 'data.depth is "2" but must be a valid integer (Number of blocks)'),
        ({}, "data.depth is missing; set it (Number of blocks)"),
        ({"depth": 1, "inner": {"widht": 3}}, "data.inner.widht is not a known key; did you mean data.inner.width?"),
        ({"depth": 1, "inner": {"width": None}}, "data.inner.width is null but must be a valid integer (Channels)"),
    ):
        with pytest.raises(ConfigError) as caught:
            section(Outer, values, "data")
        assert str(caught.value) == expected


WORKLOADS = """
from varuna_capslog.config.reading import section
from varuna_capslog.config.settings import Section
from varuna_capslog.model.workload import Workload

class Model(Section):
    depth: int = 1

class Good(Workload):
    def build_chain(self): ...
    def loss(self, outputs, targets, normalisers): ...
    def profile_inputs(self, microbatch_size): ...

def workload(config):
    section(Model, config.model, "model")
    return Good()

def nothing(config):
    return 3

def broken(config):
    return 1 // 0
"""


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        ("no_such_module_x:f", "there is no module 'no_such_module_x'"),
        ("workloads_of_test.py:f", "a module is named without .py: write workloads_of_test:f"),
        ("workloads_of_test.sub:f", "there is no module 'workloads_of_test.sub'"),
        ("workloads_of_test:worklod", "has no function 'worklod'; did you mean 'workload'?"),
        ("workloads_of_test:nothing", "returned int; it must return a varuna_capslog.model.workload.Workload"),
        ("needs_of_test:f", "needs the module 'no_such_library_x', which is not installed"),
        # These ended as "unexpected TypeError ... this is a defect", and sys.exit ended the command without a message.
        ("os:system", "failed with TypeError"),
        ("workloads_of_test:broken", "failed with ZeroDivisionError"),
        ("sys:exit", "failed with SystemExit"),
    ],
)
def test_a_workload_that_cannot_be_built_is_one_sentence(tmp_path, monkeypatch, workload, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "workloads_of_test.py").write_text(WORKLOADS)
    (tmp_path / "needs_of_test.py").write_text("import no_such_library_x\n")
    path = tmp_path / "run.yaml"
    path.write_text(f"workload: {workload}\n")
    with pytest.raises(ConfigError) as caught:
        load_workload(load_config(path))
    assert expected in str(caught.value)
    assert str(caught.value).startswith(f"{path}: workload={workload!r}")


def test_a_workload_that_refuses_its_section_names_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "workloads_of_test.py").write_text(WORKLOADS)
    path = tmp_path / "run.yaml"
    path.write_text("workload: workloads_of_test:workload\nmodel: {dept: 3}\n")
    with pytest.raises(ConfigError) as caught:
        load_workload(load_config(path))
    assert str(caught.value) == f"{path}: model.dept is not a known key; did you mean model.depth?"
    assert load_workload(load_config(path, ["model={}"])).name == "model"


def test_reading_a_config_imports_no_torch():
    code = "import sys, varuna_capslog.config.reading; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
