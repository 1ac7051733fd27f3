"""Train a small Mixture-of-Experts language model on text: `lightning-afd pretrain`, or `python recipes/pretrain.py`.

Settings are in conf/. What follows `run` needs torch; what precedes it is quick, so that wrong settings are said soon.
"""

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from lightning_afd.corpus import check_files, read_tokenizer
from lightning_afd.errors import PlanError
from lightning_afd.recipes.attention import check_attention
from lightning_afd.recipes.launch import check_given, launch, quoted
from lightning_afd.recipes.ranks import check_ranks

if TYPE_CHECKING:
    import lightning as L

    from lightning_afd.data import TextDataModule


NOISE = (
    ".*does not have many workers",  # the rows are in memory
    ".*isinstance.treespec, LeafSpec",  # Lightning's own code
    "Using `DistributedSampler` with the dataloaders",  # some held-out rows count twice: harmless here
)

OmegaConf.register_new_resolver("at_most", lambda limit, steps: min(limit, steps) if steps > 0 else limit, replace=True)


PATHS = ("ckpt_path",)
"""Settings that name files."""


def main() -> None:
    """Compose, check and start what the command line asks for."""
    sys.argv[1:] = [quoted(argument, PATHS) for argument in sys.argv[1:]]
    launch("pretrain", check)


def check(config: DictConfig) -> None:
    """Raise AFDError if the composed settings cannot work."""
    check_given(config)
    check_files(config.data.files)
    check_tokenizer(config)
    check_checkpoint(config.ckpt_path)
    check_attention(config.model.get("attn", "auto"))
    check_ranks(config)


def check_tokenizer(config: DictConfig) -> None:
    """Raise PlanError for a tokenizer that is not there, or that has more tokens than the model."""
    path, vocab = config.data.get("tokenizer"), config.model.get("config", {}).get("vocab_size")
    tokens = read_tokenizer(path).get_vocab_size() if path else 0
    if vocab is not None and tokens > vocab:
        raise PlanError(
            f"data.tokenizer={path} has {tokens} tokens, but the model's vocabulary {vocab}: set data.vocab_size or "
            f"model.config.vocab_size to {tokens} or more"
        )


def check_checkpoint(path: str | None) -> None:
    """Raise PlanError for a checkpoint that is not there; "last" and "best" are looked for in the output folder."""
    if path not in (None, "last", "best") and not Path(str(path)).exists():
        raise PlanError(f"ckpt_path={path} does not exist: give a checkpoint of a run, outputs/.../checkpoints/...ckpt")


def run(config: DictConfig) -> None:
    """Train, validate and sample, on every rank of the job."""
    import lightning as L
    from hydra.utils import instantiate

    for noise in NOISE:
        warnings.filterwarnings("ignore", message=noise)
    L.seed_everything(config.seed, workers=True)
    datamodule = instantiate(config.data, _convert_="all")
    module = instantiate(config.model, _convert_="all")
    trainer = instantiate(trainer_settings(config), _convert_="all")
    trainer.fit(module, datamodule, ckpt_path=config.ckpt_path)
    report(trainer, module, datamodule, config)


def trainer_settings(config: DictConfig) -> Any:
    """Return the Trainer's arguments, the named callbacks as the list that Lightning takes; null removes one."""
    settings = OmegaConf.to_container(config.trainer, resolve=True)
    assert isinstance(settings, dict)
    settings["callbacks"] = [callback for callback in settings["callbacks"].values() if callback is not None]
    return settings


def report(trainer: "L.Trainer", module: "L.LightningModule", datamodule: "TextDataModule", config: DictConfig) -> None:
    """Validate the final weights, let the model write, and print both on rank 0; all ranks take part."""
    from lightning_afd.recipes.sample import Sampling, sample

    if trainer.progress_bar_callback is not None:
        trainer.progress_bar_callback.disable()
    trainer.validate(module, datamodule, verbose=False)
    loss = float(trainer.callback_metrics["val_loss"])
    sampling = Sampling(tokens=config.sample.tokens, temperature=config.sample.temperature, window=config.data.seq_len)
    text = sample(trainer, module, datamodule.tokenizer, config.sample.prompt, sampling)
    if trainer.is_global_zero:
        lines = [verdict(loss, datamodule.entropy), f"sample   {text!r}", *report_line(config.output_dir)]
        lines.append(f"outputs  {config.output_dir}")
        sys.stdout.write("\n" + "\n".join(lines) + "\n")


def report_line(output_dir: str) -> list[str]:
    """Write report.html where steps were recorded, and return the line that says so."""
    from lightning_afd.recipes.report import described
    from lightning_afd.report import has_recordings, write_report

    if not has_recordings(output_dir):
        return []
    try:
        return [f"report   {described(write_report(output_dir))}"]
    except Exception as error:  # whatever is wrong with a page, the training that it is about has succeeded
        return [f"report   not written: {error or type(error).__name__}"]


def verdict(loss: float, entropy: float) -> str:
    """Return the sentence that compares a validation loss with what token frequencies alone give, in nats per token."""
    if loss < entropy:
        return f"val_loss {loss:.3f} nats per token: below the {entropy:.3f} of token frequencies alone, it has learned"
    return f"val_loss {loss:.3f} nats per token: NOT below the {entropy:.3f} of token frequencies alone, train longer"


if __name__ == "__main__":
    main()
