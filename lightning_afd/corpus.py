"""Text, tokens and packed blocks for the recipes, without a download and without torch.

text -> byte-level BPE trained on it -> token ids (cached together) -> blocks of S tokens -> training, validation rows
                                                                    or -> documents      -> training, validation ones
"""

import ast
import hashlib
import json
import os
import platform
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lightning_afd.errors import PlanError

Tokens = NDArray[np.int32]
DOCUMENT_BREAK = "\n\n\n"
ENCODING_VERSION = 2  # raise it when the same text would be encoded differently


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A text as token ids, with the tokenizer that made them."""

    tokenizer: Tokenizer
    ids: Tokens
    """[tokens] in the order of the text"""
    lengths: Tokens
    """[documents] tokens of each document; one number where the text was encoded as a whole"""
    sha256: str
    """of the text"""
    characters: int

    def describe(self) -> str:
        """Return one line for the log: what was read, so that two runs can be compared."""
        return f"corpus: {self.characters} characters, {len(self.ids)} tokens, sha256 {self.sha256}"


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Some documents of a corpus."""

    ids: Tokens
    """[tokens] of one document behind the other"""
    lengths: Tokens
    """[documents]"""

    @classmethod
    def chosen(cls, corpus: Corpus, choice: NDArray[np.bool_]) -> "Documents":
        """Those documents of which `choice` [documents] is true."""
        return cls(ids=corpus.ids[np.repeat(choice, corpus.lengths)], lengths=corpus.lengths[choice])


def default_cache() -> Path:
    """Return the folder of encoded corpora: LIGHTNING_AFD_CACHE, or ~/.cache/lightning-afd."""
    return Path(os.environ.get("LIGHTNING_AFD_CACHE") or "~/.cache/lightning-afd").expanduser()


def check_files(files: Sequence[str]) -> None:
    """Raise PlanError in one sentence if one of the text files is missing or empty."""
    if isinstance(files, str):
        raise PlanError(f"data.files={files} must be a list: data.files=[{files}]")
    for name in files:
        path = Path(name).expanduser()
        if not path.is_file():
            raise PlanError(f"data.files: {path} is not a file")
        if path.stat().st_size == 0:
            raise PlanError(f"data.files: {path} is empty")


def read_files(files: Sequence[str]) -> str:
    """Return the text of the user's own files, in the order given."""
    check_files(files)
    try:
        return DOCUMENT_BREAK.join(Path(name).expanduser().read_text(encoding="utf-8") for name in files)
    except UnicodeDecodeError as error:
        raise PlanError(f"data.files: a file is not UTF-8 text ({error})") from error


def python_docs() -> str:
    """Return Python's language reference and the docstrings of the standard library's top-level modules."""
    from pydoc_data.topics import topics

    documents = [topics[name] for name in sorted(topics)]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        documents.extend(_docstrings(path.read_text(encoding="utf-8")))
    cleaned = ("\n".join(line.rstrip() for line in text.strip().splitlines()) for text in documents)
    return DOCUMENT_BREAK.join(dict.fromkeys(cleaned))  # inherited copies would leak from training into validation


def _docstrings(source: str) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield text


def load_corpus(
    files: Sequence[str], vocab_size: int, cache: Path, *, by_document: bool = False, tokenizer: Tokenizer | None = None
) -> Corpus:
    """Return the encoded text of `files`, or of Python's own documentation if there are none.

    `by_document` encodes each document alone: a file is one, and two empty lines end one. Without a `tokenizer` one
    with `vocab_size` tokens is trained on the text. Whatever is missing in `cache` is made and stored, each file in one
    atomic step: several processes may call this at once. The entry's name is the hash of text and settings.
    """
    text = read_files(files) if files else _cached_docs(cache)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    key: dict[str, object] = {"text": sha256, "vocab_size": vocab_size}
    key |= {"by_document": by_document, "version": ENCODING_VERSION}
    if tokenizer is not None:
        key["tokenizer"] = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    settings = json.dumps(key, sort_keys=True)
    stem = cache / hashlib.sha256(settings.encode()).hexdigest()[:32]
    tokenizer_file, ids_file = stem.with_suffix(".tokenizer.json"), stem.with_suffix(".npy")
    if not ids_file.exists() or not tokenizer_file.exists():
        tokenizer = tokenizer or train_tokenizer(text, vocab_size)
        encoded = _encoded(tokenizer, text.split(DOCUMENT_BREAK) if by_document else [text])
        _write_atomically(tokenizer_file, lambda path: tokenizer.save(str(path)))
        _write_atomically(ids_file, lambda path: np.save(path, encoded))
    stored: Tokens = np.load(ids_file)
    documents = int(stored[0])
    return Corpus(
        tokenizer=Tokenizer.from_file(str(tokenizer_file)),
        ids=stored[1 + documents :],
        lengths=stored[1 : 1 + documents],
        sha256=sha256,
        characters=len(text),
    )


def _encoded(tokenizer: Tokenizer, documents: Sequence[str]) -> Tokens:
    """[1 + documents + tokens]: how many documents there are, the tokens of each, the ids of all."""
    encoded = [encoding.ids for encoding in tokenizer.encode_batch([text for text in documents if text])]
    lengths = [len(ids) for ids in encoded]
    return np.asarray([len(lengths), *lengths, *chain.from_iterable(encoded)], dtype=np.int32)


def _cached_docs(cache: Path) -> str:
    interpreter = f"{platform.python_implementation()}-{platform.python_version()}"
    path = cache / f"docs-{interpreter}.txt"  # parsing the library takes seconds, and each rank asks
    if not path.exists():
        text = python_docs()
        _write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline=""))
    return path.read_bytes().decode("utf-8")


def _write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as folder:
        temporary = Path(folder) / path.name
        write(temporary)
        os.replace(temporary, path)


def read_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder, or of its tokenizer.json; raises PlanError where there is none."""
    place = Path(path).expanduser()
    file = place / "tokenizer.json" if place.is_dir() else place
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # what the package raises has no class of its own
        raise PlanError(
            f"data.tokenizer={path}: {file} is no tokenizer that can be read ({error}); give the folder of a model "
            "with its tokenizer.json, or data.tokenizer=null to train one on the text"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with at most `vocab_size` tokens; the same text gives the same tokenizer."""
    if vocab_size < 256:
        raise PlanError(f"data.vocab_size={vocab_size} is smaller than the 256 bytes that a byte-level tokenizer needs")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def pack(ids: Tokens, seq_len: int, val_every: int) -> tuple[Tokens, Tokens]:
    """Cut [tokens] into blocks and return (training [B, S], validation [V, S]).

    Every `val_every`-th block is a validation block, whatever the seed; the unfilled last block is left out.
    """
    blocks = len(ids) // seq_len
    if blocks < val_every:
        raise PlanError(
            f"the text has {len(ids)} tokens, too few for data.val_every={val_every} blocks of "
            f"data.seq_len={seq_len}: use more text or smaller numbers"
        )
    rows = ids[: blocks * seq_len].reshape(blocks, seq_len)
    is_validation = np.arange(blocks) % val_every == val_every - 1
    return rows[~is_validation], rows[is_validation]


def divide_documents(corpus: Corpus, seq_len: int, val_every: int) -> tuple[Documents, Documents]:
    """Return training and validation documents: of `val_every` runs of `seq_len` tokens one is for validation.

    A document belongs to the run in which it begins, so that none is cut, whatever the seed.
    """
    starts = np.cumsum(corpus.lengths) - corpus.lengths
    is_validation = starts // seq_len % val_every == val_every - 1
    train, validation = (Documents.chosen(corpus, choice) for choice in (~is_validation, is_validation))
    if min(len(train.ids), len(validation.ids)) < seq_len:
        raise PlanError(
            f"the text has {len(corpus.ids)} tokens in {len(corpus.lengths)} documents, too few for rows of "
            f"data.seq_len={seq_len} with data.val_every={val_every}: use more text or smaller numbers"
        )
    return train, validation


def unigram_entropy(train: Tokens, targets: Tokens, vocab_size: int) -> float:
    """Return the nats per token that token frequencies of `train` (add-one smoothed) cost on `targets`."""
    counts = np.bincount(train.reshape(-1), minlength=vocab_size) + 1.0
    log_probability = np.log(counts / counts.sum())
    return float(-log_probability[targets].mean())
