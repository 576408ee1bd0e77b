"""Issue 18: a slow rank is named; a stopped and a sleeping one end the run within ``hang_timeout``; one spawn."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.reference_run import Run, build_trainer
from tests.support.spawn import RankError, run_ranks
from tests.support.tiny_models import texts

TIMEOUT, STOPPED, ASLEEP, SLOW = 2, 1, 2, 3


def sleeps_in_a_callback() -> None:
    time.sleep(60)


def train_until_ranks_stop(run: Run) -> None:
    """Rank function: one rank is slow with its data; in the third step one is stopped, and one sleeps."""
    from transformers import TrainerCallback

    from hf_fsdpturbo import watcher
    from hf_fsdpturbo.trainer import hang_watch

    watcher.POLL, hang_watch.ANSWER = 0.2, 1.5
    trainer = build_trainer(run, turbo=True)
    rank = trainer.args.process_index

    class Stops(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                log = json.dumps(state.log_history[-1])
                (Path(args.output_dir) / f"log_{rank}.json").write_text(log)
                (Path(args.output_dir) / f"stopped_{rank}").write_text(f"{time.time()} {os.getpid()}")
                if rank == STOPPED:
                    os.kill(os.getpid(), signal.SIGSTOP)
                if rank == ASLEEP:
                    sleeps_in_a_callback()

    if rank == SLOW:
        collate = trainer.data_collator
        trainer.data_collator = lambda rows: time.sleep(0.5) or collate(rows)
    trainer.add_callback(Stops())
    trainer.train()


@pytest.fixture(scope="module")
def hung(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hang")
    arguments = {"max_steps": 4, "output_dir": str(folder)}
    turbo = {"ep_size": 2, "hang_timeout": TIMEOUT}
    run = Run(tiny("qwen3_moe"), {"text": texts(32, seed=2)}, arguments, turbo, gradients=False)
    env = {"TORCHELASTIC_ERROR_FILE": str(folder / "error.json"), "TORCH_FR_BUFFER_SIZE": "200"}
    with pytest.raises(RankError) as died:
        run_ranks(
            train_until_ranks_stop, 4, run, timeout=60, env=env
        )  # ends by SIGKILL: a stopped process takes no other
    ended = time.time()
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / f"stopped_{STOPPED}").read_text().split()[1]), 0)
    return folder, died.value, ended


def test_the_run_ends_within_the_timeout(hung):
    folder, died, ended = hung
    since = float((folder / f"stopped_{STOPPED}").read_text().split()[0])
    assert died.kind == "Died", str(died)
    assert "exit code 1" in died.text
    assert TIMEOUT <= ended - since < TIMEOUT + 20
    assert f"No step for {TIMEOUT} s (hang_timeout), after step 2: rank 1, 2 stopped" in str(died)


def test_one_error_names_who_stopped_and_what_the_others_wait_in(hung):
    said = json.loads((hung[0] / "error.json").read_text())["message"]["extraInfo"]["py_callstack"]
    assert "HangError: No step for" in said, "torchrun prints this"
    assert "rank 1 gives no sign" in said
    assert "rank 2 stands in sleeps_in_a_callback (test_hang_watch.py:" in said
    assert "rank 0, 3 waits in all_gather" in said
    assert str(hung[0] / "hang") in said


def test_every_rank_that_can_writes_its_stacks(hung):
    files = {rank: (hung[0] / "hang" / f"rank_{rank}.txt").read_text() for rank in range(4)}
    for rank in (0, 3):
        assert "The main thread waits in all_gather" in files[rank]
        assert "training_step" in files[rank]
        assert "Thread hf_fsdpturbo watcher:" in files[rank]
        assert "gloo:all_gather, number" in files[rank], "torch's flight recorder is on"
    assert "time.sleep(60)" in files[ASLEEP]
    assert "on_step_begin" in files[ASLEEP]
    assert "gave no sign" in files[STOPPED]
    assert "File " not in files[STOPPED]


def test_the_slowest_rank_is_named_in_the_log(hung):
    log = json.loads((hung[0] / "log_0.json").read_text())
    assert log["straggler_rank"] == SLOW
    assert 0.2 < log["straggler_share"] <= 1
