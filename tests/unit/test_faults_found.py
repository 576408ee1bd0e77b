"""Issue 14: each fault that was found in use has a test; the table says which, by the fault's number."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FAULTS = {
    "S3": "unit/test_checkpoint_writer.py::test_s3_a_second_run_is_refused_by_name_until_the_first_has_died",
    "S4": "distributed/test_given_models.py::test_an_optimizer_of_unsharded_parameters_is_refused",
    "S5": "distributed/test_loss_settings.py::test_evaluation_loss_equals_one_process",
    "S6": "distributed/test_loss_settings.py::test_evaluation_loss_equals_one_process",
    "S7": "unit/test_recipes.py::test_all_ranks_draw_one_split",
    "S8": "distributed/test_loss_settings.py::test_streams_of_several_files_end_together",
    "S9": "distributed/test_unused_tensors.py::test_carried_through_training_checkpoints_and_resume",
    "S10": "distributed/test_lora.py::test_s10_dpo_from_an_adapter_has_that_adapter_as_its_reference",
    "S11": "distributed/test_nonfinite.py::test_s11_the_first_value_that_is_not_finite_is_named",
    "S12": "distributed/test_plain_doors.py::test_s12_a_plain_module_saves_its_tensors_and_resumes",
    "S13": "unit/test_checkpoint_files.py::test_a_pickle_runs_no_code",
    "H1": "distributed/test_collective_calls.py::"
    "test_h1_a_call_of_one_rank_is_named_and_the_rank_that_sits_in_a_collective_is_ended",
    "C6": "distributed/test_collective_calls.py::test_c6_a_model_saves_itself_as_save_model_does",
    "C7": "distributed/test_callbacks.py::test_callbacks_are_right_or_refused",
    "C8": "distributed/test_callbacks.py::test_callbacks_are_right_or_refused",
    "C9": "distributed/test_nonfinite.py::test_c9_all_ranks_save_the_same_step_whichever_was_signalled",
    "C10": "distributed/test_loss_settings.py::test_streams_of_several_files_end_together",
    "C10b": "distributed/test_loss_settings.py::test_streams_of_several_files_end_together",
    "C10c": "unit/test_messages.py::test_c10c_bare_errors",
    "C11": "unit/test_messages.py::test_c11_formats_mixed",
    "M1": "unit/test_messages.py::test_m1_our_key_without_its_prefix_in_the_accelerate_yaml",
    "M2": "unit/test_messages.py::test_m2_the_accelerate_spelling_in_a_recipe",
    "M3": "unit/test_messages.py::test_m3_no_torch_npu",
    "M4": "unit/test_checkpoint_commit.py::test_true_from_a_command_line_means_the_newest",
    "M5": "unit/test_messages.py::test_m5_names_what_was_typed",
    "M6": "unit/test_messages.py::test_m6_export_names_its_own_argument",
    "M7": "unit/test_messages.py::test_m7_columns_are_named",
    "M8": "unit/test_messages.py::test_m8_one_error_a_failure",
    "M9": "unit/test_messages.py::test_m9_the_summary_says_what_was_written",
    "M10": "distributed/test_bad_input.py::test_refused_by_trainers",
    "M11": "unit/test_messages.py::test_m11_a_missing_reporter_is_named_before_the_model_is_loaded",
    "M12": "unit/test_faults_found.py::test_m12_is_left_to_trl_and_noted",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_test_of_a_fault_is_there_and_has_its_number(fault: str):
    file, _, name = FAULTS[fault].partition("::")
    text = (TESTS / file).read_text(encoding="utf-8")
    (test,) = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == name)
    said = ast.get_source_segment(text, test) or ""
    assert name.startswith(f"test_{fault.lower()}_") or re.search(rf"\b{fault}\b", said), f"{name} does not say it"


def test_m12_is_left_to_trl_and_noted():
    page = (TESTS.parent / "docs" / "differences.md").read_text(encoding="utf-8")
    assert "TRL's aux loss with a config of DeepSeek-V3 fails in TRL" in page
