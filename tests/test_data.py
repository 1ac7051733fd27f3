"""Text to rows: the same everywhere, disjoint, cached, and a clear sentence when the text is not there."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_afd import corpus
from lightning_afd.data import TextDataModule
from lightning_afd.errors import PlanError

TEXT = "\n".join(f"line {n} counts {n * n} sheep, and the shepherd sleeps." for n in range(400))


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_python_docs_are_cached_and_free_of_copies(tmp_path: Path) -> None:
    first = corpus.load_corpus((), 256, tmp_path)
    text = next(tmp_path.glob("docs-*.txt")).read_bytes().decode()
    assert len(text) == first.characters > 500_000
    documents = text.split(corpus.DOCUMENT_BREAK)
    assert "The standard type hierarchy" in text
    assert not any(line != line.rstrip() for line in text.splitlines())
    long_ones = [document for document in documents if len(document) > 200]
    assert len(long_ones) > 1000
    assert len(set(long_ones)) > 0.99 * len(long_ones)


def test_two_caches_get_the_same_tokens(book: Path, tmp_path: Path) -> None:
    one, other = (corpus.load_corpus([str(book)], 300, tmp_path / name) for name in ("a", "b"))
    assert one.sha256 == other.sha256
    np.testing.assert_array_equal(one.ids, other.ids)
    assert one.tokenizer.to_str() == other.tokenizer.to_str()
    assert one.tokenizer.decode(one.ids.tolist()) == TEXT


def test_the_cache_is_used_for_equal_settings_only(book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    made = corpus.load_corpus([str(book)], 300, cache)

    def refuse(text: str, vocab_size: int) -> None:
        raise AssertionError(f"trained again for {vocab_size} tokens")

    monkeypatch.setattr(corpus, "train_tokenizer", refuse)
    np.testing.assert_array_equal(corpus.load_corpus([str(book)], 300, cache).ids, made.ids)
    with pytest.raises(AssertionError, match="301"):
        corpus.load_corpus([str(book)], 301, cache)
    book.write_text(TEXT + "!", encoding="utf-8")
    with pytest.raises(AssertionError, match="300"):
        corpus.load_corpus([str(book)], 300, cache)


def test_an_interrupted_write_leaves_nothing_behind(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"

    def break_off(path: Path, ids: object) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", break_off)
        with pytest.raises(OSError, match="disk full"):
            corpus.load_corpus([str(book)], 300, cache)
    assert [path.suffix for path in cache.iterdir()] == [".json"]
    assert len(corpus.load_corpus([str(book)], 300, cache).ids) > 1000
    assert sorted(path.suffix for path in cache.iterdir()) == [".json", ".npy"]


def test_pack_is_disjoint_and_complete() -> None:
    train, validation = corpus.pack(np.arange(1007, dtype=np.int32), 10, 7)
    assert train.shape == (86, 10)
    assert validation.shape == (14, 10)
    assert not set(train.flat) & set(validation.flat)
    assert set(train.flat) | set(validation.flat) == set(range(1000))
    assert validation[0, 0] == 60


def test_pack_refuses_a_short_text() -> None:
    with pytest.raises(PlanError, match=r"59 tokens, too few for data\.val_every=6 blocks of data\.seq_len=10"):
        corpus.pack(np.arange(59, dtype=np.int32), 10, 6)


def test_unigram_entropy_by_hand() -> None:
    train = np.array([[0, 0, 1]], dtype=np.int32)  # with one more of each: 3/5, 2/5
    validation = np.array([[1, 0, 0], [1, 0, 1]], dtype=np.int32)
    by_hand = -(3 * math.log(3 / 5) + math.log(2 / 5)) / 4
    assert corpus.unigram_entropy(train, validation[:, 1:], 2) == pytest.approx(by_hand, rel=1e-12)
    assert corpus.unigram_entropy(train, validation[:, 1:], 3) > by_hand


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is not a file"), (b"", "is empty"), (b"\xff\xfe\xfa", "is not UTF-8 text")],
)
def test_files_that_cannot_be_used(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError, match=message) as caught:
        corpus.load_corpus([str(path)], 300, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_files_must_be_a_list() -> None:
    with pytest.raises(PlanError, match=r"data\.files=\[a\.txt\]"):
        corpus.check_files("a.txt")


def test_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(PlanError, match=r"data\.vocab_size=255"):
        corpus.train_tokenizer(TEXT, 255)


def test_cache_folder_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_AFD_CACHE", str(tmp_path))
    assert TextDataModule().cache == tmp_path
    assert TextDataModule(cache_dir="/elsewhere").cache == Path("/elsewhere")
    monkeypatch.delenv("LIGHTNING_AFD_CACHE")
    assert TextDataModule().cache == Path.home() / ".cache" / "lightning-afd"


def test_batches_of_the_data_module(book: Path, tmp_path: Path) -> None:
    data = TextDataModule(
        files=[str(book)], vocab_size=300, seq_len=16, batch_size=4, val_every=5, cache_dir=str(tmp_path / "cache")
    )
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in batch.items()} == {
        "input_ids": ((4, 16), torch.int64),
        "labels": ((4, 16), torch.int64),
    }
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert sum(len(batch["labels"]) for batch in data.val_dataloader()) == len(data.val_rows)
    assert 0 < data.entropy < math.log(300)


def packed_data(book: Path, cache: Path, **options: int) -> TextDataModule:
    """A book of 400 documents of one line each."""
    book.write_text(TEXT.replace("\n", corpus.DOCUMENT_BREAK), encoding="utf-8")
    settings = {"vocab_size": 300, "seq_len": 64, "batch_size": 4, "val_every": 5, **options}
    data = TextDataModule(files=[str(book)], packing="documents", cache_dir=str(cache), **settings)
    data.prepare_data()
    data.setup("fit")
    return data


def test_batches_of_packed_documents(book: Path, tmp_path: Path) -> None:
    data = packed_data(book, tmp_path / "cache")
    assert data.corpus is not None and len(data.corpus.lengths) == 400
    first = data.corpus.ids[: data.corpus.lengths[0]].tolist()
    assert data.tokenizer.decode(first) == "line 0 counts 0 sheep, and the shepherd sleeps."
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (1, 4 * 64)
    is_first = batch["position_ids"] == 0
    assert torch.equal(batch["labels"] == -100, is_first)
    assert is_first[0, ::64].all() and int(is_first.sum()) > 8
    assert sum(len(batch["input_ids"][0]) for batch in data.val_dataloader()) == 64 * len(data.val_rows)
    assert 0 < data.entropy < math.log(300)


def test_micro_batches_of_packed_documents_have_equal_work(book: Path, tmp_path: Path) -> None:
    data = packed_data(book, tmp_path / "cache")
    assert data.train_dataloader().sampler.micro_batches == 1  # type: ignore[attr-defined]
    arrangement = SimpleNamespace(micro_batches=2)
    strategy = SimpleNamespace(arrangement=arrangement)
    data.trainer = SimpleNamespace(strategy=strategy, distributed_sampler_kwargs=None)  # type: ignore[assignment]
    assert data.train_dataloader().sampler.micro_batches == 2  # type: ignore[attr-defined]
    arrangement.micro_batches = 3
    with pytest.warns(UserWarning, match="micro_batches=3 does not divide batch_size=4"):
        assert data.train_dataloader().sampler.micro_batches == 1  # type: ignore[attr-defined]


def test_documents_are_in_training_or_in_validation(book: Path, tmp_path: Path) -> None:
    whole = corpus.load_corpus([str(book)], 300, tmp_path / "cache", by_document=True)
    assert len(whole.lengths) == 1
    data = packed_data(book, tmp_path / "cache")
    assert data.corpus is not None
    parts = corpus.divide_documents(data.corpus, 64, 5)
    texts = [set(split_at(part)) for part in parts]
    assert not texts[0] & texts[1]
    assert len(texts[0]) + len(texts[1]) == 400
    assert 0.15 < len(parts[1].ids) / len(data.corpus.ids) < 0.25


def split_at(documents: corpus.Documents) -> list[tuple[int, ...]]:
    return [tuple(ids) for ids in np.split(documents.ids, np.cumsum(documents.lengths)[:-1])]


def test_packing_that_cannot_be(book: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"data\.packing=rows is not a choice; choices: blocks, documents"):
        TextDataModule(packing="rows")
    with pytest.raises(PlanError, match=r"400 documents, too few for rows of data\.seq_len=9000"):
        packed_data(book, tmp_path, seq_len=9000)


def test_the_tokenizer_of_a_folder_is_used(book: Path, tmp_path: Path) -> None:
    trained = corpus.train_tokenizer("other words than those of the book " * 50, 270)
    folder, cache = tmp_path / "model", tmp_path / "cache"
    folder.mkdir()
    trained.enable_truncation(5)
    trained.save(str(folder / "tokenizer.json"))
    for place in (folder, folder / "tokenizer.json"):
        data = TextDataModule(files=[str(book)], seq_len=16, cache_dir=str(cache), tokenizer=str(place))
        data.prepare_data()
        data.setup("fit")
        assert data.corpus is not None and data.vocab_size == trained.get_vocab_size()
        trained.no_truncation()
        assert data.corpus.ids.tolist() == trained.encode(TEXT).ids
        assert data.tokenizer.encode("the sheep").ids == trained.encode("the sheep").ids
    own = corpus.load_corpus([str(book)], trained.get_vocab_size(), cache)
    assert own.ids.tolist() != trained.encode(TEXT).ids, "another entry of the cache"


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"tokenizer\.json is no tokenizer that can be read .* data\.tokenizer=null"):
        TextDataModule(tokenizer=str(tmp_path))
