"""A checkpoint's own `lm_head.weight` beside a tied embedding: a copy of it, or another matrix, which is refused.

A model with tied embeddings has one matrix for both. Many checkpoints hold it under both names all the same. Where the
two differ, config.json contradicts the weights, and either choice would serve a model that nobody trained.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext

import torch

from paceline.model.checkpoint_files import StoredTensor
from paceline.model.decoder import CausalLM
from paceline.model.errors import CheckpointError, LoadingStopped
from paceline.model.ledger import EMBEDDING, get_parameter
from paceline.model.parameter import Copy
from paceline.model.shard_reader import StopFlag
from paceline.model.staging import PIECE_BYTES, Buffer, StagingMemory


class TiedHeadCheck:
    """Compares one rank's rows of the stored head with those of its embedding, which was loaded before.

    They are read in pieces by the readers of the staging memory, so nothing is held beside its buffers and, for each
    reader, a piece on the device.
    """

    def __init__(self, model: CausalLM, head: StoredTensor, rank: int, staging: StagingMemory, stop: StopFlag) -> None:
        """The head has the embedding's full shape. stop ends the comparison once another rank has met a fault."""
        embedding = get_parameter(model, EMBEDDING)
        self._head = head
        self._rank = rank
        self._staging = staging
        self._stop = stop
        self._stream = None if staging.device.type == "cpu" else torch.cuda.current_stream(staging.device)
        # In ascending order, so that no piece before the first that differs is left out.
        self._pieces = deque(
            piece
            for copy in embedding.weight_loader(embedding, head, None)  # none where a rank holds no row
            for piece in copy.pieces(PIECE_BYTES)
        )
        largest = max((piece.num_bytes for piece in self._pieces), default=0)
        self._buffers = deque(staging.buffers(largest))
        self._faults: dict[int, str] = {}
        """By the first row of the piece."""

    def run(self) -> list[str]:
        """The first place of this rank's rows at which the two differ after the cast that both take, or nothing.

        A file that cannot be read is a fault, too. Raises LoadingStopped where another rank's fault ended it.
        """
        readers = self._staging.read(self._read)
        try:
            wait(readers)
        except BaseException:
            self._pieces.clear()
            self._staging.end_reading()  # the caller closes the files
            raise
        for reader in readers:
            reader.result()
        if self._faults:
            return [self._faults[min(self._faults)]]
        if self._pieces:
            raise LoadingStopped("loading was stopped, since another rank met a fault")
        return []

    def _read(self) -> None:
        """One reader: compare pieces until there are no more, or this or another rank has met a fault."""
        buffer: Buffer = self._buffers.popleft()
        with self._on_stream():
            while not self._stop.is_set():
                try:
                    piece = self._pieces.popleft()
                except IndexError:
                    return
                try:
                    fault = self._compare(piece, buffer.result())
                except CheckpointError as error:
                    fault = str(error)
                if fault:
                    self._faults[piece.source[0].start] = fault
                    self._stop.set()

    def _on_stream(self) -> AbstractContextManager[object]:
        """The caller's, on which the embedding was written; each thread has a current one of its own."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _compare(self, piece: Copy, buffer: torch.Tensor) -> str:
        embedding = piece.destination
        # Over to the device before the cast, which the embedding took there, too.
        head = piece.tensor.read(piece.source, buffer).to(embedding.device).to(embedding.dtype)
        if torch.equal(head, embedding):  # waits for the device, so the buffer is free again
            return ""
        place = torch.unravel_index((head != embedding).flatten().to(torch.uint8).argmax(), head.shape)
        index = [part.start + int(number) for part, number in zip(piece.source, place, strict=True)]
        head_name = f"tensor {self._head.name} in {self._head.file_name}"
        what = f"{head_name} differs from {EMBEDDING}, to which config.json ties it"
        where = f"first in the rows of rank {self._rank} at {index}"
        values = f"{head[place].item()!r} and not {embedding[place].item()!r}"
        remedy = "set tie_word_embeddings to false in config.json to load both, or remove the tensor"
        return f"{what}, {where}: {values}; {remedy}"
