"""Compare the speed and memory of two checkouts of iep, which run the same steps in turns, in one process each.

    git worktree add ../before 9641041 && (cd ../before && make .venv/installed)
    python scripts/compare_commits.py ../before . --threads 1,2 --rounds 15 --out runs/commits

Each checkout runs in its own environment (`.venv`) on the same programs, features and weights. Full-size cases take
minutes. Planning is measured in seconds of the processor.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import accumulate, product
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from iep.config import EngineConfig

try:
    from iep.execution_engine.assembly import make_engine
except ModuleNotFoundError:  # an earlier checkout
    from iep.models.build import make_engine

FULL = {"feature_dim": 1024, "feature_height": 14, "feature_width": 14, "module_dim": 128, "stem_widths": (128,)}
SMALL = {"feature_dim": 16, "feature_height": 7, "feature_width": 7, "module_dim": 16, "stem_widths": (16,)}
SMALL |= {"classifier_projection": 16, "classifier_hidden": (32,)}
DEMO = {"feature_dim": 64, "feature_height": 14, "feature_width": 21, "module_dim": 32, "scene": "stem"}
DEMO |= {"stem_widths": (), "stem_stride": 2, "stem_norm": True}
DEMO |= {"initialization": "torch", "classifier_projection": 128, "classifier_hidden": (256,)}
ENGINES = {"full": FULL, "small": SMALL, "demo": DEMO}
CASES = {
    "full size, inference": {"engine": "full", "batch": 256, "training": False},
    "full size, training": {"engine": "full", "batch": 64, "training": True},
    "full size, sharing, bfloat16, inference": {
        **{"engine": "full", "batch": 256, "training": False, "sharing": True, "bfloat16": True},
    },
    "small, inference": {"engine": "small", "batch": 256, "training": False},
    "small, training": {"engine": "small", "batch": 256, "training": True},
    "demo, training": {"engine": "demo", "batch": 256, "training": True, "sharing": True},
}
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647"}  # see docs/guide.md
SCHEDULERS = ("vanilla", "standard", "improved", "height", "agenda", "lookahead")


class Worker:
    """A process that runs one checkout. It reads requests and writes results, each a line of JSON."""

    def __init__(self, checkout: Path, programs: Path):
        python = checkout.resolve() / ".venv/bin/python"
        command = [str(python), "-W", "ignore", str(Path(__file__).resolve()), "--worker", str(programs)]
        self.process = subprocess.Popen(
            command,
            cwd=checkout,
            env={**os.environ, **KEEP_FREED_MEMORY, "PYTHONPATH": str(checkout.resolve())},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __call__(self, what: str, **arguments: object) -> float:
        """Return a measurement of the checkout."""
        print(json.dumps([what, arguments]), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args[0]} ended in {what} {arguments}")
        return json.loads(line)


def main() -> None:
    """Compare the checkouts that the command line names."""
    # Imported here, because the earlier checkout, which runs this file as a worker, may not have them.
    from iep.bench.compare import Benchmark, Case, Competitor, run_benchmark

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("now", type=Path)
    parser.add_argument("--threads", default="1,2", help="Comma-separated list of numbers of CPU threads.")
    parser.add_argument("--rounds", type=int, default=15, help="Number of rounds of measuring.")
    parser.add_argument("--only", default="", help="Run only cases whose names begin with this text, such as planning.")
    parser.add_argument("--out", type=Path, help="Directory for all results (JSON).")
    options = parser.parse_args()
    programs = options.before / ".compared_programs.npz"
    workers = {name: Worker(getattr(options, name), programs) for name in ("before", "now")}
    workers["before"]("programs")

    def case(name: str, threads: int, what: str, counted: str | None, **arguments: object) -> Case:
        """Return the comparison of both checkouts: `what` is timed, and `counted` is measured once."""

        def competitor(checkout: str, worker: Worker) -> Competitor:
            def measure() -> dict[str, float]:
                worker("threads", count=threads)
                return {what: worker(what, **arguments)}

            return Competitor(
                checkout, measure, facts=lambda: {counted: worker(counted, **arguments)} if counted else {}
            )

        batch = arguments["batch"]
        setting = {"case": name, "threads": threads, "batch": batch}
        return Case(setting, batch, [competitor(*each) for each in workers.items()], "before")

    def cases() -> Iterator[Case]:
        for threads, (name, arguments) in product(map(int, options.threads.split(",")), CASES.items()):
            counted = "memory" if arguments["training"] else None
            yield case(name, threads, "step", counted, **arguments)
        for batching, batch in product(SCHEDULERS, (64, 256, 1024)):
            yield case(f"planning, {batching}", 1, "planning", "calls", batching=batching, batch=batch)

    commits = [
        subprocess.run(["git", "log", "-1", "--format=%h"], cwd=path, capture_output=True, text=True).stdout.strip()
        for path in (options.before, options.now)
    ]
    chosen = (each for each in cases() if each.setting["case"].startswith(options.only))
    benchmark = Benchmark(f"before: {commits[0]}, now: {commits[1]}", chosen, "sample")
    run_benchmark(benchmark, options.rounds, math.inf, " ".join(["python", *sys.argv]), "commits", options.out)


def serve(programs: Path) -> None:
    """Run the measurements that the standard input requests, until it ends."""
    steps = Steps(programs)
    for line in sys.stdin:
        what, arguments = json.loads(line)
        print(json.dumps(getattr(steps, what)(**arguments)), flush=True)


class Steps:
    """The measurements of the checkout that this process runs."""

    def __init__(self, programs: Path):
        self.path, self.made = programs, {}

    def programs(self) -> int:
        """Generate the programs that both checkouts run."""
        from iep.bench.workload import generated  # only the earlier checkout generates them

        made = generated(1024, 10, (8, 2, 2), largest=16)
        np.savez(self.path, tokens=np.array(made.vocab.program), programs=made.programs_QL, images=made.image_idxs_Q)
        return len(made.programs_QL)

    def threads(self, count: int) -> int:
        """Set PyTorch's number of threads."""
        torch.set_num_threads(count)
        return count

    def step(self, **case: object) -> float:
        """Return the seconds of a forward pass, in training with loss and backward pass."""
        run = self._run(**case)
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    def memory(self, **case: object) -> int:
        """Return the most bytes that PyTorch's allocator holds at one time within a step."""
        run = self._run(**case)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            run()
        events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
        return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))

    def planning(self, batching: str, batch: int) -> float:
        """Return the processor's seconds of planning a minibatch."""
        engine, programs = self._engine("small"), self._data()["programs"][:batch]
        began = time.process_time()
        engine.plan(programs, None, batching, False)
        return time.process_time() - began

    def calls(self, batching: str, batch: int) -> int:
        """Return the number of module calls of a minibatch."""
        return len(self._engine("small").plan(self._data()["programs"][:batch], None, batching, False).schedule)

    def _once(self, key: object, make: object) -> object:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def _data(self) -> dict:
        return self._once("data", lambda: dict(np.load(self.path)))

    def _engine(self, size: str) -> object:
        def make() -> object:
            torch.manual_seed(0)
            tokens = [str(each) for each in self._data()["tokens"]]
            engine = make_engine(tokens, 28, **{**asdict(EngineConfig()), **ENGINES[size]})
            return engine.to(memory_format=torch.channels_last)

        return self._once(size, make)

    def _run(self, engine: str, batch: int, training: bool, sharing: bool = False, bfloat16: bool = False) -> object:
        network = self._engine(engine)
        rows = np.unique(self._data()["images"][:batch], return_inverse=True)[1] if sharing else None
        plan = network.plan(self._data()["programs"][:batch], rows, sharing=sharing)
        sides = (ENGINES[engine][f"feature_{side}"] for side in ("dim", "height", "width"))
        shape = (batch if rows is None else int(rows.max()) + 1, *sides)
        features = self._once(shape, lambda: torch.rand(shape).to(memory_format=torch.channels_last))

        def run() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16), torch.inference_mode(not training):
                scores = network(features, plan)
            if training:
                functional.cross_entropy(scores.float(), torch.arange(batch) % 28).backward()

        network.zero_grad(set_to_none=True)
        return run


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(Path(sys.argv[2]))
    else:
        main()
