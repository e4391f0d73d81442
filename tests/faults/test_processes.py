"""Processes that die beside a run, and runs that share a folder."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

from fault_artefacts import Artefacts
from fault_cases import Faults, WholeRuns
from fault_runs import write_json_often
from forked import start


def test_a_process_that_decodes_images_dies(tmp_path: Path, faults: Faults, whole_runs: WholeRuns) -> None:
    """First one during training, then the run itself, whose decoders must not keep its folder."""
    whole, _ = whole_runs("distil")
    artefacts = Artefacts(tmp_path / "run", "surrogate")
    deadly = tmp_path / "deadly"
    deadly.touch()
    assert faults.finish("distil", artefacts.folder, num_workers=1, deadly=deadly) == 2
    faults.fault("other faults", artefacts)
    said = faults.said()
    assert "a process that decodes images died" in said and "lower --num_workers" in said and "\n" not in said
    deadly.unlink()
    code = faults.finish("distil", artefacts.folder, {"die_at": 40}, num_workers=1, deadly=deadly)
    assert code == -signal.SIGKILL
    faults.fault("kills", artefacts)
    assert artefacts.step >= 0
    assert faults.finish("distil", artefacts.folder, num_workers=1, deadly=deadly) == 0, faults.said()
    faults.ends_like(artefacts, whole)


def test_a_rank_dies(tmp_path: Path, faults: Faults) -> None:
    """The other rank stops with one line; both go on from the checkpoint and end as without the fault."""

    def two_ranks(out: Path, die_at: dict[int, int] | None = None) -> list[tuple[int, str]]:
        """Exit code and last line of each rank."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = []
        for rank in (0, 1):
            faults.report = tmp_path / f"report-{rank}"
            fault = {"rank": {"rank": rank, "port": port}, "die_at": (die_at or {}).get(rank)}
            ranks.append((faults.start("distil", out, fault), faults.report))
        for process, _ in ranks:
            process.join(120)
            assert not process.is_alive(), "a rank waits for one that is dead"
        return [(process.exitcode, report.read_text() if report.exists() else "") for process, report in ranks]

    assert [code for code, _ in two_ranks(tmp_path / "whole")] == [0, 0]
    artefacts = Artefacts(tmp_path / "run", "surrogate")
    (dead, _), (other, said) = two_ranks(artefacts.folder, {0: 60})
    faults.fault("other faults", artefacts)
    assert dead == -signal.SIGKILL and other == 2
    assert "another process of this run died" in said and "the last good checkpoint is" in said
    assert "\n" not in said and artefacts.step >= 0
    assert [code for code, _ in two_ranks(artefacts.folder)] == [0, 0]
    faults.ends_like(artefacts, tmp_path / "whole")


def test_several_runs_in_one_folder(tmp_path: Path, faults: Faults, whole_runs: WholeRuns) -> None:
    """Those that come while the folder is in use are refused; the result is that of one run."""
    whole, _ = whole_runs("teacher")
    artefacts = Artefacts(tmp_path / "run", "teacher")
    processes = []
    for number in range(3):
        faults.report = tmp_path / f"report-{number}"
        processes.append((faults.start("teacher", artefacts.folder), faults.report))
    for process, report in processes:
        process.join()
        assert process.exitcode in (0, 2), process.exitcode
        if process.exitcode == 2:
            assert "is in use by another process" in report.read_text()
            faults.fault("other faults")
    assert 0 in [process.exitcode for process, _ in processes]
    faults.fault("other faults", artefacts)
    faults.ends_like(artefacts, whole)


def test_two_commands_write_the_same_file(tmp_path: Path, faults: Faults) -> None:
    path = tmp_path / "phases.json"
    processes = [start(write_json_often, path, number) for number in range(3)]
    num_read = 0
    while any(process.is_alive() for process in processes):
        if path.exists():
            found = json.loads(path.read_text())
            assert found["long"] == [found["writer"]] * 2000
            num_read += 1
        os.sched_yield()
    assert [process.exitcode for process in processes] == [0, 0, 0] and num_read > 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["phases.json"]
    faults.counts["artefacts checked"] += num_read
