"""The demo's own parts: inputs that are what they claim to be, and a comparison that sees a wrong model."""

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO = Path(__file__).parents[2] / "demo"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"demo_{name}", DEMO / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    load("make_inputs").main(out)
    return out


def test_tokenizer_reads_the_text(inputs: Path):
    """A tokenizer of the wrong class encodes everything to nothing, and training still runs."""
    tokenizer = AutoTokenizer.from_pretrained(inputs / "base_model")
    text = "# lambda\n\n   lambda_expr ::= \"lambda\" [parameter_list] \":\" expression"
    ids = tokenizer(text).input_ids
    assert 10 < len(ids) < len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id is not None
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


def test_untrained_loss_is_that_of_a_guess(inputs: Path):
    tokenizer = AutoTokenizer.from_pretrained(inputs / "base_model")
    model = AutoModelForCausalLM.from_pretrained(inputs / "base_model")
    rows = (inputs / "data" / "test.jsonl").read_text().splitlines()
    ids = tokenizer(rows[0], return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    assert abs(loss.item() - math.log(len(tokenizer))) < 0.2


def test_no_held_out_passage_is_trained_on(inputs: Path):
    train, test = ((inputs / "data" / f"{split}.jsonl").read_text().splitlines() for split in ("train", "test"))
    assert len(train) > 500
    assert not set(train) & set(test)


def test_the_comparison_sees_a_wrong_model():
    compare = load("report").compare
    logits = torch.randn(4, 8, 16)
    assert compare("logits", logits, logits + 1e-6 * torch.randn_like(logits))[1]
    assert not compare("logits", logits, logits + 1e-2 * torch.randn_like(logits))[1]
    assert not compare("logits", logits, logits.flip(0))[1]
    assert not compare("loss", 4.376, 4.378)[1]
