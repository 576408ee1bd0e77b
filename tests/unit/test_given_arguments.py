"""Arguments of a trainer by name, wherever its ``__init__`` puts them."""

from __future__ import annotations

import pytest

from hf_fsdpturbo.trainer.given_arguments import GivenArguments, names_taken


class _Base:
    def __init__(self, model=None, args=None, ref_model=None, optimizers=(None, None)) -> None:
        self.seen = {"model": model, "args": args, "ref_model": ref_model}


class _Keywords(_Base):
    def __init__(self, args=None, *, alpha=1.0, **kw) -> None:
        super().__init__(args=args, **kw)


class _Anything(_Base):
    def __init__(self, *args, **kw) -> None:
        super().__init__(*args, **kw)


def given(cls: type, *args, **kwargs) -> tuple[_Base, GivenArguments]:
    instance = cls.__new__(cls)
    return instance, GivenArguments(instance.__init__, cls.__mro__, args, kwargs)


@pytest.mark.parametrize("cls", [_Base, _Keywords, _Anything])
def test_read_and_replaced_where_they_are(cls: type):
    instance, arguments = given(cls, model="path", args="config")
    assert arguments.get("model") == "path"
    assert arguments.get("args") == "config"
    assert arguments.get("ref_model") is None
    assert arguments.takes("ref_model")
    assert not arguments.takes("peft_config")
    arguments["model"], arguments["ref_model"] = "sharded", "reference"
    instance.__init__(*arguments.args, **arguments.kwargs)
    assert instance.seen == {"model": "sharded", "args": "config", "ref_model": "reference"}


def test_positional_arguments_have_names_too():
    assert given(_Base, "path", "config")[1].get("args") == "config"
    assert given(_Keywords, "config", model="path")[1].get("args") == "config"


def test_positional_arguments_without_names_are_refused():
    with pytest.raises(ValueError, match=r"2 positional arguments go into \*args of _Anything.__init__.*by keyword"):
        given(_Anything, "path", "config")


def test_names_end_where_no_keywords_are_passed_on():
    class Closed(_Base):
        def __init__(self, model=None) -> None:
            super().__init__(model)

    assert names_taken(Closed.__mro__) == {"self", "model"}


def test_the_tokenizer_comes_from_the_revision_of_the_weights(monkeypatch):
    """TRL, given a model object, asks for the tokenizer of the default branch."""
    from types import SimpleNamespace

    from hf_fsdpturbo import FSDPTurboSFTTrainer, FSDPTurboTrainer
    from hf_fsdpturbo.trainer import given_models

    asked = []
    processor = given_models.AutoProcessor
    monkeypatch.setattr(processor, "from_pretrained", lambda path, **kwargs: asked.append((path, kwargs)))

    def ask(trainer_class, given, **init_kwargs):
        config = SimpleNamespace(model_init_kwargs=init_kwargs or None, trust_remote_code=False)
        given_models.GivenModels(trainer_class, given, config, None, None)._keep_revision("somebody/moe")

    ask(FSDPTurboSFTTrainer, {}, revision="abc123")
    assert asked == [("somebody/moe", {"revision": "abc123", "trust_remote_code": False})]
    ask(FSDPTurboSFTTrainer, {"processing_class": "mine"}, revision="abc123")
    ask(FSDPTurboSFTTrainer, {})
    ask(FSDPTurboTrainer, {}, revision="abc123")
    assert len(asked) == 1
