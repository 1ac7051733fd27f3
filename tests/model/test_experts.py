"""The expert compute of F ranks equals the unsharded eager module under autograd."""

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expert_cases import Case, assert_equal, eager, errors, local_ids, make_case, make_shard, sharded
from tiny import HF, tiny, tiny_hf
from torch import Tensor, nn

from lightning_afd.errors import PlanError, ProtocolError, ScheduleError
from lightning_afd.model import experts as experts_module
from lightning_afd.model import grouped as grouped_module
from lightning_afd.model.experts import ExpertShard
from lightning_afd.model.experts_module import is_experts, shard_experts

NAMES = ["tiny", *HF]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Let torch.empty return NaN, so that a value read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="module")
def originals() -> dict[str, nn.Module]:
    """One float64 experts module per architecture, biases included, not to be changed."""
    found = {}
    for name in NAMES:
        model = tiny(experts=4) if name == "tiny" else tiny_hf(name)
        module = next(part for part in reversed(list(model.modules())) if is_experts(part)).double()
        generator = torch.Generator().manual_seed(1)
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4
        found[name] = module
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_two_uneven_shards_equal_the_eager_module(
    originals: dict[str, nn.Module], name: str, dtype: torch.dtype
) -> None:
    module = copy.deepcopy(originals[name]).to(dtype)
    count = len(module.down_proj)
    case = make_case(module, 23, 2, range(count), dtype)
    assert_equal(sharded(module, [[0, 2, 3], [1, *range(4, count)]], case), eager(module, case), TOLERANCE[dtype])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("tokens", "k", "pool"),
    [(9, 1, [0, 1, 2, 3]), (9, 3, [0, 1, 3]), (5, 1, [3]), (1, 2, [0, 3]), (0, 2, [0, 1])],
    ids=["top-1", "one idle expert", "one idle shard", "one token", "no token"],
)
def test_idle_experts_and_few_tokens(
    originals: dict[str, nn.Module], name: str, tokens: int, k: int, pool: list[int]
) -> None:
    module = originals[name]
    case = make_case(module, tokens, k, pool, torch.float64)
    found = sharded(module, [[0, 1], list(range(2, len(module.down_proj)))], case)
    assert_equal(found, eager(module, case), 1e-12)
    idle = [expert for expert in range(len(module.down_proj)) if expert not in pool or not tokens]
    assert all((gradient[idle] == 0).all() for gradient in found.gradients.values())


@pytest.mark.parametrize("name", ["tiny", "gpt_oss"])
def test_shard_without_experts(originals: dict[str, nn.Module], name: str) -> None:
    module = originals[name]
    case = make_case(module, 6, 2, range(4), torch.float64)
    for grouped in (False, True):
        part, shard = make_shard(module, [], grouped)
        y, saved = shard.forward(case.x, torch.full_like(case.idx, -1), case.w)
        dx, dw, pending = shard.backward(saved, case.dy)
        shard.weight_gradient(pending)
        assert not y.any() and not dx.any() and not dw.any()
        assert all(parameter.grad.shape == parameter.shape for parameter in part.parameters())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [17, 0])
def test_grouped_kernel_equals_loop(originals: dict[str, nn.Module], name: str, tokens: int) -> None:
    module = copy.deepcopy(originals[name]).float()
    case = make_case(module, tokens, 2, [0, 1, 3], torch.float32)  # expert 2 has no row
    split = [[0, 2], [1, *range(3, len(module.down_proj))]]
    assert_equal(sharded(module, split, case, grouped=True), sharded(module, split, case, grouped=False), 1e-5)


def test_experts_without_rows_get_no_gradient_from_a_kernel_that_leaves_theirs_unset(
    originals: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = grouped_module.grouped_mm

    def unset(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        out = kernel(left, right, offs=offs)
        if out.dim() == 3:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    module = copy.deepcopy(originals["tiny"]).float()
    case = make_case(module, 6, 2, [0, 2], torch.float32)
    wanted = sharded(module, [[0, 1], [2, 3]], case, grouped=False)
    monkeypatch.setattr(grouped_module, "grouped_mm", unset)
    assert_equal(sharded(module, [[0, 1], [2, 3]], case, grouped=True), wanted, 1e-5)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", ["tiny", "gpt_oss"])
def test_bf16_tokens_with_fp32_weights(originals: dict[str, nn.Module], name: str, grouped: bool) -> None:
    module = copy.deepcopy(originals[name]).float()
    exact = make_case(module, 40, 2, range(4), torch.float32)
    case = Case(exact.x.bfloat16(), exact.idx, exact.w, exact.dy.bfloat16())
    found = sharded(module, [[0, 1], [2, 3]], case, grouped)
    assert all(gradient.dtype == torch.float32 for gradient in found.gradients.values())
    assert_equal(found, eager(module, exact), TOLERANCE[torch.bfloat16])


def test_cast_weights_follow_the_parameter(originals: dict[str, nn.Module]) -> None:
    part, shard = make_shard(copy.deepcopy(originals["tiny"]).float(), [0, 1])
    case = make_case(part, 4, 1, [0, 1], torch.bfloat16)
    before, _ = shard.forward(case.x, case.idx, case.w, keep=False)
    with torch.no_grad():
        part.down_proj.mul_(2)
    after, _ = shard.forward(case.x, case.idx, case.w, keep=False)
    assert torch.equal(after, 2 * before)
    part.down_proj.data.mul_(2)  # bypasses the version counter
    shard.drop_copies()
    assert torch.equal(shard.forward(case.x, case.idx, case.w, keep=False)[0], 4 * before)


class Differentiable(torch.autograd.Function):
    """ExpertShard as a differentiable function of x, w and the parameters."""

    @staticmethod
    def forward(ctx, shard: ExpertShard, idx: Tensor, x: Tensor, w: Tensor, *_parameters: Tensor) -> Tensor:
        ctx.shard = shard
        y, ctx.kept = shard.forward(x, idx, w)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, pending = ctx.shard.backward(copy.copy(ctx.kept), dy)
        for parameter in ctx.shard.parameters():
            parameter.grad = None
        ctx.shard.weight_gradient(pending)
        return None, None, dx, dw, *(parameter.grad for parameter in ctx.shard.parameters())


@pytest.mark.parametrize("name", ["tiny", "gpt_oss"])
def test_gradcheck(originals: dict[str, nn.Module], name: str) -> None:
    _, shard = make_shard(originals[name], [1, 2])
    case = make_case(originals[name], 3, 2, range(4), torch.float64)
    leaves = (case.x.requires_grad_(), case.w.requires_grad_(), *shard.parameters())
    assert torch.autograd.gradcheck(
        lambda *inputs: Differentiable.apply(shard, local_ids(case.idx, [1, 2]), *inputs), leaves, fast_mode=True
    )


def test_module_without_gate_projection() -> None:
    class Plain(nn.Module):
        has_gate, has_bias, is_transposed = False, False, False

        def __init__(self) -> None:
            super().__init__()
            self.up_proj = nn.Parameter(torch.randn(2, 5, 4, dtype=torch.float64))
            self.down_proj = nn.Parameter(torch.randn(2, 4, 5, dtype=torch.float64))
            self.act_fn = nn.Tanh()

        def forward(self, x: Tensor, idx: Tensor, w: Tensor) -> Tensor:
            z = self.act_fn(torch.einsum("th,tkzh->tkz", x, self.up_proj[idx]))
            return torch.einsum("tkz,tkhz,tk->th", z, self.down_proj[idx], w)

    module = Plain()
    case = make_case(module, 7, 1, [0, 1], torch.float64)
    assert_equal(sharded(module, [[1], [0]], case), eager(module, case), 1e-12)


def test_comparison_notices_a_wrong_gradient(originals: dict[str, nn.Module]) -> None:
    module = originals["gpt_oss"]
    case = make_case(module, 8, 2, range(4), torch.float64)
    wanted = eager(module, case)
    for part in ("y", "dx", "dw"):
        found = sharded(module, [[0, 1], [2, 3]], case)
        setattr(found, part, torch.zeros_like(getattr(found, part)))
        assert errors(found, wanted)[part] > 0.5
    changed = copy.deepcopy(module)
    changed.down_proj.data.zero_()
    ratios = errors(sharded(changed, [[0, 1], [2, 3]], case), wanted)
    assert min(ratios[name] for name in ("y", "dx", "dw", "gate_up_proj", "gate_up_proj_bias")) > 0.1


def test_gradients_add_up_and_frozen_parameters_get_none(originals: dict[str, nn.Module]) -> None:
    part, shard = make_shard(originals["gpt_oss"], [0, 1])
    part.down_proj.requires_grad_(False)
    case = make_case(part, 6, 1, [0, 1], torch.float64)
    for _ in range(2):
        _, saved = shard.forward(case.x, case.idx, case.w)
        shard.weight_gradient(shard.backward(saved, case.dy)[2])
    wanted = eager(part, case)
    assert part.down_proj.grad is None
    torch.testing.assert_close(part.gate_up_proj.grad, 2 * wanted.gradients["gate_up_proj"])
    torch.testing.assert_close(part.down_proj_bias.grad, 2 * wanted.gradients["down_proj_bias"])


def test_zero_missing_gradients_keeps_existing_ones(originals: dict[str, nn.Module]) -> None:
    part, shard = make_shard(originals["gpt_oss"], [0, 1])
    part.down_proj.grad = torch.ones_like(part.down_proj)
    part.down_proj_bias.requires_grad_(False)
    shard.zero_missing_gradients()
    assert (part.down_proj.grad == 1).all() and (part.gate_up_proj.grad == 0).all()
    assert part.down_proj_bias.grad is None


def test_activations_are_used_once_and_freed(originals: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []

    activations = experts_module.Activations

    def watched(*fields: Any) -> experts_module.Activations:
        made = activations(*fields)
        alive.extend(weakref.ref(tensor) for tensor in (made.x_TH, made.z_RZ, made.rows.slot_R))
        return made

    monkeypatch.setattr(experts_module, "Activations", watched)
    _, shard = make_shard(originals["tiny"], [0, 1])
    case = make_case(originals["tiny"], 6, 2, range(4), torch.float64)
    idx = local_ids(case.idx, [0, 1])
    assert shard.forward(case.x, idx, case.w, keep=False)[1] is None
    assert not alive
    _, saved = shard.forward(case.x.clone(), idx, case.w)
    assert all(ref() is not None for ref in alive)
    _, _, pending = shard.backward(saved, case.dy)
    assert [ref() is None for ref in alive] == [False, True, False]  # z went, x and the order are still needed
    shard.weight_gradient(pending)
    assert all(ref() is None for ref in alive)
    with pytest.raises(ScheduleError, match="used before"):
        shard.backward(saved, case.dy)
    with pytest.raises(ScheduleError, match="used before"):
        shard.weight_gradient(pending)


def test_shard_experts_replaces_storage_and_keeps_names(originals: dict[str, nn.Module]) -> None:
    module = copy.deepcopy(originals["gpt_oss"])
    names = [name for name, _ in module.named_parameters()]
    module.down_proj.requires_grad_(False)
    module.gate_up_proj.no_decay = True
    full = weakref.ref(module.gate_up_proj)
    shard_experts(module, [3, 1])
    assert [name for name, _ in module.named_parameters()] == names
    assert full() is None
    assert torch.equal(module.down_proj, originals["gpt_oss"].down_proj[[3, 1]])
    assert not module.down_proj.requires_grad and module.gate_up_proj.requires_grad and module.gate_up_proj.no_decay
    assert module.down_proj.untyped_storage().nbytes() == module.down_proj.numel() * 8
    assert module.num_experts == 2


def test_shard_experts_on_meta() -> None:
    module = tiny().to("meta").layers[0].mlp.experts
    shard_experts(module, [1])
    assert module.down_proj.is_meta and module.down_proj.shape == (1, 16, 8)


@pytest.mark.parametrize("wrong", [[4], [-1]])
def test_unknown_experts_are_refused(wrong: list[int]) -> None:
    with pytest.raises(PlanError, match=r"holds experts 0 to 3"):
        shard_experts(tiny().layers[0].mlp.experts, wrong)


def test_foreign_id_beyond_the_shard_is_refused(originals: dict[str, nn.Module]) -> None:
    _, shard = make_shard(originals["tiny"], [0, 1])
    case = make_case(originals["tiny"], 3, 1, [2], torch.float64)
    with pytest.raises(ProtocolError, match="sent to expert 2 of a shard that holds 2"):
        shard.forward(case.x, case.idx, case.w)


def test_only_experts_are_recognised() -> None:
    for name in HF:
        found = [path for path, module in tiny_hf(name).named_modules() if is_experts(module)]
        assert found and all(path.endswith(".mlp.experts") for path in found)
    assert [path for path, module in tiny(dense_first=1).named_modules() if is_experts(module)] == [
        "layers.1.mlp.experts",
        "layers.2.mlp.experts",
    ]


def test_modules_outside_the_contract_are_refused() -> None:
    with pytest.raises(PlanError, match="Linear doesn't follow"):
        ExpertShard(nn.Linear(2, 2))
    module = tiny().layers[0].mlp.experts
    module.post_norm = nn.LayerNorm(16)
    with pytest.raises(PlanError, match=r"post_norm\.weight"):
        ExpertShard(module)
