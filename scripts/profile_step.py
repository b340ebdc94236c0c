"""Profile a training step of the engine in every execution: kernels, time of the GPU and of the host, and FLOP/s.

scripts/profile_step.py --batch-sizes 64,1024 --device cuda
"""

import argparse
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from iep.bench.compare import seconds
from iep.bench.measure_engine import Step
from iep.bench.strategy import parse_strategies
from iep.bench.workload import generated
from iep.config import read_config
from iep.execution_engine.assembly import fit_template
from iep.execution_engine.parts import ProgramSample
from iep.models.network import Network
from iep.runtime.devices import place

PEAKS = {"H100": (494.7e12, 989.4e12), "H200": (494.7e12, 989.4e12), "A100": (156e12, 312e12)}
"""Dense TF32 and bfloat16 FLOP/s of the SXM variants, from NVIDIA's data sheets."""
STRATEGIES = "lookahead+sharing+float32,lookahead+sharing+bfloat16"
KERNELS = ",lookahead+sharing+triton+bfloat16,lookahead+sharing+cuda_graph+bfloat16"
SHOWN = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-sizes", default="64,1024")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--feature-shape", type=int, nargs=3, default=(1024, 14, 14))
    parser.add_argument("settings", nargs="*", help="engine.KEY=VALUE")
    given = parser.parse_intermixed_args()
    device = torch.device(given.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
    peaks = next((peaks for part, peaks in PEAKS.items() if part in name), None)
    strategies = parse_strategies(STRATEGIES + (KERNELS if device.type == "cuda" else ""))
    print(f"A training step on {name}, with random features; torch {torch.__version__}")
    for size in map(int, given.batch_sizes.split(",")):
        workload = generated(size, 1, tuple(given.feature_shape), size, 0)
        config = read_config(None, given.settings).engine
        engine = place(Network.new("engine", config, workload.vocab, given.feature_shape).module, device)
        minibatch = workload.minibatch(0, size, device)
        if device.type == "cuda":
            fit_template(engine, ProgramSample(workload.programs_QL, workload.image_idxs_Q, ""), size, sharing=True)
        with FlopCounterMode(display=False) as counter:
            Step(engine.train(), strategies[0], minibatch, device).step()
        flops, parameters = counter.get_total_flops(), [*engine.parameters()]
        for strategy in strategies:
            step = Step(engine, strategy, minibatch, device)

            def run(step: Step = step, parameters: list = parameters) -> None:
                for each in parameters:
                    each.grad = None
                step.step()

            for _ in range(3):
                run()
            wall = median(seconds(run, device) for _ in range(10))
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
                run()
            total = [each for each in found.key_averages() if each.device_type == torch.autograd.DeviceType.CUDA]
            on_gpu = sum(each.self_device_time_total for each in total) / 1e3
            text = f"{size} questions, {strategy.name}: {1e3 * wall:.2f} ms, "
            if device.type == "cuda":
                text += f"{sum(each.count for each in total)} kernels, "
            text += f"{on_gpu:.2f} ms on the GPU, {flops / wall / 1e12:.2f} TFLOP/s"
            if peaks is not None:
                text += f", {100 * flops / wall / peaks[strategy.precision == 'bfloat16']:.1f}% of the peak"
            print("\n" + text)
            for each in sorted(total, key=lambda each: -each.self_device_time_total)[:SHOWN]:
                print(f"  {each.self_device_time_total / 1e3:9.3f} ms {each.count:6d} x {each.key[:90]}")


if __name__ == "__main__":
    main()
