"""Models that start from a Hugging Face folder: bit-equal weights in every layout, and what each rank reads of it."""

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_cases import TIED, assert_equal, loaded, state_of, whole_model
from safetensors.torch import load_file, save_file
from tiny import HF
from torch import Tensor

from lightning_afd import from_pretrained
from lightning_afd.engine import Engine
from lightning_afd.errors import PlanError
from lightning_afd.model import hub_folder
from lightning_afd.model.experts_module import shard_experts
from lightning_afd.model.hub_import import load_pretrained
from lightning_afd.model.place import is_owned, mark_placed
from lightning_afd.model.split import find_moe_layers
from lightning_afd.placement import Layout
from lightning_afd.plan import make_plan
from lightning_afd.transport.local import LocalNetwork, LocalTransport

LAYOUTS = (Layout(attention=2, ffn=3), Layout(attention=1, ffn=2, groups=2))
EXPERTS = {"mixtral": "block_sparse_moe.experts."}
"""Part of the names of experts' tensors in a folder, where it is not "mlp.experts."."""


def on_meta(folder: Path, **options: Any) -> Any:
    """What configure_model makes under a strategy that splits the model later."""
    with torch.device("meta"):
        return from_pretrained(folder, experts_implementation="eager", **options)


def start(model: Any, layout: Layout) -> list[Any]:
    """Each rank's part of the model, placed and filled."""
    network, models = LocalNetwork(layout), [copy.deepcopy(model) for _ in range(layout.world)]

    def run(rank: int) -> None:
        transport = LocalTransport(network, rank)
        plan, layers = make_plan(models[rank], layout, order="af-pipe", micro_batches=2)
        engine = Engine(plan, rank, transport, transport)
        engine.place(models[rank], layers)
        engine.materialise(models[rank], layers, torch.device("cpu"))

    network.run([lambda rank=rank: run(rank) for rank in range(layout.world)])  # type: ignore[misc]
    return models


def whole(models: list[Any]) -> dict[str, Tensor]:
    """All parameters and saved buffers under their names, experts of all ranks in order."""
    parts = [
        {n: t.detach() for n, t in model.state_dict(keep_vars=True).items() if not t.is_meta and is_owned(t)}
        for model in models
    ]
    held = {name: [part[name] for part in parts if name in part] for part in parts for name in part}
    return {n: torch.cat(ts) if ".experts." in n and "gate." not in n else ts[0] for n, ts in held.items()}


@pytest.mark.parametrize(("name", "tied"), [(name, False) for name in HF] + [(name, True) for name in TIED])
def test_every_layout_has_the_weights_of_the_folder(tmp_path: Path, name: str, tied: bool) -> None:
    want = whole_model(name, tied=tied)
    want.save_pretrained(tmp_path, max_shard_size="40KB")
    model = on_meta(tmp_path)
    assert model.training and all(parameter.is_meta for parameter in model.parameters())
    for layout in LAYOUTS:
        assert_equal(whole(start(model, layout)), want.state_dict())


class Reads:
    """Stands for `safe_open`: counts the bytes of each tensor that is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: Counter[str] = Counter()
        self._open = hub_folder.safe_open
        monkeypatch.setattr(hub_folder, "safe_open", lambda *args, **kwargs: _File(self._open(*args, **kwargs), self))

    def take(self) -> Counter[str]:
        """What was read since the last call."""
        taken, self.bytes = self.bytes, Counter()
        return taken


class _File:
    def __init__(self, file: Any, reads: Reads) -> None:
        self.file, self.reads = file, reads

    def __enter__(self) -> "_File":
        self.file.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.file.__exit__(*exception)

    def keys(self) -> Any:
        return self.file.keys()

    def get_tensor(self, name: str) -> Tensor:
        tensor = self.file.get_tensor(name)
        self.reads.bytes[name] += tensor.nbytes
        return tensor

    def get_slice(self, name: str) -> "_Slice":
        return _Slice(self.file.get_slice(name), name, self.reads)


class _Slice:
    def __init__(self, window: Any, name: str, reads: Reads) -> None:
        self.window, self.name, self.reads = window, name, reads

    def get_shape(self) -> Any:
        return self.window.get_shape()

    def __getitem__(self, rows: Any) -> Tensor:
        tensor = self.window[rows]
        self.reads.bytes[self.name] += tensor.nbytes
        return tensor


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(
    "layout", [Layout(attention=1, ffn=2), Layout(attention=1, ffn=2, groups=2)], ids=["p=1", "p=2"]
)
def test_each_rank_reads_its_own_tensors_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, layout: Layout
) -> None:
    whole_model(name, tied=True).save_pretrained(tmp_path)
    on_disk = {key: tensor.nbytes for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    experts = {key for key in on_disk if EXPERTS.get(name, "mlp.experts.") in key}
    reads = Reads(monkeypatch)
    model = on_meta(tmp_path)
    assert not reads.take()
    by_model: dict[int, Counter[str]] = {}

    def load(root: Any, *args: Any) -> None:
        load_pretrained(root, *args)
        by_model[id(root)] = reads.take()

    monkeypatch.setattr("lightning_afd.owned.load_pretrained", load)
    read = [by_model[id(part)] for part in start(model, layout)]
    attention, ffn = read[: layout.groups], read[layout.groups :]
    assert all(experts.isdisjoint(rank) for rank in attention)
    assert all(set(rank) <= experts for rank in ffn)
    copies = {"model.norm.weight"} if layout.groups > 1 else set()  # group 1 has an untrained one
    together = sum(read, Counter[str]())
    assert {k: n for k, n in together.items() if k not in copies} == {
        k: n for k, n in on_disk.items() if k not in copies
    }
    for group in range(layout.groups):  # 4 experts on 2 F ranks
        first, second = (sum(rank.values()) for rank in ffn[2 * group : 2 * group + 2])
        assert first == second > 0


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_any_experts_in_any_order(tmp_path: Path, name: str) -> None:
    want = whole_model(name)
    want.save_pretrained(tmp_path)
    model, ids = on_meta(tmp_path), [3, 0, 1]
    layers = find_moe_layers(model)
    mark_placed(layers, "here", Layout(attention=1, ffn=1))
    for layer in layers:
        shard_experts(layer.experts, ids)
    load_pretrained(model, {layer.experts: ids for layer in layers}, torch.device("cpu"))
    state = want.state_dict()
    assert_equal(model.state_dict(), {n: t[ids] if ".experts." in n else t for n, t in state.items()})


def test_weights_that_were_trained_since_stay(tmp_path: Path) -> None:
    whole_model("qwen3_moe").save_pretrained(tmp_path)
    model = on_meta(tmp_path)
    load_pretrained(model, {}, torch.device("cpu"))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    load_pretrained(model, {}, torch.device("cpu"))
    assert not model.lm_head.weight.any()


def test_dtype_as_asked(tmp_path: Path) -> None:
    whole_model("deepseek_v3").save_pretrained(tmp_path)
    model = on_meta(tmp_path, dtype=torch.bfloat16)
    load_pretrained(model, {}, torch.device("cpu"))
    theirs = state_of(loaded(tmp_path, dtype=torch.bfloat16))
    assert {tensor.dtype for tensor in theirs.values()} == {torch.bfloat16, torch.float32}  # the router stays precise
    assert_equal(state_of(model), theirs)
    model.save_pretrained(tmp_path / "half")
    assert_equal(state_of(from_pretrained(tmp_path / "half")), theirs)
    wide = on_meta(tmp_path / "half", dtype="float32")
    load_pretrained(wide, {}, torch.device("cpu"))
    assert_equal(state_of(wide), {name: tensor.float() for name, tensor in theirs.items()})


def test_elsewhere_the_weights_are_there_at_once(tmp_path: Path) -> None:
    want = whole_model("mixtral")
    want.generation_config.max_length = 77
    want.save_pretrained(tmp_path)
    model = from_pretrained(tmp_path)
    assert model.training and model.generation_config.max_length == 77
    assert_equal(state_of(model), state_of(want))
    assert on_meta(tmp_path).generation_config.max_length == 77


def test_names_in_memory_are_taken_too(tmp_path: Path) -> None:
    want = whole_model("qwen3_moe")
    want.save_pretrained(tmp_path, save_original_format=False)
    assert any(key.endswith("experts.gate_up_proj") for key in load_file(tmp_path / "model.safetensors"))
    assert_equal(whole(start(on_meta(tmp_path), LAYOUTS[0])), want.state_dict())


# -- refusals -------------------------------------------------------------------------------------------------------


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Replace tensors of a folder's only file; None removes one."""
    file = folder / "model.safetensors"
    state = {**load_file(file), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, file, metadata={"format": "pt"})


UP = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize("meta", [True, False])
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, meta: bool) -> None:
    def make(**options: Any) -> Any:
        return on_meta(tmp_path, **options) if meta else from_pretrained(tmp_path, **options)

    whole_model("qwen3_moe").save_pretrained(tmp_path)
    with pytest.raises(PlanError, match=r"lm_head\.weight has the shape \[64, 32\] in the folder, and \[65, 32\]"):
        make(vocab_size=65)
    with pytest.raises(PlanError, match=r"unexpected model\.layers\.0\.mlp\.experts\.3\.\w+\.weight"):
        make(num_experts=3)
    with pytest.raises(PlanError, match=r"missing model\.layers\.0\.mlp\.experts\.4\.\w+\.weight.* and \d+ more$"):
        make(num_experts=6)
    change(tmp_path, **{UP: None})
    with pytest.raises(PlanError, match=f"weights of this Qwen3MoeForCausalLM: missing {UP}$"):
        make()
    change(tmp_path, **{UP: torch.zeros(16, 32), "strange": torch.zeros(1), "lm_head.weight": None})
    with pytest.raises(PlanError, match=r"missing lm_head\.weight; unexpected strange$"):
        make()


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"has no config\.json"):
        on_meta(tmp_path)
    whole_model("mixtral").save_pretrained(tmp_path, max_shard_size="40KB")
    with pytest.raises(PlanError, match="holds a model of type mixtral, but qwen3_moe is asked for"):
        on_meta(tmp_path, model_type="qwen3_moe")
    with pytest.raises(PlanError, match="num_expertz: not in the configuration of a mixtral model"):
        on_meta(tmp_path, num_expertz=3)
    first = min(tmp_path.glob("*.safetensors"))
    content = first.read_bytes()
    for broken in (content[:100], b"", None):
        first.unlink() if broken is None else first.write_bytes(broken)
        with pytest.raises(PlanError, match=f"{first.name} can't be read"):
            on_meta(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(PlanError, match=r"has neither model\.safetensors\.index\.json nor model\.safetensors"):
        on_meta(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(PlanError, match="holds quantised weights"):
        on_meta(tmp_path)
