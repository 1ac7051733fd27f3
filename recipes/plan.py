"""Plan a training job: `lightning-afd plan model=... cluster=...`. Needs neither a GPU nor torch."""

import json
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_afd.errors import AFDError, PlanError
from lightning_afd.placement import SHARDINGS
from lightning_afd.recipes.launch import check_given, compose, fail

PLAN_FILE, PICTURE_FILE = "plan.json", "plan.png"


def main() -> None:
    """Compose and make the plan that the command line asks for."""
    compose(_job, "plan")


def _job(config: DictConfig) -> None:
    try:
        check_given(config)
        run(config)
    except AFDError as error:
        fail(str(error), 1)


def run(config: DictConfig) -> None:
    """Make a plan, print it, and write it with its timeline."""
    from rich.console import Console

    from lightning_afd.allocate.choose import Effort, choose
    from lightning_afd.recipes.plan_report import documents_table, draw, tables

    request = requested(config)
    choice = choose(request, Effort(layouts=config.candidates, solver=_one_of(config, "solver", SOLVERS)))
    out = Path(config.output_dir)
    choice.save(out / PLAN_FILE)
    draw(request, choice, out / PICTURE_FILE)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for part in (*tables(request, choice), *documents_table(list(config.data.documents), choice, request)):
        console.print(part)
    console.print(f"{out / PLAN_FILE} and {PICTURE_FILE} hold the plan and the first rounds of its timeline.")


SOLVERS = ("auto", "highs", "cbc")


def shape_fields(model: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the chosen model, that of a Hugging Face folder included; raises PlanError without one."""
    fields = dict(model.get("config") or {})
    if model.get("pretrained") is not None:
        path = Path(model["pretrained"]) / "config.json"
        try:
            fields = json.loads(path.read_text()) | fields
        except (OSError, ValueError) as error:
            raise PlanError(f"model.pretrained={model['pretrained']}: {path} can't be read: {error}") from error
    if "model_type" not in fields:
        raise PlanError("this model has no shape in conf/model: choose one with a config, qwen3_235b_a22b for example")
    return fields


def requested(config: DictConfig) -> Any:
    """The request that the settings describe; raises PlanError for values that mean nothing."""
    from lightning_afd.allocate.request import RUNGS, Request
    from lightning_afd.cost.config import model_shape
    from lightning_afd.cost.hardware import Cluster
    from lightning_afd.cost.job import PRECISIONS, BatchShape, Choices

    settings: Any = OmegaConf.to_container(config, resolve=True)
    data, fields = settings["data"], shape_fields(settings["model"])
    for name in ("seq_len", "rows", "global_batch"):
        if not isinstance(data[name], int) or data[name] < 1:
            raise PlanError(f"data.{name}={data[name]}: a whole number of at least 1 is needed")
    if data["global_batch"] % data["rows"]:
        raise PlanError(f"data.global_batch={data['global_batch']} is no multiple of data.rows={data['rows']}")
    recompute = _one_of(config, "recompute", ("auto", "none", "attention", "full"))
    return Request(
        model=model_shape(fields),
        cluster=Cluster.read(settings["cluster"]),
        batch=BatchShape.rows(data["rows"], data["seq_len"]),
        parts=data["global_batch"] // data["rows"],
        choices=Choices(
            precision=PRECISIONS[_one_of(config, "precision", tuple(PRECISIONS))],
            dedup=_one_of(config, "dedup", ("rank", "node", "none")),
            imbalance=_at_least_one(config, "imbalance"),
            shared_experts=_one_of(config, "shared_experts", ("attention", "ffn")),
            shard_optimizer=_one_of(config, "optimizer_sharding", SHARDINGS) != "none",
        ),
        rungs=tuple(rung for rung in RUNGS if recompute in ("auto", rung[0])),
        groups=tuple(settings["groups"]),
    )


def _one_of(config: DictConfig, name: str, choices: tuple[str, ...]) -> Any:
    """The value of a setting, if it is one of the choices."""
    value = str(config[name])
    if value not in choices:
        raise PlanError(f"{name}={value} is not a choice; {name} can be {', '.join(choices)}")
    return value


def _at_least_one(config: DictConfig, name: str) -> float:
    value = config[name]
    if not isinstance(value, (int, float)) or value < 1:
        raise PlanError(f"{name}={value}: a number of at least 1 is needed")
    return float(value)


if __name__ == "__main__":
    main()
