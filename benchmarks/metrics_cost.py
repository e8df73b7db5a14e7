"""What being watched costs: `./launch.sh bench metrics_cost`. Needs no model and no GPU.

Prints the time of one core: what the coordinator measures in every step, what the HTTP process measures for every
token, and what rank 0 and the HTTP process do for one scrape of /metrics, with eight ranks.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

from paceline.coordinator.block_manager import BlockUsage
from paceline.coordinator.events import CoordinatorStats, RankState
from paceline.coordinator.step_times import StepTimes
from paceline.launcher.serving.admission import Admission
from paceline.launcher.serving.engine_api import EngineInfo
from paceline.launcher.serving.exposition import Exposition
from paceline.launcher.serving.messages import Stats, encode
from paceline.launcher.serving.metrics import ServerMetrics

RANKS = 8


def main() -> None:
    """Measure and print."""
    times = StepTimes()
    clock = time.monotonic

    def measure_step() -> None:
        """What Coordinator and EngineLoop add to a step of theirs."""
        started = clock()
        planned = clock()
        times.plan.add(planned - started)
        times.launch.add(clock() - planned)
        times.requests.add(64)
        times.tokens.add(64)
        asked = clock()
        came = clock()
        times.wait.add(came - asked)
        times.apply.add(clock() - came)
        began = clock()
        times.deliver.add(clock() - began)

    def stats() -> CoordinatorStats:
        return CoordinatorStats(
            waiting=3,
            running=64,
            blocks=BlockUsage(free=1000, cached=500, used=2000),
            steps=100_000,
            preemptions=2,
            prompt_tokens=10**7,
            cached_prompt_tokens=10**6,
            generated_tokens=10**7,
            finished={"stop": 1000, "length": 500},
            step_seconds=times.parts(),
            step_requests=times.requests.copy(),
            step_tokens=times.tokens.copy(),
            ranks=[RankState(rank, 1 << 34, 1 << 36, 1 << 32, 1 << 37, 1 << 36, 0.1, 100_000) for rank in range(RANKS)],
        )

    metrics = ServerMetrics()
    watch = metrics.watch_answer(clock(), 100)
    exposition = Exposition(metrics, Admission(1024), "model")
    info = EngineInfo(
        vocab_size=1,
        max_model_len=1,
        num_blocks=1,
        block_size=1,
        end_ids=(0,),
        tensor_parallel_size=RANKS,
        devices=("GPU",) * RANKS,
    )
    for name, work in (
        ("measuring a step", measure_step),
        ("measuring a token", lambda: watch.tokens(1)),
        ("a scrape, on rank 0", lambda: encode(Stats(0, stats()))),
        ("a scrape, in the HTTP process", lambda: exposition.text(info, stats())),
    ):
        print(f"{name:32}{best_of(work) * 1e6:10.2f} µs")


def best_of(work: Callable[[], object]) -> float:
    """Seconds that the work takes, the least of five measurements of at least 0.2 s each."""
    timer = timeit.Timer(work)
    count, _ = timer.autorange()
    return min(timer.repeat(5, count)) / count


if __name__ == "__main__":
    main()
