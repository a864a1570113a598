"""Local embeddings with all-MiniLM-L6-v2 (8-bit weights). Nothing is downloaded at run time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from tokenizers import Tokenizer

from knowledge_ingest.settings import settings

#: Limit of the model for one text; longer ones are truncated.
_MOST_TOKENS: Final = 256
_CHUNK_TOKENS: Final = 200
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])\s*|\n{2,}")


def chunks(text: str) -> list[str]:
    """Split a text into chunks of whole sentences that fit the model. Deterministic."""
    found: list[str] = []
    free = 0
    for sentence, length in _sentences(text):
        if length <= free:
            found[-1] += f" {sentence}"
            free -= length
        else:
            found.append(sentence)
            free = _CHUNK_TOKENS - length
    return found


def embed(texts: list[str]) -> list[list[float]]:
    """A unit vector for each text. Blocks for some milliseconds per text."""
    encoded = _tokenizer(_MOST_TOKENS).encode_batch(texts)
    mask = np.array([each.attention_mask for each in encoded], np.int64)
    inputs = {
        "input_ids": np.array([each.ids for each in encoded], np.int64),
        "attention_mask": mask,
        "token_type_ids": np.array([each.type_ids for each in encoded], np.int64),
    }
    hidden = _model().run(None, inputs)[0]
    mean = (hidden * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
    vectors: list[list[float]] = (mean / np.linalg.norm(mean, axis=1, keepdims=True)).tolist()
    return vectors


def _sentences(text: str) -> Iterator[tuple[str, int]]:
    """Sentences with their numbers of tokens. A sentence that exceeds the limit is split."""
    for sentence in _SENTENCE_END.split(text):
        spans = _tokenizer(None).encode(sentence, add_special_tokens=False).offsets
        for at in range(0, len(spans), _CHUNK_TOKENS):
            part = spans[at : at + _CHUNK_TOKENS]
            yield sentence[part[0][0] : part[-1][1]], len(part)


@cache
def _tokenizer(most: int | None) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(settings.minilm_tokenizer))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if most is not None:
        tokenizer.enable_padding()
        tokenizer.enable_truncation(most)
    return tokenizer


@cache
def _model() -> Any:
    options = onnxruntime.SessionOptions()
    # A worker embeds several documents concurrently, each on one core.
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(settings.minilm_model), options, providers=["CPUExecutionProvider"])
