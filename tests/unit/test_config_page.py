"""docs/config.md is what the dataclasses say, and each of its examples is taken from all four places."""

import dataclasses
import json

import pytest

from hf_fsdpturbo.arguments import FSDPTurboArguments
from hf_fsdpturbo.arguments.sources import PUBLIC_DEFAULTS, SHORTHAND, resolve_settings
from hf_fsdpturbo.launch_config.environment import CONFIG_VARIABLE
from tests.support import config_page

ROWS = config_page.all_rows()


def unset():
    """Public fields as nobody has given them."""
    own = [f for f in dataclasses.fields(FSDPTurboArguments) if f.name in PUBLIC_DEFAULTS]
    return {f.name: f.default_factory() if f.default is dataclasses.MISSING else f.default for f in own}


def test_the_page_is_up_to_date():
    assert config_page.PAGE.read_text(encoding="utf-8") == config_page.render(), (
        "docs/config.md is old: python -m tests.support.config_page"
    )


def test_every_public_field_is_there():
    assert {name for group, name, *_ in ROWS if not group} == set(PUBLIC_DEFAULTS)
    assert all(words for *_, words, _ in ROWS)


def asked(group, name, example):
    """``(field, value)`` of the public field that carries it."""
    if not group:
        return name, example
    fields = {name: example}
    if group == "kernel_config" and name != "name":  # chunk_size and operators act on FLA only
        fields["name"] = "flash-linear-attention"
    return group, fields


@pytest.mark.parametrize(("group", "name", "example"), [(g, n, e) for g, n, _, _, _, e in ROWS])
def test_the_example_is_taken_from_everywhere(monkeypatch, tmp_path, group, name, example):
    field, value = asked(group, name, example)
    key = f"dist_config.{field}" if field in SHORTHAND else field
    settings = {}
    settings["python"], _ = resolve_settings({**unset(), field: value})
    text = json.dumps(value) if not isinstance(value, str) else value
    monkeypatch.setenv(f"FSDPTURBO_{field.upper()}", text)
    settings["environment"], _ = resolve_settings(unset())
    monkeypatch.delenv(f"FSDPTURBO_{field.upper()}")
    yaml = tmp_path / "accelerate.yaml"
    ours = f"fsdp_config:\n  fsdp_turbo_{field}: {json.dumps(value)}\n"
    yaml.write_text(f"distributed_type: MULTI_GPU\nuse_cpu: true\n{ours}", encoding="utf-8")
    monkeypatch.setenv(CONFIG_VARIABLE, str(yaml))
    settings["yaml"], _ = resolve_settings(unset())
    found = {
        place: {k: v.value for k, v in values.items() if k == key or k.startswith(f"{key}.")}
        for place, values in settings.items()
    }
    assert found["python"]
    assert found["python"] == found["environment"] == found["yaml"]


def test_a_field_that_is_missing_is_seen(monkeypatch):
    monkeypatch.setattr(config_page, "PUBLIC_DEFAULTS", {k: v for k, v in PUBLIC_DEFAULTS.items() if k != "recompute"})
    assert config_page.PAGE.read_text(encoding="utf-8") != config_page.render()
