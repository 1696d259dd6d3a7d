"""Fuzzes all readers with damaged files: each is read correctly or refused by our own error, in little time and memory.

Every case runs in its own process, forked from one that has read an undamaged file of each kind; the processor time and
the memory of that process are those of the case. The seed and the number determine a case.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import random
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from kinds import KINDS, Kind, train_original
from mutations import damaged

from varuna_capslog.base.errors import CapslogError

MOST_SECONDS = 2.0
"""Of processor time, above those of an undamaged file of the kind."""
MOST_BYTES = 500 << 20
"""Of memory, above an idle process."""
_LONGEST_SECONDS = 60
_MOST_ADDRESSES = 3 << 30


@dataclass(frozen=True)
class Case:
    """Outcome of one file.

    end: "used", "refused", or "defect".
    sentence: text of the refusal or the defect.
    seconds: processor time.
    peak_bytes: peak of the process.
    """

    kind: str
    number: int
    end: str
    sentence: str
    seconds: float
    peak_bytes: int


def _run(name: str, number: int, kind: Kind, folder: Path) -> Case:
    """Use the file in a separate process, and remove the folder."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        end, sentence = _used(kind, folder)
        os.write(writer, json.dumps([end, sentence]).encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    _, status, usage = os.wait4(process, 0)
    if status == 0 and answer:
        end, sentence = json.loads(answer)
    else:
        end, sentence = "defect", f"ended by signal {os.waitstatus_to_exitcode(status)}"
    shutil.rmtree(folder)
    return Case(name, number, end, sentence, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10)


def _used(kind: Kind, folder: Path) -> tuple[str, str]:
    signal.alarm(_LONGEST_SECONDS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MOST_ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        kind.use(folder)
    except CapslogError as error:
        return "refused", str(error)[:1000]
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "defect", f"{type(error).__name__}: {str(error)[:300]} ({Path(where.filename).name}:{where.lineno})"
    return "used", ""


def _undamaged(name: str, original: Path, folder: Path) -> Case:
    """Use an undamaged file in the same way; first import the modules that the kind needs into this process."""
    KINDS[name].prepare(original, folder, random.Random(1), lambda content, form: content)
    KINDS[name].use(folder)
    return _run(name, -1, KINDS[name], folder)


def main() -> int:
    """Run the cases of the command line and print the table; exit status 1 if there is a defect."""
    arguments = _arguments()
    work = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        return _fuzz(arguments, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fuzz(arguments: argparse.Namespace, work: Path) -> int:
    original = train_original(work)
    names = arguments.kinds or list(KINDS)
    idle = {}
    for name in names:
        (work / "case").mkdir()
        idle[name] = _undamaged(name, original, work / "case")
        if idle[name].end != "used":
            print(f"the undamaged {name} is not used: {idle[name].sentence}")
            return 1
    total = sum(KINDS[name].share for name in names)
    cases = []
    for name in names:
        for number in range(-(-arguments.cases * KINDS[name].share // total)):
            if arguments.only is not None and number != arguments.only:
                continue
            folder = work / "case"
            folder.mkdir()
            dice = random.Random(f"{arguments.seed} {name} {number}")
            KINDS[name].prepare(original, folder, dice, functools.partial(damaged, dice))
            if arguments.keep:
                shutil.copytree(folder, arguments.keep / f"{name}-{number}", symlinks=True)
            cases.append(_judged(_run(name, number, KINDS[name], folder), idle[name]))
            if arguments.cases >= 1000 and len(cases) % 100 == 0:
                print(f"\r{len(cases)} of {arguments.cases}", end="", file=sys.stderr, flush=True)
    return _print(cases, idle, arguments.seed)


def _judged(case: Case, idle: Case) -> Case:
    """Return the case, as a defect where it took too much time or memory."""
    if case.end == "defect":
        return case
    if case.seconds - idle.seconds > MOST_SECONDS:
        return Case(case.kind, case.number, "defect", f"takes {case.seconds:.1f} s", case.seconds, case.peak_bytes)
    if case.peak_bytes - idle.peak_bytes > MOST_BYTES:
        above = (case.peak_bytes - idle.peak_bytes) >> 20
        return Case(case.kind, case.number, "defect", f"takes {above} MiB", case.seconds, case.peak_bytes)
    return case


def _print(cases: list[Case], idle: dict[str, Case], seed: int) -> int:
    print(
        f"\nseed {seed}\n\n| kind | files | used | refused | defects | seconds, median and most | most MiB above idle |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, undamaged in idle.items():
        rows = [case for case in cases if case.kind == name]
        if not rows:
            continue
        ends = collections.Counter(case.end for case in rows)
        seconds = [case.seconds for case in rows]
        above = max(case.peak_bytes for case in rows) - undamaged.peak_bytes
        print(
            f"| {name} | {len(rows)} | {ends['used']} | {ends['refused']} | {ends['defect']} "
            f"| {statistics.median(seconds):.2f}, {max(seconds):.2f} | {max(0, above) >> 20} |"
        )
    defects = [case for case in cases if case.end == "defect"]
    for case in defects[:60]:
        print(f"{case.kind} {case.number}: {case.sentence}")
    return 1 if defects else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="how many files in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), help="only these")
    parser.add_argument("--only", type=int, help="only the case of this number, of each kind")
    parser.add_argument("--keep", type=Path, help="a folder for the damaged files")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
