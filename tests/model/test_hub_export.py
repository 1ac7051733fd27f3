"""Folders that transformers loads: bit-equal weights of six architectures, written a layer at a time."""

import io
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hub_cases import TIED, assert_equal, loaded, state_of, whole_model
from tiny import HF
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_afd.errors import PlanError
from lightning_afd.model.hub_export import Below, FolderOptions, StateSource, write_folder
from lightning_afd.model.hub_model import empty_model, hub_entry, transformers_models
from lightning_afd.recipes.tiny_models import tiny_config

CASES = [(name, False) for name in HF] + [(name, True) for name in TIED]
IDS = torch.tensor([[3, 14, 15, 9, 26, 5]])


def write(model: torch.nn.Module, out: Path, state: dict[str, Tensor] | None = None, **options: object) -> None:
    """Write a model's own state, or another one, by a description that went through a file."""
    described = hub_entry(model)["models"][""]
    source = StateSource(model.state_dict() if state is None else state)
    write_folder(empty_model(described), source, out, FolderOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_a_folder_is_what_save_pretrained_writes(tmp_path: Path, name: str, tied: bool) -> None:
    model = whole_model(name, tied=tied)
    model.save_pretrained(tmp_path / "theirs")
    write(model, tmp_path / "ours")
    files = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == files >= {"config.json", "model.safetensors"}
    for file in files:
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes(), file


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_transformers_loads_the_same_weights_from_several_files(tmp_path: Path, name: str, tied: bool) -> None:
    model = whole_model(name, tied=tied).eval()
    write(model, tmp_path / "out", max_shard_size="30KB")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    back = loaded(tmp_path / "out").eval()
    assert_equal(back.state_dict(), model.state_dict())
    assert torch.equal(back(IDS).logits, model(IDS).logits)
    assert torch.equal(
        back.generate(IDS, max_new_tokens=4, do_sample=False), model.generate(IDS, max_new_tokens=4, do_sample=False)
    )
    assert tied == (back.lm_head.weight is back.model.embed_tokens.weight)


def test_a_changed_weight_is_noticed(tmp_path: Path) -> None:
    model = whole_model("qwen3_moe").eval()
    state = state_of(model)
    gate_up = state["model.layers.1.mlp.experts.gate_up_proj"]
    gate_up.copy_(gate_up.roll(gate_up.shape[1] // 2, 1))  # gate and up swapped: the same names and shapes
    write(model, tmp_path / "out", state)
    assert not torch.equal(loaded(tmp_path / "out").eval()(IDS).logits, model(IDS).logits)


class Watched(StateSource):
    """Remembers, for each tensor that is read, how many files were complete before."""

    def __init__(self, state: dict[str, Tensor], folder: Path) -> None:
        super().__init__(state)
        self.folder, self.files = folder, dict[str, list[int]]()

    def read(self, name: str) -> Tensor:
        self.files.setdefault(name, []).append(len(list(self.folder.glob("*.safetensors"))))
        return super().read(name)


def test_no_more_than_a_file_and_a_layer_is_in_memory(tmp_path: Path) -> None:
    model = whole_model("qwen3_moe")
    source = Watched(model.state_dict(), tmp_path / "out.tmp")
    write_folder(empty_model(hub_entry(model)["models"][""]), source, tmp_path / "out", FolderOptions(max_shard_size=3))
    experts = sorted(name for name in source.files if name.endswith("experts.gate_up_proj"))
    before = [source.files[name] for name in experts]
    assert [min(files) for files in before] == sorted(min(files) for files in before)
    assert all(max(first) < min(second) for first, second in pairwise(before))


def test_a_model_inside_a_module(tmp_path: Path) -> None:
    inner = whole_model("mixtral", tied=True)
    module = torch.nn.ModuleDict({"net": inner, "head": torch.nn.Linear(2, 2)})
    entry = hub_entry(module)
    assert list(entry["models"]) == ["net"] == list(transformers_models(module))
    state = {name: tensor for name, tensor in module.state_dict().items() if name != "net.model.embed_tokens.weight"}
    file = io.BytesIO()
    torch.save(entry, file)
    file.seek(0)
    described = torch.load(file, weights_only=True)["models"]["net"]  # plain values only
    write_folder(empty_model(described), Below(StateSource(state), "net"), tmp_path / "out", FolderOptions())
    assert_equal(loaded(tmp_path / "out").state_dict(), inner.state_dict())


def test_bfloat16_weights_stay_so(tmp_path: Path) -> None:
    model = whole_model("deepseek_v3")
    state = {n: t if "gate." in n else t.bfloat16() for n, t in model.state_dict().items()}
    write(model, tmp_path / "out", state)
    assert_equal(loaded(tmp_path / "out").state_dict(), state)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    model, out = whole_model("qwen3_moe"), tmp_path / "out"
    norm = "model.layers.1.input_layernorm.weight"
    fewer = {name: tensor for name, tensor in model.state_dict().items() if name != norm}
    with pytest.raises(PlanError, match=f"weights of a Qwen3MoeForCausalLM: missing {norm}$"):
        write(model, out, fewer)
    with pytest.raises(PlanError, match=r"unexpected model\.layers\.9\.weight$"):
        write(model, out, {**model.state_dict(), "model.layers.9.weight": torch.zeros(2)})
    with pytest.raises(PlanError, match=rf"{norm} has the shape \[3\] in the checkpoint, and \[32\] by the model's"):
        write(model, out, {**fewer, norm: torch.zeros(3)})
    assert not list(tmp_path.iterdir())
    out.mkdir()
    (out / "notes.txt").touch()
    with pytest.raises(PlanError, match="exists and is not empty"):
        write(model, out)


def test_infinities_of_a_configuration_come_back() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("nemotron_h"))
    assert model.config.time_step_limit[1] == float("inf")
    described = hub_entry(model)["models"][""]
    assert empty_model(described).config.time_step_limit[1] == float("inf")
    assert hub_entry(empty_model(described))["models"][""] == described


def test_a_model_of_another_kind_is_refused() -> None:
    described = hub_entry(whole_model("mixtral"))["models"][""]
    for wrong in ({"class": "os"}, {"class": "NoSuchModel"}, {"config": {"model_type": "nosuch"}}):
        with pytest.raises(PlanError, match="is not a model of transformers 5"):
            empty_model({**described, **wrong})


def names(source: Below) -> Collection[str]:
    """Only the names below the prefix."""
    return source.names()


def test_below_strips_whole_names_only() -> None:
    state = {"net.a": torch.ones(2), "network.b": torch.ones(3), "c": torch.ones(1)}
    below = Below(StateSource(state), "net")
    assert list(names(below)) == ["a"] and below.shape("a") == (2,) and below.dtype("a") == torch.float32
    assert set(names(Below(StateSource(state), ""))) == set(state)
