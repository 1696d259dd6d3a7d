"""Chains from modules with branches: parallel branches stay parallel, and the numbers equal the module's.

The edges of every graph here are written by hand, by reading the model's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.model.test_capture import assert_same, gradients, outputs_of, set_mode, tokens
from tests.sweeps import some
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain

torch.set_num_threads(1)
DIM = 8


def edges(chain: Chain) -> set[str]:
    """Return the edges as `writer > reader`, by the layers' names."""
    names = [layer.name for layer in chain.layers]
    return {f"{names[writer]} > {names[reader]}" for writer, reader in chain.edges}


def line(*names: str) -> set[str]:
    return {f"{writer} > {reader}" for writer, reader in pairwise(names)}


def into(reader: str, *writers: str) -> set[str]:
    return {f"{writer} > {reader}" for writer in writers}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.norm = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        scores = self.query(x) @ x.transpose(1, 2)
        if padding is not None:
            scores = scores.masked_fill(padding[:, None], -1e9)
        return self.norm(x + self.dropout(scores.softmax(-1) @ self.value(x)))


class Towers(nn.Module):
    """Two towers like CLIP's: the image's tower runs before the text's, and the two projections run after both."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.words = nn.Linear(3, DIM), nn.Embedding(16, DIM)
        self.image, self.text = (nn.ModuleList([Block() for _ in range(depth)]) for depth in (3, 2))
        self.image_out, self.text_out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, pixels: Tensor, ids: Tensor) -> dict[str, Tensor]:
        image = self.patches(pixels)
        for block in self.image:
            image = block(image)
        text, padding = self.words(ids), ids == 0
        for block in self.text:
            text = block(text, padding)
        image, text = self.image_out(image.mean(1)), self.text_out(text.mean(1))
        return {"logits": F.normalize(image, dim=1) @ F.normalize(text, dim=1).T * self.scale.exp(), "image": image}


class EmbeddedFirst(Towers):
    """Towers whose embeddings, and the mask of the text, are computed before the first tower begins."""

    def forward(self, pixels: Tensor, ids: Tensor) -> dict[str, Tensor]:
        padding = ids == 0
        image, text = self.patches(pixels), self.words(ids)
        for block in self.image:
            image = block(image)
        for block in self.text:
            text = block(text, padding)
        image, text = self.image_out(image.mean(1)), self.text_out(text.mean(1))
        return {"logits": F.normalize(image, dim=1) @ F.normalize(text, dim=1).T * self.scale.exp(), "image": image}


IMAGE, TEXT = [f"image.{i}" for i in range(3)], [f"text.{i}" for i in range(2)]


def towers_inputs() -> dict[str, Tensor]:
    ids = torch.randint(1, 16, (2, 5), generator=torch.Generator().manual_seed(1))
    ids[1, 3:] = 0
    return {"pixels": torch.randn(2, 4, 3), "ids": ids}


@pytest.mark.parametrize("automatic", [True, False])
def test_two_towers_have_no_edge_between_them(automatic: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Towers(), towers_inputs()
    chain = Chain.from_module(model, None if automatic else [*IMAGE, *TEXT], inputs)
    assert [layer.name for layer in chain.layers][:7] == ["patches", *IMAGE, "words", *TEXT]
    expected = line("patches", *IMAGE, "image_out", "join") | line("words", *TEXT) | into("text.1", "words")
    # an automatic cut also lies after the last block if weights follow it; a given cut does not
    expected |= line("text.1", "text_out", "join") if automatic else line("text.1", "join")
    assert edges(chain) == expected
    for training in (True, False):
        assert_same(model, chain, inputs, training, 1e-6)


@pytest.mark.parametrize("automatic", [True, False])
def test_embeddings_that_run_first_are_layers_of_their_own_towers(automatic: bool) -> None:
    torch.manual_seed(0)
    model, inputs = EmbeddedFirst(), towers_inputs()
    chain = Chain.from_module(model, None if automatic else [*IMAGE, *TEXT], inputs, evaluates=False)
    expected = line("patches", *IMAGE, "image_out", "join") | line("words", *TEXT) | into("text.1", "words")
    expected |= line("text.1", "text_out", "join") if automatic else line("text.1", "join")
    assert edges(chain) == expected
    assert_same(model, chain, inputs, True, 1e-6)


class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(16, DIM), nn.Embedding(16, DIM)
        self.encoder = nn.ModuleList([Block() for _ in range(2)])
        self.decoder = nn.ModuleList([Block() for _ in range(4)])
        self.cross = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(2)])
        self.head = nn.Linear(DIM, 16)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, padding = self.source(source), source == 0
        for block in self.encoder:
            memory = block(memory, padding)
        state = self.target(target)
        for step, cross in enumerate(self.cross):
            state = self.decoder[2 * step](state)  # does not read the encoder's output
            state = self.decoder[2 * step + 1](cross(torch.cat([state, memory], 1)))
        return self.head(state)


def test_a_decoder_waits_for_the_encoder_only_where_it_reads_it() -> None:
    """The first decoder block runs beside the encoder; two concatenations read the encoder's last block."""
    torch.manual_seed(0)
    ids = towers_inputs()["ids"]
    model, inputs = Translation(), {"source": ids, "target": ids.flip(0)}
    decoder = ["decoder.0", "cross.0", "decoder.1", "decoder.2", "cross.1", "decoder.3"]
    chain = Chain.from_module(model, ["encoder.0", "encoder.1", *decoder, "head"], inputs, evaluates=False)
    assert [layer.name for layer in chain.layers] == ["source", "encoder.0", "encoder.1", "target", *decoder, "head"]
    expected = line("source", "encoder.0", "encoder.1") | into("encoder.1", "source")
    # the second concatenation runs after decoder.2, which waits for the encoder anyway
    expected |= line("target", *decoder, "head") | into("cross.0", "encoder.1") | into("decoder.2", "encoder.1")
    assert edges(chain) == expected
    assert_same(model, chain, inputs, True, 1e-6)


def test_a_transformer_s_decoders_all_read_the_encoder() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
    inputs = {"src": torch.randn(2, 5, 8), "tgt": torch.randn(2, 4, 8)}
    chain = Chain.from_module(model, None, inputs)
    decoder = [f"decoder.layers.{i}" for i in range(3)]
    expected = line("encoder.layers.0", "encoder.layers.1", "encoder.norm", *decoder, "decoder.norm")
    assert edges(chain) == expected | into(decoder[1], "encoder.norm") | into(decoder[2], "encoder.norm")
    assert_same(model, chain, inputs, False, 1e-5)


class Convolution(nn.Module):
    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, size, padding=size // 2, bias=False)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


class Branches(nn.Module):
    """Block like Inception's, with a branch of two layers that forks once more."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.short, self.pool = Convolution(channels, 1), Convolution(channels, 1)
        self.deep_1, self.deep_2, self.deep_3 = Convolution(channels, 1), Convolution(4, 3), Convolution(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        short, deep = self.short(x), self.deep_1(x)
        deep = torch.cat([self.deep_2(deep), self.deep_3(deep)], 1)
        return torch.cat([short, deep, self.pool(F.avg_pool2d(x, 3, 1, 1))], 1)


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = Convolution(3, 3), Branches(4), Branches(16)
        self.extra, self.tail, self.head = nn.Linear(16, 3), Convolution(16, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.b(self.a(self.stem(x)))
        extra = self.extra(x.mean((2, 3)))
        return {"output": self.head(self.tail(x).mean((2, 3))), "extra": extra}


def block_edges(before: str, block: str, after: Sequence[str]) -> set[str]:
    """Return the edges of a block whose result one or more layers read; only the outer concatenation reads the inner
    one.
    """
    branches = [f"{block}.{name}" for name in ("short", "deep_2", "deep_3", "pool")]
    edges = line(before, f"{block}.short") | line(before, f"{block}.pool") | line(before, f"{block}.deep_1")
    edges |= line(f"{block}.deep_1", f"{block}.deep_2") | line(f"{block}.deep_1", f"{block}.deep_3")
    return edges.union(into(block, *branches), *(line(block, reader) for reader in after))


def test_every_branch_of_an_inception_block_is_found() -> None:
    torch.manual_seed(0)
    model, inputs = Inception(), {"x": torch.randn(2, 3, 6, 6)}
    chain = Chain.from_module(model, None, inputs)
    expected = block_edges("stem", "a", ()) | block_edges("a", "b", ("extra", "tail"))
    assert edges(chain) == expected | line("tail", "head") | into("head", "extra")  # the loss reads what `extra` writes
    for training in (True, False):
        assert_same(model, chain, inputs, training, 1e-5)


def test_given_cuts_inside_one_branch_leave_the_rest_of_the_block_together() -> None:
    torch.manual_seed(0)
    model, inputs = Inception(), {"x": torch.randn(2, 3, 6, 6)}
    chain = Chain.from_module(model, ["a", "a.pool", "tail"], inputs, evaluates=False)
    assert edges(chain) == line("stem", "a", "a.pool", "tail")  # the remaining layers of the block are not cut
    assert_same(model, chain, inputs, True, 1e-5)


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(5, DIM), nn.ReLU(inplace=True))
        self.tables = nn.ModuleList([nn.Embedding(20, DIM) for _ in range(3)])
        self.top = nn.Sequential(nn.Linear(DIM + 6, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        together = torch.stack([x, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        first, second = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, (together @ together.transpose(1, 2))[:, first, second]], 1))


def test_tables_and_dense_tower_of_a_recommender_meet_in_the_top() -> None:
    torch.manual_seed(0)
    model, inputs = Recommender(), {"dense": torch.randn(4, 5), "ids": torch.randint(0, 20, (4, 3))}
    tables = [f"tables.{i}" for i in range(3)]
    chain = Chain.from_module(model, ["bottom", *tables, "top"], inputs, evaluates=False)
    assert edges(chain) == into("top", "bottom", *tables)
    assert_same(model, chain, inputs, True, 1e-6)
    assert edges(Chain.from_module(model, None, inputs, evaluates=False)) == (
        line("bottom.0", "bottom.1", "top.0", "top.1", "top.2") | into("top.0", *tables)
    )


def test_cuts_inside_a_block_wait_for_each_other_only_where_they_read_each_other() -> None:
    torch.manual_seed(0)
    model, inputs = Inception(), {"x": torch.randn(2, 3, 6, 6)}
    chain = Chain.from_module(model, ["a", "a.deep_1", "a.deep_2", "a.pool", "tail"], inputs, evaluates=False)
    expected = line("stem", "a") | line("stem", "a.deep_1", "a.deep_2") | line("stem", "a.pool")
    # deep_3 runs after deep_2; the block's concatenation and all of block b lie between the branches and the tail
    chain_edges = edges(chain)
    assert expected <= chain_edges
    assert not {f"{cut} > a.pool" for cut in ("a", "a.deep_1", "a.deep_2")} & chain_edges
    assert not {"a > a.deep_1", "a > a.deep_2"} & chain_edges
    assert_same(model, chain, inputs, True, 1e-5)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.change, self.last = nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        before = self.before(x * 1.5)  # x before the change
        changed = self.change(x)
        return self.last(self.after(x * 0.5) + before + changed)  # x after the change


class InPlaceBeforeItsReader(InPlace):
    """A module that does not wait for the change uses a value that was computed before it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        before = self.before(x * 2)
        read = x * 1.5
        changed = self.change(x)
        return self.last(before + self.after(read) + changed)


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [(InPlace, ["before", "change", "after", "last"]), (InPlaceBeforeItsReader, ["before", "after", "last"])],
)
def test_a_branch_that_changes_what_another_one_reads_comes_after_it(kind: type[InPlace], cuts: list[str]) -> None:
    torch.manual_seed(0)
    model, inputs = kind(), {"x": torch.randn(3, 4)}
    chain = Chain.from_module(model, cuts, inputs, evaluates=False)
    assert_same(model, chain, inputs, True, 1e-6)


class Drawn(nn.Module):
    """Random graph: every module reads the sum of one to three earlier values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = Random(seed)
        count = random.randint(4, 14)
        self.parts = nn.ModuleList([nn.Linear(4, 4) for _ in range(count)])
        # value 0 is the input; module i writes value i + 1
        self.reads = [sorted(random.sample(range(i + 1), random.randint(1, min(3, i + 1)))) for i in range(count)]
        self.cuts = sorted(random.sample(range(count), random.randint(1, count)))

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for part, reads in zip(self.parts, self.reads, strict=True):
            values.append(torch.tanh(part(sum(values[read] for read in reads))))
        unread = set(range(1, len(values))) - {read for reads in self.reads for read in reads}
        return torch.stack([values[value] for value in sorted(unread)]).sum(0)

    def waits(self) -> dict[int, set[int]]:
        """Return a mapping: cut module -> the cut modules that it waits for."""
        behind: list[set[int]] = [set()]
        for reads in self.reads:
            behind.append(set().union(*(behind[read] | {read - 1} for read in reads)) - {-1})
        return {cut: behind[cut + 1] & set(self.cuts) for cut in self.cuts}


@pytest.mark.parametrize("seed", some(range(25), 8))
def test_in_any_graph_a_cut_point_waits_for_those_that_the_module_makes_it_wait_for(seed: int) -> None:
    torch.manual_seed(seed)
    model, inputs = Drawn(seed), {"x": torch.randn(3, 4)}
    chain = Chain.from_module(model, [f"parts.{cut}" for cut in model.cuts], inputs, evaluates=False)
    behind: list[set[int]] = []
    for values in chain.reads[:-1]:
        writers = {value.writer for value in values} - {-1}
        behind.append(writers.union(*(behind[writer] for writer in writers)))
    number = {layer.name: index for index, layer in enumerate(chain.layers)}
    for cut, waits in model.waits().items():
        position = number[f"parts.{cut}"]
        assert {cut for cut in model.cuts if number[f"parts.{cut}"] in behind[position]} == waits
    assert_same(model, chain, inputs, True, 1e-5)


def assert_same_to_rounding(model: nn.Module, chain: Chain, inputs: dict[str, Tensor]) -> None:
    """Compare outputs and gradients in training, with equal dropout, also for a module that returns a named tuple."""
    set_mode(chain, True)
    torch.manual_seed(7)
    result = model.train()(**inputs)
    expected = outputs_of(result._asdict() if hasattr(result, "_asdict") else result)
    wanted = gradients(expected, model)
    torch.manual_seed(7)
    outputs = chain.run(inputs)
    assert outputs.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(outputs[name], tensor, rtol=0, atol=1e-6 * float(tensor.detach().abs().max())), name
    chain_gradients = gradients(outputs, model)
    assert chain_gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float((gradient - chain_gradients[name]).abs().max()) <= 1e-5 * max(float(gradient.abs().max()), 1e-3), (
            name
        )


def clip() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    words = {"vocab_size": 61, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.CLIPConfig(
        text_config={**shape, **words, "num_hidden_layers": 2},
        vision_config={**shape, "num_hidden_layers": 3, "image_size": 16, "patch_size": 8},
        projection_dim=24,
        attn_implementation="eager",
    )
    ids = tokens()
    ids[:, -1] = 2
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16), "attention_mask": torch.ones_like(ids)}
    return transformers.CLIPModel(config), inputs


@pytest.mark.parametrize("with_loss", [True, False])
def test_clip_s_towers_have_no_edge_between_them(with_loss: bool) -> None:
    torch.manual_seed(0)
    model, inputs = clip()
    text, image = ([f"{tower}_model.encoder.layers.{i}" for i in range(n)] for tower, n in (("text", 2), ("vision", 3)))
    outputs = [*(["loss"] if with_loss else []), "logits_per_image", "logits_per_text", "text_embeds", "image_embeds"]
    example = {**inputs, "return_loss": with_loss}
    mask = into(text[1], "text_model.embeddings")
    if not with_loss:
        chain = Chain.from_module(model, [*text, *image], example, outputs=outputs, evaluates=False)
        expected = line("vision_model.embeddings", *image, "join") | line("text_model.embeddings", *text, "join")
        assert edges(chain) == expected | mask
        assert_same(model, chain, inputs, True, 1e-5)
        return
    chain = Chain.from_module(model, None, example, outputs=outputs)
    expected = line("vision_model.embeddings", *image, "vision_model", "join") | mask
    expected |= line("text_model.embeddings", *text, "text_model.final_layer_norm", "join")
    assert edges(chain) - into("text_model.final_layer_norm", "text_model.embeddings") == expected
    model.eval()
    set_mode(chain, False)
    loss, expected_loss = chain.run({name: inputs[name] for name in chain.inputs})["loss"], model(**example).loss
    assert torch.equal(loss, expected_loss)


@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_encoder_decoders_of_transformers_equal_their_chains(kind: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    inputs: dict[str, Tensor]
    if kind == "t5":
        config = transformers.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4, vocab_size=61,
            decoder_start_token_id=0, attn_implementation="eager",
        )  # fmt: skip
        model = transformers.T5ForConditionalGeneration(config)
        inputs = {"input_ids": tokens(), "decoder_input_ids": tokens()[:, :9]}
        encoder, decoder = [f"encoder.block.{i}" for i in range(2)], [f"decoder.block.{i}" for i in range(3)]
        first, middle, last = "encoder.embed_tokens", "encoder.final_layer_norm", "decoder.final_layer_norm"
        bias = into(encoder[1], encoder[0]) | into(decoder[1], decoder[0]) | into(decoder[2], decoder[0])
    else:
        config = transformers.WhisperConfig(
            d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=61, num_mel_bins=8, max_source_positions=10,
            max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
            attn_implementation="eager",
        )  # fmt: skip
        model = transformers.WhisperForConditionalGeneration(config)
        inputs = {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": tokens()[:, :9]}
        encoder, decoder = (
            [f"model.{side}.layers.{i}" for i in range(count)] for side, count in (("encoder", 2), ("decoder", 3))
        )
        first, middle, last = "model.encoder.conv1", "model.encoder.layer_norm", "model.decoder.layer_norm"
        bias = set()
    chain = Chain.from_module(model, None, inputs, evaluates=False)
    expected = line(first, *encoder, middle, *decoder, last) | into(decoder[1], middle) | into(decoder[2], middle)
    # the encoder's output is an output of the model, and the loss stands for the last layer
    assert edges(chain) - into(middle, first) == expected | bias | into(last, middle)
    if kind == "whisper":
        assert_same(model, chain, inputs, True, 1e-5)
    else:  # torch.export gives T5's logits to rounding only, wherever it is cut
        assert_same_to_rounding(model, chain, inputs)


def test_googlenet_equals_its_chain_of_branches() -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model = torchvision.models.googlenet(weights=None, init_weights=False, num_classes=5)
    x = torch.randn(2, 3, 64, 64)
    chain = Chain.from_module(model, None, (x,), evaluates=False)
    chain_edges = edges(chain)
    branches = [f"inception4b.branch{i}" for i in ("1", "2.0", "3.0", "4.0")]
    for begin in [*branches, "aux1"]:
        assert {edge for edge in chain_edges if edge.endswith(f"> {begin}")} == {f"inception4a > {begin}"}
    ends = ["inception4b.branch1", *(f"inception4b.branch{i}.1" for i in (2, 3, 4))]
    assert {edge for edge in chain_edges if edge.endswith("> inception4b")} == into("inception4b", *ends)
    assert_same_to_rounding(model, chain, {"x": x})


def test_blocks_of_inception_v3_are_cut_into_their_branches() -> None:
    inception = pytest.importorskip("torchvision.models.inception")

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a = nn.Conv2d(3, 8, 3), inception.InceptionA(8, 4)
            self.e, self.fc = inception.InceptionE(228), nn.Linear(2048, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.e(self.a(self.stem(x))).mean((2, 3)))

    torch.manual_seed(0)
    model, inputs = Small(), {"x": torch.randn(2, 3, 7, 7)}
    chain = Chain.from_module(model, None, inputs, evaluates=False)
    expected = into("a", "a.branch1x1", "a.branch_pool") | into("fc", "e.branch1x1", "e.branch_pool")
    expected |= line("stem", "a.branch5x5_1", "a.branch5x5_2", "a")
    expected |= line("stem", "a.branch3x3dbl_1", "a.branch3x3dbl_2", "a")
    expected |= line("stem", "a.branch1x1") | line("stem", "a.branch_pool")
    expected |= line("a", "e.branch1x1") | line("a", "e.branch_pool")
    for half in ("a", "b"):
        expected |= line("a", "e.branch3x3_1", f"e.branch3x3_2{half}", "fc")
        expected |= line("a", "e.branch3x3dbl_1", "e.branch3x3dbl_2", f"e.branch3x3dbl_3{half}", "fc")
    assert edges(chain) == expected
    assert_same(model, chain, inputs, True, 1e-5)


def test_a_model_without_lists_or_branches_has_no_automatic_cut_points() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    with pytest.raises(CapslogError, match="name the cut points"):
        Chain.from_module(Plain(), None, (torch.randn(2, 4),))
