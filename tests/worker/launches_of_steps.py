"""What the start of an engine on a GPU compiles, against what steps launch; test_launches.py runs it without a GPU.

No kernel is compiled: Triton asks a hook first, which notes what for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
import triton
from models import MODELS
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from paceline.coordinator.config import EngineConfig
from paceline.kernels.stand_ins import StandIns
from paceline.kernels.stream_cut import BUCKETS
from paceline.model.communicator import Communicator, ProcessGroupCommunicator, SingleRank
from paceline.model.config import ModelConfig
from paceline.model.registry import MODEL_CLASSES
from paceline.model.shard_plan import ShardPlan
from paceline.worker.batch_state import BatchState, StepShape
from paceline.worker.product_tuning import ProductTuner
from paceline.worker.sampler import Sampler
from paceline.worker.step_graphs import GraphShapes
from paceline.worker.tuning_cache import Choice
from paceline.worker.worker import Worker

GPU = torch.device("cuda", 0)
MODEL = MODELS["qwen3-0.6b"] | {"num_hidden_layers": 3, "max_position_embeddings": 4096, "eos_token_id": None}


def prompts_of(worker: Worker) -> StepShape:
    """A step that has no graph, where the host knows that no row decodes."""
    return StepShape(worker._config.max_batched_tokens - 1, 1, has_prefills=True, has_decodes=False)


class Hopper:
    """What Triton asks of a GPU's driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


Known = Callable[[int], Choice]
"""What is known of so many products that are measured together."""


def everywhere(count: int) -> Choice:
    """They are streamed at any number of rows."""
    return dict.fromkeys(BUCKETS, (True,) * count)


def nowhere(count: int) -> Choice:
    return dict.fromkeys(BUCKETS, (False,) * count)


def unmeasured(count: int) -> Choice:
    return {}


def in_one_bucket(count: int) -> Choice:
    return {bucket: (bucket == 192,) * count for bucket in BUCKETS}


def every_other(count: int) -> Choice:
    """Of a layer's products every other one, and the head."""
    return dict.fromkeys(BUCKETS, (False, True, False, True)[-count:])


def of_layers(count: int) -> Choice:
    """The same, but nothing is known of the head."""
    return {} if count == 1 else every_other(count)


class Cache:
    """One that says what is known."""

    def __init__(self, known: Known) -> None:
        self._known = known

    def read(self, name: str, count: int) -> Choice:
        return self._known(count)

    def write(self, name: str, choice: Choice) -> None:
        pass


class Noted:
    """A hook of Triton's, by which nothing is compiled, and the variants of kernels that it was called for."""

    def __init__(self) -> None:
        self.variants: set[str] = set()

    def __call__(self, *, key: str, fn: SimpleNamespace, **_: object) -> bool:
        self.variants.add(f"{fn.name} {key}")
        return True


def last_of(num_ranks: int) -> Communicator:
    """The last rank of a group that exchanges nothing, as stand-ins are not exchanged."""
    comm = SingleRank() if num_ranks == 1 else object.__new__(ProcessGroupCommunicator)
    comm.rank, comm.size = num_ranks - 1, num_ranks
    return comm


def worker_of(config: ModelConfig, engine: EngineConfig, comm: Communicator) -> Worker:
    """A worker that has a model and all else that steps need, without memory."""
    worker = object.__new__(Worker)
    worker._config = engine
    worker._ranks = SimpleNamespace(device=GPU, rank=comm.rank, size=comm.size)
    worker._plan = ShardPlan(config, comm.size)
    worker.model_config = config
    worker._dtype = torch.bfloat16
    worker._model = MODEL_CLASSES[config.architecture](config, comm, torch.bfloat16, engine.max_model_len)
    worker._model.place_table(torch.device("cpu"))
    worker.state = BatchState(engine.max_num_seqs, engine.max_model_len, engine.block_size, GPU)
    worker._sampler = Sampler(worker.state, comm, worker._model.vocab, config.vocab_size)
    return worker


def noted(body: Callable[[], None]) -> set[str]:
    """The variants that a function's launches need."""
    triton.knobs.runtime.jit_cache_hook = hook = Noted()
    with torch.inference_mode(), StandIns(GPU):
        body()
    return hook.variants


def launch_all_steps(worker: Worker) -> None:
    """Steps of every shape that has a graph, and some that have none; draws and filters by rules of any rows."""
    most = worker.state.num_slots
    shapes = GraphShapes(most, worker._config.max_batched_tokens).all()
    tokens = worker._config.max_batched_tokens - 1
    for shape in [*shapes, StepShape(tokens, 1, True), StepShape(tokens, most, True), prompts_of(worker)]:
        worker._launch_step(shape)
    for num_rows in sorted({1, min(3, most), most // 3 + 1, most}):
        for dtype in (worker._dtype, torch.float32):
            worker._sampler.choose_filtered(
                torch.empty((num_rows, worker._model.vocab.padded), dtype=dtype, device=GPU)
            )


def launch_both_ways(launches: Callable[[], None]) -> float:
    """In the place of measuring."""
    launches()
    return 1.0


def check(
    engine: EngineConfig,
    num_ranks: int = 1,
    *,
    known: Known = everywhere,
    chosen: Sequence[Known] = (),
    **changes: object,
) -> None:
    """chosen: what may be chosen by measuring; without any, all is known."""
    config = ModelConfig.from_dict(MODEL | changes)
    with StandIns(GPU):
        worker = worker_of(config, engine, last_of(num_ranks))
        tuner = ProductTuner(worker._model, Cache(known))
    compiled = noted(lambda: worker._compile_kernels(tuner, lambda: None))
    with StandIns(GPU):
        worker._kv_caches = worker._make_caches(100)
    missed = noted(lambda: tuner.measure(launch_both_ways)) - compiled
    for choice in chosen or (known,):
        with StandIns(GPU):
            ProductTuner(worker._model, Cache(choice)).apply()
        missed |= noted(lambda: launch_all_steps(worker)) - compiled
    if missed:
        raise RuntimeError("the start does not compile:\n" + "\n".join(sorted(missed)))
    too_many = [name for name in noted(lambda: worker._launch_step(prompts_of(worker))) if "decode" in name]
    if too_many:
        raise RuntimeError("a step of prompts alone launches:\n" + "\n".join(too_many))
    print(f"{len(compiled)} variants, {sum('streamed_kernel' in name for name in compiled)} of streamed products")


def main() -> None:
    driver.set_active(Hopper())
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 << 10)
    torch.cuda.get_device_properties = lambda device=None: properties
    for slots in (1, 21, 250):
        check(EngineConfig(model="", max_num_seqs=slots, max_batched_tokens=8192, max_model_len=2000))
    small = EngineConfig(model="", max_num_seqs=50, max_batched_tokens=300, max_model_len=500)
    check(small, known=nowhere)
    check(small, known=unmeasured, chosen=(everywhere, nowhere, every_other))
    check(small, known=unmeasured, chosen=(everywhere, nowhere), vocab_size=49152, head_dim=80)
    check(small, known=of_layers, chosen=(every_other,))
    check(EngineConfig(model="", max_num_seqs=250, max_batched_tokens=300, max_model_len=500), known=in_one_bucket)
    check(small, vocab_size=49152, head_dim=80)
    check(small, num_ranks=3)


if __name__ == "__main__":
    main()
