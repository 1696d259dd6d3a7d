"""Terminal output of a run whose members change: each change in one line, each line once."""

import json
import re
import time

import pytest

from varuna_capslog.elastic.host.terminal import Terminal, describe

MORPH = {
    "kind": "morph",
    "generation": 4,
    "step": 31,
    "why": ["vm-2 lost", "vm-4 joined"],
    "pause_seconds": 0.0612,
    "moved_bytes": 3 << 20,
}


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"cuts": [0, 3], "replicas": 1, "idle": 0}, "cuts [0, 3]"),
        ({"cuts": [0], "replicas": 1, "idle": 1}, "cuts [0], 1 member for copies only"),
        ({"cuts": [0, 3], "replicas": 2, "idle": 2}, "cuts [0, 3] in 2 replicas, 2 members for copies only"),
        ({"cuts": [0], "ways": [[0], [0, 4]], "replicas": 1, "idle": 0}, "cuts [0] + [0, 4]"),
        ({"cuts": [[[0, 1], [4, 6]], 1]}, "stages of layers [[[0, 1], [4, 6]], 1]"),
        ({"cuts": [0, 3]}, "cuts [0, 3]"),  # as earlier versions wrote it
    ],
)
def test_a_change_says_who_the_cuts_who_computes_nothing_the_pause_and_the_bytes(shape, said):
    text = describe(MORPH | shape)
    assert text == f"generation 4: vm-2 lost; vm-4 joined; {said}, paused 61 ms, moved 3 MiB"


def test_a_script_without_cuts_has_none():
    assert describe(MORPH) == "generation 4: vm-2 lost; vm-4 joined, paused 61 ms, moved 3 MiB"


def test_an_early_stop_says_why_and_the_usual_end_nothing():
    assert describe({"kind": "stop", "step": 6, "why": "stopped early: ..."}) == "stopped early: ..."
    assert describe({"kind": "stop", "step": 6, "asked": False}) is None


def test_a_loss_that_the_host_has_said_is_not_said_again_by_the_file(tmp_path, capsys):
    loss = {"kind": "lost", "generation": 1, "member": "vm-2", "why": "worker vm-2 was killed by SIGKILL"}
    with Terminal(tmp_path, 5) as terminal:
        terminal.say(loss["why"])
        (tmp_path / "events.jsonl").write_text(json.dumps(loss) + "\n")
        time.sleep(0.3)
    assert len(re.findall("killed by SIGKILL", capsys.readouterr().out)) == 1


def test_the_last_step_and_all_scores_are_said_whenever_the_run_ends(tmp_path, capsys):
    with Terminal(tmp_path, None):
        with open(tmp_path / "metrics.jsonl", "w") as file:
            for step in (1, 2, 3):
                file.write(json.dumps({"step": step, "loss": 0.5, "world_size": 2}) + "\n")
                file.flush()
                time.sleep(0.3)
        scores = {"AP": 0.25, "AP_large": None, "AP50": 0.5, "per_class": {"one": 0.1}}
        (tmp_path / "evaluations.jsonl").write_text(json.dumps({"step": 3, "scores": scores}) + "\n")
    output_lines = capsys.readouterr().out.splitlines()
    assert [line for line in output_lines if line] == [
        "step 1  loss 0.5000  2 members",
        "step 3  loss 0.5000  2 members",  # the second step falls within ten seconds of the first
        "step 3: AP 0.250  AP50 0.500",
    ]


def test_a_damaged_line_is_passed_over_and_the_next_one_said(tmp_path, capsys):
    """Regression: a value of another type ended the thread that draws, and the command ended in a traceback."""
    events = [MORPH | {"cuts": [0, 3]} | {name: odd} for name in ("why", "pause_seconds", "moved_bytes", "replicas")
              for odd in ([[]], {"a": 1}, "x", None, 1e308)]  # fmt: skip
    metrics = [{"step": odd, "world_size": 2} for odd in (None, "x", [])] + [{"step": 3}, {"step": 2, "loss": "x"}]
    scores = [{"step": 3}, {"scores": {}}, {"step": 3, "scores": "x"}, {"step": 3, "scores": {"AP": 0.5}}]
    with Terminal(tmp_path, None):
        for name, lines in (("events", [*events, MORPH]), ("metrics", metrics), ("evaluations", scores)):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = capsys.readouterr().out
    assert "generation 4: vm-2 lost; vm-4 joined, paused 61 ms, moved 3 MiB" in output
    assert "step 3: AP 0.500" in output


def test_why_all_was_written_is_said_once_and_again_when_it_happens_again(tmp_path, capsys):
    why = "2 device(s) are left; waiting for 1 more"
    written = [
        *({"kind": kind, "why": why} for kind in ("persisted", "waiting", "persisted", "waiting")),
        {"kind": "persisted", "why": "the last devices leave; the run is parked"},
        {"kind": "persisted", "why": "the run is parked"},
        {"kind": "resume", "why": ["2 members begin"], "members": ["a", "b"], "step": 4},
        {"kind": "waiting", "why": why},
    ]
    with Terminal(tmp_path, 5):
        (tmp_path / "events.jsonl").write_text(
            "".join(json.dumps(event | {"generation": 1}) + "\n" for event in written)
        )
        time.sleep(0.3)
    output_lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert output_lines == [
        f"all that is held was written to disk: {why}",
        "all that is held was written to disk: the last devices leave; the run is parked",
        "generation 1: 2 members begin after step 4",
        f"generation 1 waits: {why}",
    ]


def test_a_host_says_its_losses_itself_and_the_file_those_of_others(tmp_path, capsys):
    with Terminal(tmp_path, 5, "a"), open(tmp_path / "events.jsonl", "w") as file:
        for host in "ab":
            file.write(json.dumps({"kind": "lost", "host": host, "why": f"worker {host}-1 was killed"}) + "\n")
    assert [line for line in capsys.readouterr().out.splitlines() if line] == ["worker b-1 was killed"]


def test_steps_are_counted_to_the_last_one_that_an_event_tells_and_a_skipped_generation_is_explained(tmp_path, capsys):
    """The lines lacked "of N" and the epoch, and generation 4 followed generation 2 without a word."""
    beginnings = [MORPH | {"kind": "start", "generation": 1, "last_step": 40, "why": ["2 members begin"]}]
    beginnings += [MORPH | {"generation": number, "last_step": 40} for number in (2, 4, 5, 8)]
    with Terminal(tmp_path, None):
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in beginnings))
        time.sleep(0.3)
        line = {"step": 3, "epoch": 1, "loss": 0.5, "world_size": 2}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    output_lines = capsys.readouterr().out.splitlines()
    assert "step 3 of 40, epoch 2  loss 0.5000  2 members" in output_lines
    explained = [line for line in output_lines if "did not begin" in line]
    assert [line.partition(" did")[0] for line in explained] == ["generation 3", "generations 6 to 7"]
