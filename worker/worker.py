"""One rank's executor of step plans: model shard, cache, batch state and sampler."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from paceline.coordinator.config import EngineConfig
from paceline.coordinator.errors import EngineError, InputError
from paceline.coordinator.messages import Admission, Limits, RowSampling, StepPlan, StepRows
from paceline.kernels.launch import compile_only, compute_keys
from paceline.model.config import ModelConfig
from paceline.model.context import KVCache
from paceline.model.decoder import Hidden
from paceline.model.garbage import without_collector
from paceline.model.rope import check_max_model_len, cos_sin_bytes
from paceline.model.shard_plan import ShardPlan
from paceline.model.shard_reader import StopFlag
from paceline.model.staging import StagingMemory
from paceline.model.weights import load_model
from paceline.worker.batch_state import BatchState, HostRows, StepShape
from paceline.worker.memory import RankMemory, check_room_for_angles, device_memory, size_cache
from paceline.worker.pending import PendingResult
from paceline.worker.product_tuning import ProductTuner, gpu_seconds
from paceline.worker.prompt_scorer import PromptScorer, PromptScores
from paceline.worker.ranks import RankGroup
from paceline.worker.sampler import Asked, SampledLogprobs, Sampler
from paceline.worker.step_graphs import GraphShapes, StepGraphs
from paceline.worker.tuning_cache import TuningCache

logger = logging.getLogger(__name__)

CPU_WARM_UP_TOKENS = 4
MAX_COMPILERS = 16
EVERY_RULE = RowSampling(
    temperature=1.0,
    seed=0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
    min_tokens=1,
    stop_ids=(0,),
    logprobs=20,
)
"""Rules that send a row through all that a sampler does."""
SCORED = RowSampling(temperature=0.0, seed=0, prompt_logprobs=20)
"""Rules by which every token of a prompt is scored."""


@dataclass(frozen=True)
class _Lockstep:
    """What must be the same on every rank in every step."""

    step: int
    rows: int
    tokens: int


class Worker:
    """Runs the steps of one rank. Every rank of a group makes its Worker and executes the same plans in one order."""

    @without_collector()
    def __init__(self, config: EngineConfig, ranks: RankGroup, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Load the model's shard and make the cache; errors of any rank are raised on all (InputError).

        meanwhile: is called once while other processes compile kernels, at a first start; it may not use a collective.
        """
        self._config = config
        self._ranks = ranks
        self._copy_stream = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None
        self._step_graphs: StepGraphs[torch.Tensor] | None = None
        self._filtered_graphs: StepGraphs[torch.Tensor] | None = None
        self._hidden_graphs: StepGraphs[Hidden] | None = None
        if ranks.device.type == "cuda":
            compute_keys()  # beside what waits for files
        with ranks.together():
            self._read_config()
        with StagingMemory(ranks.device, ranks.size) as staging, ranks.together() as stop:
            self._load(staging, stop)
        if ranks.device.type == "cuda":
            with ranks.together():
                self._choose_kernels(meanwhile)
        in_use = self._warm_up()
        num_blocks = 0
        with ranks.together():
            num_blocks = self._count_blocks(in_use)
        # The cache is as large as the poorest rank can hold, the same on all.
        num_blocks = min(int(blocks) for blocks in ranks.exchange(str(num_blocks)))
        self.limits = Limits(self.model_config.vocab_size, self._max_model_len, num_blocks)
        with ranks.together():
            self._kv_caches = self._make_caches(num_blocks)
        if ranks.device.type == "cuda":
            self._capture_graphs()
        self.memory = self._measure_memory()

    def _read_config(self) -> None:
        self.model_config = ModelConfig.from_folder(Path(self._config.model))
        self._max_model_len = self._config.max_model_len or self.model_config.max_position_embeddings
        check_max_model_len(self.model_config, self._max_model_len)
        angles = cos_sin_bytes(self.model_config, self._max_model_len)
        check_room_for_angles(angles, self._max_model_len, self._ranks.size)
        name = self.model_config.dtype if self._config.dtype == "auto" else self._config.dtype
        self._dtype = getattr(torch, name)
        self._plan = ShardPlan(self.model_config, self._ranks.size)

    def _load(self, staging: StagingMemory, stop: StopFlag) -> None:
        self._model = load_model(
            Path(self._config.model),
            self.model_config,
            self._ranks.communicator,
            staging,
            self._dtype,
            load_format=self._config.load_format,
            max_model_len=self._max_model_len,
            stop=stop,
        )
        try:
            self.state = BatchState(
                self._config.max_num_seqs, self._max_model_len, self._config.block_size, self._ranks.device
            )
        except RuntimeError as error:
            raise InputError(
                f"tables for {self._config.max_num_seqs} requests of {self._max_model_len} tokens do not fit in "
                "memory; lower --max-num-seqs or --max-model-len"
            ) from error
        vocab_size = self.model_config.vocab_size
        self._sampler = Sampler(self.state, self._ranks.communicator, self._model.vocab, vocab_size)
        self._scorer = PromptScorer(self.state, self._ranks.communicator, self._model.logits, vocab_size)

    def _choose_kernels(self, meanwhile: Callable[[], object]) -> None:
        """Compile what the steps will launch, and choose how matrix products are computed.

        As the user's cache has it, or else by measuring them: then everything that any choice launches is compiled at
        once, which is little more.
        """
        start = time.monotonic()
        tuner = ProductTuner(self._model, TuningCache.of(self._ranks.device))
        self._compile_kernels(tuner, meanwhile)
        if tuner.unknown:
            with torch.inference_mode():
                tuner.measure(gpu_seconds)
            torch.cuda.empty_cache()  # of what the measuring took, which the cache shall have
            logger.info("compiled kernels, and chose those of matrix products, in %.1f s", time.monotonic() - start)
        tuner.apply()

    @torch.inference_mode()
    def _compile_kernels(self, tuner: ProductTuner, meanwhile: Callable[[], object]) -> None:
        """Compile what steps launch, side by side: one after the other takes most of a first start's time.

        A kernel's variants follow from the types and widths of the model and from powers of two of the rows. What is
        missed here is compiled when it is first launched.
        """
        processes = min(max(len(os.sched_getaffinity(0)) // self._ranks.size, 1), MAX_COMPILERS)
        with compile_only(self._ranks.device, processes, meanwhile), self._model.two_layers():
            self._kv_caches = self._make_caches(1)
            # In this order: the kernels that take longest to compile, those of attention, are begun first.
            for _ in tuner.ways():
                self._launch_typical_steps()
            tuner.launch_all()
            self.state.compile_stores()

    def _launch_typical_steps(self) -> None:
        shapes = GraphShapes(self.state.num_slots, self._config.max_batched_tokens).typical()
        for shape in shapes:
            # As in _launch_step, but for what makes ids of the keys: of such operations torch finds the shape by
            # code that imports its compiler, for as long as all of this takes.
            keys = self._sampler.draw(self._model.logits(*self._launch_hidden(shape)))
            self.state.advance(shape, keys)
        for num_rows in {shape.num_rows for shape in shapes}:
            self._sampler.compile_rules(num_rows, self._dtype)

    def _block_shape(self) -> tuple[int, int, int]:
        kv_heads = self._plan.kv_heads(self._ranks.rank).padded
        return self._config.block_size, kv_heads, self.model_config.head_dim

    def _make_caches(self, num_blocks: int) -> list[KVCache]:
        """Memory as it comes: attention uses nothing that was not stored, and untouched pages cost a CPU nothing."""
        shape = (num_blocks, *self._block_shape())
        options = {"dtype": self._dtype, "device": self._ranks.device}
        try:
            return [
                (torch.empty(shape, **options), torch.empty(shape, **options))
                for _ in range(self.model_config.num_hidden_layers)
            ]
        except RuntimeError as error:  # torch says so of memory, on the CPU and on a GPU, and of sizes past 64 bits
            raise InputError(f"a cache of {num_blocks} blocks does not fit in memory; lower --num-blocks") from error

    def _warm_up(self) -> int:
        """Run the largest prefill, scored, and the largest decode of rows that ask the sampler for everything.

        Returns the bytes that weights and workspace took.

        The steps go the way of any other, over a cache of one block that is thrown away; on the CPU, where memory is
        not the limit, small ones do.
        """
        on_gpu = self._ranks.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._ranks.device)
            weights = torch.cuda.memory_allocated(self._ranks.device)
        self._kv_caches = self._make_caches(1)
        tokens = self._config.max_batched_tokens if on_gpu else min(CPU_WARM_UP_TOKENS, self._config.max_batched_tokens)
        query_len = min(tokens, self._max_model_len - 1)  # the sampled token needs a place too
        prompts = min(tokens // query_len, self._config.max_num_seqs)
        decodes = min(tokens, self._config.max_num_seqs)
        for rows, count, sampling in ((prompts, query_len, SCORED), (decodes, 1, EVERY_RULE)):
            blocks = [0] * -(-count // self._config.block_size)
            slots = range(rows)
            admissions = [Admission(slot, [0] * count, count, 0, blocks, sampling) for slot in slots]
            masks = [(slot, self._mask_of_all()) for slot in slots] if sampling is EVERY_RULE else []
            plan = StepPlan(-1, admissions=admissions, rows=StepRows(slots, [count] * rows, [True] * rows), masks=masks)
            if self._ranks.rank == 0:
                self.execute(plan).result()
            else:
                self.follow(plan)
        if not on_gpu:
            return sum(parameter.nbytes for parameter in self._model.parameters())
        workspace = torch.cuda.max_memory_allocated(self._ranks.device) - weights
        # What the allocator holds now it keeps for the steps that have no CUDA graph: to ask the driver
        # for memory again would take longer than many a step. The graphs have a workspace of their own.
        return torch.cuda.memory_reserved(self._ranks.device) + workspace

    def _mask_of_all(self) -> bytes:
        """A mask that forbids no token."""
        return b"\xff" * (-(-self.model_config.vocab_size // 32) * 4)

    def _count_blocks(self, in_use: int) -> int:
        block_size, kv_heads, head_dim = self._block_shape()
        per_layer = 2 * block_size * kv_heads * head_dim * self._dtype.itemsize
        block_bytes = per_layer * self.model_config.num_hidden_layers
        return size_cache(self._config, self._ranks.device, block_bytes, self._max_model_len, in_use, self._ranks.size)

    def _measure_memory(self) -> RankMemory:
        device = self._ranks.device
        weights = sum(parameter.nbytes for parameter in self._model.parameters())
        cache = sum(tensor.nbytes for layer in self._kv_caches for tensor in layer)
        workspace = self.state.nbytes
        if device.type == "cuda":
            workspace = torch.cuda.memory_reserved(device) - weights - cache
        return RankMemory(weights, cache, workspace, device_memory(device))

    @torch.inference_mode()
    def _capture_graphs(self) -> None:
        shared = self._model.two_layers, self.state, self._config.max_batched_tokens, torch.cuda.graph_pool_handle()
        self._step_graphs = StepGraphs(self._launch_step, *shared)
        self._filtered_graphs = StepGraphs(partial(self._launch_step, filtered=True), *shared)
        self._hidden_graphs = StepGraphs(self._launch_hidden, *shared)
        self._step_graphs.capture_all()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingResult:
        """Start one step on the rank that reads its result; on a GPU this returns while it runs."""
        rows, token_ids, logprobs, scores = self._run(plan, report=True)
        return PendingResult(plan.step, token_ids, logprobs, scores, rows, self._copy_stream)

    @torch.inference_mode()
    def follow(self, plan: StepPlan) -> None:
        """Start the same step on any other rank, where nothing of its result is brought to the host."""
        self._run(plan, report=False)

    def _run(
        self, plan: StepPlan, report: bool
    ) -> tuple[HostRows, torch.Tensor, SampledLogprobs | None, PromptScores | None]:
        """The rows, token ids [R or more] of them, and with report the log-probabilities that they ask for."""
        rows = self.state.apply(plan)
        if self._config.check_lockstep:
            self._check_lockstep(_Lockstep(plan.step, rows.shape.num_rows, rows.shape.num_tokens))
        logprobs = scores = None
        scored = self._scorer.rows_of(rows.rows)
        asked = self._sampler.asked(rows)
        if not scored and not plan.masks and asked is not Asked.RULES:
            token_ids = self._run_whole(rows.shape, filtered=asked is Asked.FILTERS)
        else:
            if scored:
                every, last = self._launch_every_token(rows.shape)
                scores = self._scorer.score(every, scored, report=report)
                hidden = _select(every, last)
            else:
                hidden = self._run_hidden(rows.shape)
            logits = self._model.logits(*hidden)[: rows.shape.num_rows]
            token_ids, logprobs = self._sampler.sample(logits, rows, plan.masks, report=report)
            self.state.advance(rows.shape, token_ids)
        self.state.count(rows)
        return rows, token_ids, logprobs, scores

    def _run_whole(self, shape: StepShape, *, filtered: bool) -> torch.Tensor:
        graphs = self._filtered_graphs if filtered else self._step_graphs
        token_ids = None if graphs is None else graphs.run(shape)
        # The next step overwrites a graph's result.
        return self._launch_step(shape, filtered=filtered) if token_ids is None else token_ids.clone()

    def _launch_step(self, shape: StepShape, *, filtered: bool = False) -> torch.Tensor:
        """A whole step of rows that ask for a draw, with filtered for one among what filters leave: token ids [R]."""
        choose = self._sampler.choose_filtered if filtered else self._sampler.choose
        token_ids = choose(self._model.logits(*self._launch_hidden(shape)))
        self.state.advance(shape, token_ids)
        return token_ids

    def _run_hidden(self, shape: StepShape) -> Hidden:
        hidden = None if self._hidden_graphs is None else self._hidden_graphs.run(shape)
        return self._launch_hidden(shape) if hidden is None else hidden

    def _launch_every_token(self, shape: StepShape) -> tuple[Hidden, torch.Tensor | None]:
        """The same of every token of the step, and which of them are the rows' last ones (None: all)."""
        input_ids, context = self.state.inputs(shape, self._kv_caches)
        every: Hidden = self._model(input_ids, replace(context, logits_tokens=None))
        return every, context.logits_tokens

    def _launch_hidden(self, shape: StepShape) -> Hidden:
        """A step without its sampling: what the logits of its rows come from."""
        input_ids, context = self.state.inputs(shape, self._kv_caches)
        hidden: Hidden = self._model(input_ids, context)
        return hidden

    def _check_lockstep(self, mine: _Lockstep) -> None:
        """Raise EngineError where another rank runs another step than this one (a debugging aid; it synchronises)."""
        values = torch.tensor([mine.step, mine.rows, mine.tokens], device=self._ranks.device)
        highest = self._ranks.communicator.all_reduce_max(torch.cat([values, -values]))
        if not torch.equal(highest[:3], -highest[3:]):
            raise EngineError(f"ranks have parted: this one runs {mine}, the highest values are {highest[:3].tolist()}")


def _select(hidden: Hidden, tokens: torch.Tensor | None) -> Hidden:
    if tokens is None:
        return hidden
    stream, residual = hidden
    return stream.index_select(0, tokens), None if residual is None else residual.index_select(0, tokens)
