"""The recipes' language model and the text that it writes, in one process."""

import itertools
import math
import warnings

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate

import lightning_afd.recipes.pretrain  # noqa: F401  (its resolvers)
from lightning_afd import corpus
from lightning_afd.recipes.module import lr_factor
from lightning_afd.recipes.sample import Sampling, sample


@pytest.mark.parametrize("model", ["qwen3_moe_tiny", "gpt_oss_tiny", "deepseek_v3_tiny"])
def test_each_model_starts_at_the_loss_of_a_guess(model: str) -> None:
    with initialize_config_module(version_base="1.3", config_module="lightning_afd.conf"):
        config = compose("config", [f"model={model}", "data.vocab_size=300", "model.config.num_hidden_layers=2"])
    torch.manual_seed(0)
    module = instantiate(config.model, _convert_="all")
    tokens = torch.randint(0, 300, (2, 16))
    output = module.model(input_ids=tokens, labels=tokens)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(math.log(300), abs=0.3)
    assert module.predict_step({"input_ids": tokens}, 0).shape == (2, 300)
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_learning_rate_rises_then_falls() -> None:
    factors = [lr_factor(step, 4, 20) for step in range(21)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == pytest.approx(1.0)
    assert factors[20] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in itertools.pairwise(factors[4:]))
    assert lr_factor(0, 0, 0) == pytest.approx(1.0)


class NextByte(L.LightningModule):
    """Predicts the token id after the last one."""

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        assert batch["input_ids"].shape == (1, 8)
        return torch.nn.functional.one_hot(batch["input_ids"][:, -1] + 1, 256).float()


def test_sample_feeds_each_token_back() -> None:
    tokenizer = corpus.train_tokenizer("abc", 256)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    before = list(trainer.callbacks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = sample(trainer, NextByte(), tokenizer, "a", Sampling(tokens=5, temperature=0, window=8))
    assert text == "abcdef"
    assert trainer.callbacks == before
