"""`plan_decoding` and `decode` as a program calls them."""

from __future__ import annotations

import pytest

import varuna_capslog as capslog
from tests.decoding.test_choice import MODEL
from tests.decoding.worlds import small_model, some_prompts
from varuna_capslog.base.errors import CapslogError


def test_a_plan_from_sizes():
    plan = capslog.plan_decoding(
        MODEL, degree=4, batch=64, length=4096, bandwidth="1GB/s", latency="20us", device="cuda:a100-80gb"
    )
    assert plan.shard == "sequence"
    assert "chosen" in str(plan)
    assert "<table>" in plan._repr_html_()
    small = capslog.plan_decoding(MODEL, degree=4, batch=64, length=4096, bandwidth="1GB/s", capacity="24GiB")
    assert small.shard is None
    assert small.costs[0].device_seconds == 0


def test_a_device_that_is_not_in_the_table():
    with pytest.raises(CapslogError, match="the kind of GPU 'a1' is not in the table"):
        capslog.plan_decoding(MODEL, degree=4, batch=1, length=1, bandwidth=1e9, device="cuda:a1")


def test_a_plan_of_a_folder_reads_its_config_alone(tmp_path):
    pytest.importorskip("transformers", minversion="5.0")
    small_model("Llama").config.save_pretrained(tmp_path)
    plan = capslog.plan_decoding(str(tmp_path), degree=3, batch=4, length=64, bandwidth="100Mbit")
    assert plan.shard == "sequence"
    assert "the degree 3 does not divide the 2 key-value heads" in plan.why
    small_plan = capslog.plan_decoding(small_model("Llama"), degree=2, batch=4, length=64, bandwidth="100Mbit")
    assert small_plan.costs[1].refused is None


def test_one_process_decodes_alone():
    pytest.importorskip("transformers", minversion="5.0")
    decoding = capslog.decode(small_model("GPT2"), some_prompts(3, 5), 4)
    assert [len(tokens) for tokens in decoding.tokens] == [4, 4]
    assert sum(decoding.sent_bytes.values()) == 0
