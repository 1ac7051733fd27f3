"""The survey of architectures: each way in which layers differ, once, with the verdict that it must have."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_afd.model.experts import ExpertShard
from lightning_afd.placement import Layout
from lightning_afd.recipes import survey
from lightning_afd.recipes.survey import SHORT, Finding, examine, summary, table
from lightning_afd.recipes.tiny_models import EXTRAS, LAYERS, moe_models, tiny_config

ONE_GROUP, TWO_GROUPS = Layout(attention=2, ffn=2), Layout(attention=1, ffn=2, groups=2)
EXPECTED = {
    **dict.fromkeys(("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next"), "equal"),
    "nemotron_h": "equal",  # experts without a gate
    "step3p7": "equal",  # experts without transformers' decorator
    "zaya": "suspended",  # trainable scales, and layers that hand the router's states to the next one
    "deepseek_v4": "suspended",  # several streams, and a hash router
    **dict.fromkeys(("flex_olmo", "afmoe"), "suspended"),  # a norm behind the experts
    "minimax_m3_vl_text": "suspended",
    **dict.fromkeys(("llama4_text", "muse_spark"), "refused"),
}


@pytest.fixture(autouse=True)
def foreign_warnings() -> Iterator[None]:
    """Models of transformers warn about their own defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("model", SHORT)
def test_short_survey(model: str) -> None:
    finding = examine(model, ONE_GROUP)
    assert finding.verdict == EXPECTED[model], str(finding)
    assert finding.layers >= 2 or finding.verdict == "refused"
    assert bool(finding.reason) == (finding.verdict == "refused")


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss", "deepseek_v3", "cohere2_moe"])
def test_two_groups(model: str) -> None:
    finding = examine(model, TWO_GROUPS)
    assert finding.verdict == "equal", str(finding)


@pytest.mark.parametrize("model", ["zaya", "afmoe", "deepseek_v4", "flex_olmo"])
def test_what_is_suspended_needs_one_group(model: str) -> None:
    finding = examine(model, TWO_GROUPS)
    assert finding.verdict == "refused", str(finding)
    assert finding.reason.startswith("model.layers.") and "groups=1" in finding.reason and ". " not in finding.reason


def test_what_is_suspended_may_have_several_groups_of_experts() -> None:
    finding = examine("flex_olmo", Layout(attention=1, ffn=2, groups=(1, 2)))
    assert finding.verdict == "suspended", str(finding)


def test_an_average_with_shared_experts_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """cohere2_moe has no shared experts by default; with them its layers are not rest + experts."""
    monkeypatch.setitem(EXTRAS, "cohere2_moe", {"num_shared_experts": 1})
    assert examine("cohere2_moe", ONE_GROUP).verdict == "suspended"
    assert "is not additive" in examine("cohere2_moe", TWO_GROUPS).reason


def test_survey_sees_lost_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = ExpertShard.backward

    def without_dw(self: ExpertShard, *args: Any) -> Any:
        dx_TH, dw_TK, pending = backward(self, *args)
        return dx_TH, torch.zeros_like(dw_TK), pending

    monkeypatch.setattr(ExpertShard, "backward", without_dw)
    for model in ("qwen3_moe", "afmoe"):
        finding = examine(model, ONE_GROUP)
        assert finding.verdict == "different" and finding.difference > 1e-3


def test_what_cannot_be_built_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model_type: str, dtype: torch.dtype) -> Any:
        raise TypeError("no\nway")

    monkeypatch.setattr(survey, "build", broken)
    assert str(examine("qwen3_moe", ONE_GROUP)) == "qwen3_moe: not built: no way"


def test_models_are_found_by_themselves() -> None:
    found = moe_models()
    assert len(found) > 50 and found == sorted(set(found))
    assert {*SHORT, "olmoe", "qwen3_5_moe_text", "glm4v_moe"} <= set(found)
    assert not {"llama", "qwen3_5_moe", "vitpose_backbone"} & set(found)


def test_tiny_configs_are_tiny() -> None:
    config = tiny_config("deepseek_v3")
    assert (config.num_hidden_layers, config.hidden_size, config.n_routed_experts) == (LAYERS, 32, 4)
    assert config.num_key_value_heads == config.num_attention_heads == 4
    assert tiny_config("mixtral").output_router_logits and tiny_config("mixtral").num_key_value_heads == 2
    assert set(tiny_config("gpt_oss").layer_types) == {"sliding_attention", "full_attention"}


def test_table_and_summary() -> None:
    findings = [
        Finding(model="a", verdict="equal", layers=3, dtype="float64", difference=1.23e-15),
        Finding(model="b", verdict="refused", reason="no | way"),
    ]
    rows = table(findings).splitlines()
    assert rows[2:] == ["| a | equal |  | 3 | 1e-15 |  |", "| b | refused |  |  |  | no / way |"]
    two = Finding(model="a", verdict="refused", reason="layer 1 is odd: so")
    assert table(findings, [two]).splitlines()[2] == "| a | equal | refused | 3 | 1e-15 | layer 1 is odd |"
    assert summary(findings) == "2 architectures: 1 equal, 1 refused"
