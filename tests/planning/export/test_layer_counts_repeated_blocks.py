"""The names of the layers tell the repeated blocks, or are refused."""

from __future__ import annotations

import pytest

from tests.planning.export.models import detr_names, named, names, plan_of, stages_of_blocks
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.names import LayerModules
from varuna_capslog.planning.export.layer_counts import block_counts, block_pattern
from varuna_capslog.planning.export.stage_line import stage_line


@pytest.mark.parametrize(
    ("layers", "pattern"),
    [
        (("transformer", "transformer.h.0", "transformer.h.1", "transformer.ln_f"), "transformer.h.*"),
        (("bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1"), "bert.encoder.layer.*"),
        (("embedding", "block.0", "block.1.attention", "block.1.mlp", "head"), "block.*"),
        (("conv_proj", "encoder.layers.encoder_layer_0", "encoder.ln"), "encoder.layers.encoder_layer_*"),
        (("0", "1", "2"), "*"),
        (("encoder.block.0.layer.0", "encoder.block.0.layer.1"), "encoder.block.*"),
    ],
)
def test_the_list_of_blocks_is_found_among_the_names(layers: tuple[str, ...], pattern: str) -> None:
    assert block_pattern(layers) == pattern


def test_names_that_do_not_tell_it_are_refused() -> None:
    with pytest.raises(CapslogError, match=r"name 2 lists of modules \(encoder\.\*, decoder\.\*\).*--block-names"):
        block_pattern(["stem", "encoder.0", "encoder.1", "decoder.0"])
    with pytest.raises(CapslogError, match=r"name 2 lists of modules \(encoder\.h\.\*, decoder\.h\.\*\)"):
        block_pattern(["encoder.h.0", "decoder.h.0"], "h.*")
    with pytest.raises(CapslogError, match=r"the names of the layers, a, b, name no list of modules"):
        block_pattern(["a", "b"])
    with pytest.raises(CapslogError, match=r"'h', must have one \*"):
        block_pattern(["h.0"], "h")
    with pytest.raises(CapslogError, match=r"no layer's name is of the form 'g\.\*'; the layers are h\.0"):
        block_pattern(["h.0"], "g.*")
    with pytest.raises(CapslogError, match=r"lists of modules \(.*encoder\.\*, decoder\.\*"):
        block_pattern(detr_names().layers)


def counts(layers: tuple[str, ...], *cuts: int, pattern: str | None = None) -> list[int]:
    return block_counts(named(*layers), stage_line(plan_of(*cuts, layers=len(layers)), "X"), "X", pattern)


def test_blocks_of_every_stage_are_counted() -> None:
    layers = ("emb", "drop", "h.0", "h.1.attn", "h.1.mlp", "h.2", "norm", "head")
    assert counts(layers, 0, 3, 5) == [1, 1, 1]
    assert counts(layers, 0, 2, 6) == [0, 3, 0]
    assert counts(("enc.0", "enc.1", "dec.0", "dec.1"), 0, 3, pattern="dec.*") == [1, 1]
    assert counts(("a.h.0", "a.h.1", "out"), 0, 1, pattern="h.*") == [1, 1]
    assert counts(("emb", "h.0", "out"), 0, 2, pattern="h.*") == [1, 0]
    assert block_pattern(["enc.h.0", "dec.h.0"], "dec.h.*") == block_pattern(["x", "dec.h.0"], "h.*") == "dec.h.*"
    assert block_pattern(["a.0.b.0", "a.1.b.0"], "*") == "a.*"
    for cuts in [(0,), (0, 3), (0, 1, 5), (0, 2, 3, 4)]:
        stage_counts = block_counts(names("vit"), stage_line(plan_of(*cuts), "X"), "X")
        assert stage_counts == [len(blocks) for blocks in stages_of_blocks(cuts)]


@pytest.mark.parametrize(
    ("layers", "cuts", "said"),
    [
        (
            ("e", "h.0.a", "h.0.b", "h.1"),
            (0, 2),
            r"between stages 0 and 1 lies in the block 'h\.0', which X",
        ),
        (("e", "f", "h.0", "n"), (0, 1), r"the embedding \(layers e, f\) lies in several stages.*the first stage of X"),
        (("e", "h.0", "n", "o"), (0, 3), r"the head \(layers n, o\) lies in several stages.*the last stage of X"),
        (("e", "h.0", "h.2"), (0, 1), r"no layer is named after the block 'h\.1', but 'h\.2' follows 'h\.0'"),
        (("e", "h.1"), (0, 1), r"no layer is named after the block 'h\.0'"),
        (("h.0", "h.1", "h.0.b"), (0, 1), r"layer 'h\.0\.b' holds the block 'h\.0' behind block 1"),
        (("h.0", "join", "h.1"), (0, 1), r"layer 'join' stands between blocks"),
    ],
)
def test_borders_and_names_that_blocks_do_not_allow(layers: tuple[str, ...], cuts: tuple[int, ...], said: str) -> None:
    with pytest.raises(CapslogError, match=said):
        counts(layers, *cuts)


def test_modules_tell_the_blocks_of_a_layer_that_holds_several() -> None:
    skipping = named("h.0", "h.2", held=(LayerModules(("h.0",)), LayerModules(("h.2",))))
    with pytest.raises(CapslogError, match=r"layer 'h\.2' holds the block 'h\.2' behind block 0 of that list"):
        block_counts(skipping, stage_line(plan_of(0, layers=2), "X"), "X")
    with pytest.raises(CapslogError, match=r"no layer holds a module of the form 'h\.\*'"):
        block_counts(named("h.0", held=(LayerModules(("x",)),)), stage_line(plan_of(0, layers=1), "X"), "X")
    inner = tuple(LayerModules((f"{n}.mlp.0", f"{n}.mlp.1")) for n in range(3))
    assert block_counts(named("0", "1", "2", held=inner), stage_line(plan_of(0, 1, layers=3), "X"), "X") == [1, 2]
    held = tuple(LayerModules((f"h.{2 * n}.mlp", f"h.{2 * n + 1}.mlp")) for n in range(3))
    model_names = named("h.0", "h.2", "h.4", held=held)
    assert block_counts(model_names, stage_line(plan_of(0, 1, layers=3), "X"), "X") == [2, 4]
