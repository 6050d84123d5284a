"""What the benchmarks share: precisions, turns, memory, processes that measure, and tables.

A benchmark is a list of *items* (names) and a function that measures one of them and yields its rows. The command that
the user starts measures nothing itself: it hands the items to a process of their own and prints the rows as they come.
A row that fails is a row with an error; a process that dies (a device that is lost, a machine without memory left)
costs the item at which it died, and another goes on with the rest. Compilations can be done ahead, several at once, by
processes that share the compiler's cache on disk and end before anything is timed. With `--minutes` a benchmark ends in
time: what would not fit is a row that says so.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import logging
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], Any]
Context = Callable[[], contextlib.AbstractContextManager[Any]]
Row = dict[str, Any]

PRECISIONS = ("fp32", "tf32", "bf16")
SLOW = 0.2
"""Seconds: a step that takes longer is measured fewer times."""
BUDGET = 4.0
"""Seconds that the rounds of slow steps may take together; two rounds are always made."""
FLOW = 5
"""Steps that follow each other in a turn on CUDA."""
ROW, DONE = "@row ", "@done "
"""How a measuring process marks what it says, apart from what libraries print."""
AGAIN = 75
"""Exit status of a process whose device is lost: the next item needs another one."""
LATE = "no time was left"
"""What stands in the place of a figure that would have taken longer than `--minutes`."""
COMPILING = 0.5
"""The part of the minutes that compiling ahead may take."""
FILLED = 0.85
"""The part of a device's memory that processes which compile at once may plan on."""
GUESS = 12.0
"""Seconds that a contender takes, as long as none has been timed."""


# Precision, time and memory.


def use(precision: str) -> None:
    """TF32 or not, for matrix products and convolutions; bf16 is autocast, with TF32 for what stays in float32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"


def casting(device: str, precision: str) -> Context:
    return lambda: torch.autocast(device, torch.bfloat16, enabled=precision == "bf16")


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(step: Step, device: str, times: int = 1) -> float:
    """Seconds of a step, of so many that follow each other without a wait."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / times


def turns(steps: Sequence[Step], device: str, rounds: int) -> list[list[float]]:
    """Seconds of each step, round by round, the steps taking turns. Slow ones are given fewer rounds.

    On CUDA a turn is a few steps, as in training: the host prepares one while the device still works on another.
    """
    first = [seconds(step, device) for step in steps]  # warm-up
    times = 1
    if max(first) > SLOW:
        rounds = max(2, min(rounds, int(BUDGET / sum(first))))
    else:
        times = FLOW if device == "cuda" else 1
        for step in steps:
            step()
    taken = [[seconds(step, device, times) for step in steps] for _ in range(rounds)]
    return [list(column) for column in zip(*taken, strict=True)]


def device_seconds(step: Step, device: str, rounds: int) -> tuple[float, float]:
    """Seconds of a step: (where it is computed, by the clock on the wall), the shortest; on the CPU they are the same.

    On CUDA the first is the time that the device was at work, by the profiler: of a single layer, starting the work may
    take longer than doing it.
    """
    (taken,) = turns([step], device, rounds)
    wall = min(taken)
    if device == "cpu":
        return wall, wall
    try:
        return busy(step, max(2, min(rounds, int(BUDGET / wall)))) or wall, wall
    except Exception as error:
        NOTES.said.append(f"by the clock on the wall: {complaint(error)}")
        return wall, wall


def busy(step: Step, count: int) -> float:
    """Seconds of CUDA kernels and copies in a step, by the profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    microseconds = sum(
        event.time_range.elapsed_us()
        for event in profiler.events() or []
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    )
    return 1e-6 * microseconds / count


def recorded(step: Step, cuda: bool) -> Step:
    """On CUDA, the step as a graph that is replayed: what it takes to start its kernels one by one is left out."""
    if not cuda:
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()

    def replay() -> Any:
        graph.replay()
        return outputs

    return replay


def release(device: str) -> None:
    """Give back the memory of everything that nobody holds any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    else:
        with contextlib.suppress(OSError, AttributeError):  # glibc only
            ctypes.CDLL(None).malloc_trim(0)


class Memory:
    """Memory of a step at its peak, in MiB: from before the model is made to the end of a step.

    On CUDA what the allocator has reserved (what a CUDA graph holds for itself counts too). On the CPU, where the
    compiler leaves its own memory behind, the model and the batch by their sizes and the rest as the growth of the
    process during the step (Linux only).
    """

    def __init__(self, device: str) -> None:
        self._device = device
        release(device)
        self._held = torch.cuda.memory_reserved() if device == "cuda" else 0

    def peak(self, step: Step, resident: Iterable[Tensor]) -> float | None:
        synchronize(self._device)
        release(self._device)
        if self._device == "cuda":
            step()
            torch.cuda.synchronize()
            return (torch.cuda.memory_reserved() - self._held) / 2**20
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
            before = _status("VmRSS")
            step()
            grown = _status("VmHWM") - before
        except OSError:
            return None
        return (grown + sum(t.numel() * t.element_size() for t in resident)) / 2**20


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field}")


def complaint(error: BaseException) -> str:
    """One line that says what went wrong. Lets go of the tensors that the error's frames hold."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text[:110]}"


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


# Processes.


def arguments(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="fp32", help=f"of {', '.join(PRECISIONS)}; several with commas between")
    parser.add_argument("--rounds", type=int, default=20, help="fewer are made of steps longer than 0.2 s")
    parser.add_argument("--only", default="", help="only what has one of these (commas between) in its name")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="compile ahead, N processes at once")
    parser.add_argument("--cache", type=Path, help="keep the compiler's cache here and use what is there already")
    parser.add_argument("--threads", type=int, help="of the CPU; as many as there are cores unless told")
    parser.add_argument("--markdown", action="store_true", help="print the table as GitHub markdown")
    parser.add_argument("--json", type=Path, help="also write the figures here, all of them after every row")
    parser.add_argument(
        "--minutes", dest="until", type=_until, default=math.inf, metavar="M", help="end within so many, from the start"
    )
    parser.add_argument("--items", help=argparse.SUPPRESS)  # what the measuring process is given
    parser.add_argument("--ahead", action="store_true", help=argparse.SUPPRESS)  # only compile
    parser.set_defaults(**defaults)
    return parser


def _until(minutes: str) -> float:
    """The time, by the clock that only goes forward, at which so many minutes from now are over."""
    return time.monotonic() + 60 * float(minutes)


def precisions(args: argparse.Namespace) -> list[str]:
    chosen = args.precision.split(",")
    unknown = sorted(set(chosen) - set(PRECISIONS))
    if unknown:
        raise SystemExit(f"--precision: {', '.join(unknown)} is none of {', '.join(PRECISIONS)}")
    return chosen


def wanted(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Every name that was asked for, at every precision: 'precision/name'."""
    chosen = [n for n in names if any(part in n for part in args.only.split(","))]
    return [f"{precision}/{n}" for precision in precisions(args) for n in chosen]


class Notes(logging.Handler):
    """What the library says about itself, such as that it could not compile."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        log = logging.getLogger("dpscale")
        log.addHandler(self)
        log.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage().removeprefix("dpscale: ")
        if not said.startswith("still "):
            self.said.append(said[:110])

    def take(self) -> Row:
        """All that was said since, and what of it is out of the ordinary."""
        said, self.said = self.said, []
        odd = [text for text in said if not text.startswith("ready")]
        return ({"said": said} if said else {}) | ({"note": odd[0]} if odd else {})


NOTES = Notes()


def insist_compiled() -> None:
    """An error if the library went on eagerly because it could not compile: the figure would bear a wrong name."""
    for text in NOTES.said:
        if "eagerly" in text:
            raise RuntimeError(text)


def insist_whole() -> None:
    """An error if a batch was divided because it did not fit beside what other processes hold."""
    for text in NOTES.said:
        if "do not fit into memory" in text:
            raise RuntimeError(f"out of memory: {text}")


def serve(args: argparse.Namespace, measure: Callable[[str], Iterator[Row]]) -> None:
    """The measuring process: the rows of every item, one line each, with what the library said meanwhile.

    It begins when it is told to on its standard input: until then it has only loaded its libraries.
    """
    if not sys.stdin.readline():  # whoever started it is gone, or has no time for it
        return
    warnings.filterwarnings("ignore")
    if args.threads:
        torch.set_num_threads(args.threads)
    for item in args.items.split(";"):
        NOTES.said.clear()
        try:
            for row in measure(item):
                _say(ROW, {"item": item, **NOTES.take(), **row})
        except Exception as error:
            _say(ROW, {"item": item, "error": complaint(error)})
        _say(DONE, item)
        try:
            torch._dynamo.reset()
            release(args.device)
            synchronize(args.device)
        except Exception:  # an error of the device stays with the process
            sys.exit(AGAIN)


def _say(mark: str, what: Any) -> None:
    print(f"\n{mark}{json.dumps(what)}", flush=True)  # on a line of its own, whatever a library has left open


@dataclass(frozen=True)
class Job:
    """What one process measures, or compiles.

    Attributes:
        items: the names.
        flags: options beside those of the command line; they count where both are given.
        parts: how many contenders it measures; its time is guessed from that.
        gib: about the memory of the device that it holds at its peak.
    """

    items: Sequence[str]
    flags: Sequence[str] = ()
    parts: int = 1
    gib: float = 0.0


def begun(job: Job, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """This very program in a process of its own, which waits to be told to measure."""
    command = [sys.executable, *sys.argv, *job.flags, "--items", ";".join(job.items)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, encoding="utf-8", env=dict(environment))


def dismissed(process: subprocess.Popen[str]) -> None:
    """It ends without having measured anything."""
    with process:
        process.communicate("")


def rows(
    job: Job, environment: Mapping[str, str], until: float = math.inf, ready: subprocess.Popen[str] | None = None
) -> Iterator[Row]:
    """The rows of a job, as measured by this very program in processes of its own, until time is over.

    Args:
        ready: a process for the job that has begun already.
    """
    left = list(job.items)
    while left and time.monotonic() < until:
        process, ready = ready or begun(Job(left, job.flags), environment), None
        late = threading.Timer(min(until - time.monotonic(), threading.TIMEOUT_MAX), process.kill)
        late.daemon = True
        with process:
            assert process.stdin is not None and process.stdout is not None
            late.start()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write("begin\n")
                process.stdin.close()
            for line in process.stdout:
                if line.startswith(ROW):
                    yield json.loads(line[len(ROW) :])
                elif line.startswith(DONE):
                    left.remove(json.loads(line[len(DONE) :]))
                elif line.strip():
                    print(line, end="", file=sys.stderr)
        late.cancel()
        if left and process.returncode != AGAIN and time.monotonic() < until:
            yield {"item": left.pop(0), "error": f"the measuring process died (exit status {process.returncode})"}
    yield from ({"item": item, "error": LATE} for item in left)


def in_turn(jobs: Sequence[Job], environment: Mapping[str, str], until: float = math.inf) -> Iterator[Row]:
    """The rows of jobs, one after the other, each in a process of its own: none inherits another's memory.

    While a job prepares itself, the process of the next loads its libraries. What would end too late is left out: it is
    guessed from the same model's time at another precision, or from the jobs before.
    """
    taken: dict[str, float] = {}  # seconds of a contender, by the name of the model
    ready: subprocess.Popen[str] | None = None
    for job, following in zip(jobs, [*jobs[1:], None], strict=True):
        model = job.items[0].split("/")[0]
        guess = job.parts * taken.get(model, statistics.fmean(taken.values()) if taken else GUESS)
        process, ready = ready or begun(job, environment), None
        if (left := until - time.monotonic()) < guess:
            dismissed(process)
            reason = f"{LATE}: it takes about {guess:.0f} s, and {max(0.0, left):.0f} s were left"
            yield from ({"item": item, "error": reason} for item in job.items)
            continue
        ready = following and begun(following, environment)
        start = time.monotonic()
        yield from rows(job, environment, until, process)
        taken[model] = (time.monotonic() - start) / job.parts
        print(f"  {';'.join(job.items)}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def ahead(jobs: Mapping[str, Job], environment: Mapping[str, str], args: argparse.Namespace) -> dict[str, list[Row]]:
    """Compile ahead: each job in a process of its own, some at once, in this order where their memory allows it.

    One that fails is tried again when the others are done: their memory may have been what it lacked. All of them have
    ended when this returns, and what they held on the device is free.
    """
    found: dict[str, list[Row]] = {}
    start, until = time.monotonic(), args.until
    until = min(until, start + COMPILING * (until - start)) if until < math.inf else until
    room = device_gib() * FILLED if args.device == "cuda" else math.inf

    def compile_one(job: str) -> None:
        begin = time.monotonic()
        found[job] = list(rows(Job(jobs[job].items, [*jobs[job].flags, "--ahead"]), environment, until))
        failed = [row["error"] for row in found[job] if "error" in row]
        took = f"{time.monotonic() - begin:.0f} s{f' ({failed[0]})' if failed else ''}"
        print(f"  compiled ahead: {job}, {took}", file=sys.stderr, flush=True)

    left, running = list(jobs), dict[Future[None], float]()
    with ThreadPoolExecutor(args.warm) as pool:
        while left or running:
            free = room - sum(running.values())
            fits = [job for job in left if not running or jobs[job].gib <= free]
            if fits and len(running) < args.warm:
                left.remove(fits[0])
                running[pool.submit(compile_one, fits[0])] = jobs[fits[0]].gib
            else:
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    del running[done]
                    done.result()
    starved = ("memory", "ALLOC_FAILED", "died")
    for job in [j for j, got in found.items() if any(word in r.get("error", "") for r in got for word in starved)]:
        compile_one(job)
    for timing in Path(environment["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.best_config"):
        timing.unlink()  # kernels that were tried out on a busy device: the timed process tries them again
    print(f"compiled ahead, {args.warm} at once: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    if args.device == "cuda":
        await_idle()
    return found


def measured(args: argparse.Namespace, items: Sequence[str]) -> Iterator[Row]:
    """The rows of the items, compiled ahead if that was asked for."""
    with compiler_cache(args) as environment:
        if args.warm:
            shares = [items[k :: args.warm] for k in range(min(args.warm, len(items)))]
            ahead({f"share {k + 1}": Job(share) for k, share in enumerate(shares)}, environment, args)
        yield from rows(Job(items), environment, args.until)


@contextlib.contextmanager
def compiler_cache(args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """The environment of measuring processes: a compiler's cache of their own, empty unless one was asked for."""
    with tempfile.TemporaryDirectory(prefix="dpscale-bench-") as fresh:
        directory = (args.cache or Path(fresh)).absolute()
        shared = {
            "TORCHINDUCTOR_CACHE_DIR": str(directory),
            "TRITON_CACHE_DIR": str(directory / "triton"),
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "PYTHONUTF8": "1",
        }
        if args.warm:  # the processes are many: each has its share of the cores
            shared["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, (os.cpu_count() or 1) // args.warm))
        yield dict(os.environ) | shared


# The device, asked from outside: the command that the user starts holds nothing on it.


def _device(query: str) -> list[str]:
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    return []


def device_gib() -> float:
    """Memory of the first device; of one that does not say so, none is counted."""
    return next((float(text) / 1024 for text in _device("gpu=memory.total")), math.inf)


def await_idle(patience: float = 15.0) -> None:
    """Wait until no process holds memory of the device; say so if some still do."""
    end = time.monotonic() + patience
    while (held := _device("compute-apps=pid,used_memory")) and time.monotonic() < end:
        time.sleep(0.5)
    if held:
        print(f"  still on the device (process, MiB): {'; '.join(held)}", file=sys.stderr, flush=True)


# What is printed.


def machine(args: argparse.Namespace) -> str:
    if args.device == "cuda":
        chip = next(iter(_device("gpu=name")), "CUDA")
    else:
        chip = f"{args.threads or torch.get_num_threads()} CPU threads"
    return f"torch {torch.__version__}, python {platform.python_version()}, {chip}, {args.precision}"


class Table:
    """Rows printed as they come, in columns or as markdown; kept for the JSON file, which is always complete.

    Args:
        columns: title -> (width, text of a row, or None where the row has no such figure).
        wide: how many leading columns name the row; an error stands in place of the others.
    """

    def __init__(
        self, args: argparse.Namespace, columns: Mapping[str, tuple[int, Callable[[Row], str | None]]], wide: int
    ) -> None:
        self._args, self._columns, self._wide = args, columns, wide
        self._rows: list[Row] = []
        self._line(list(columns))
        if args.markdown:
            self._line(["---"] * len(columns))

    def add(self, row: Row) -> None:
        self._rows.append(row)
        cells = [text(row) or "-" for _, text in list(self._columns.values())[: self._wide]]
        if "error" in row:
            cells += [row["error"], *[""] * (len(self._columns) - self._wide - 1)]
        else:
            cells += [text(row) or "-" for _, text in list(self._columns.values())[self._wide :]]
        self._line(cells)
        if self._args.json:
            about = {"command": sys.argv, "torch": torch.__version__, "machine": machine(self._args)}
            whole = self._args.json.with_suffix(".part")  # whoever is stopped while writing leaves the rows before
            whole.write_text(json.dumps(about | {"rows": self._rows}, indent=1))
            whole.replace(self._args.json)

    def _line(self, cells: list[str]) -> None:
        if self._args.markdown:
            print("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |", flush=True)
            return
        padded = [
            f"{cell:<{width}}" if k < self._wide else f"{cell:>{width}}"
            for k, (cell, (width, _)) in enumerate(zip(cells, self._columns.values(), strict=True))
        ]
        print(" ".join(padded).rstrip(), flush=True)


def figure(key: str, form: str) -> Callable[[Row], str | None]:
    """A cell: the row's ``key``, in a format such as '.2f'."""
    return lambda row: format(row[key], form) if row.get(key) is not None else None


def median_ratio(ours: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Median and quartiles of the ratio, round by round."""
    ratios = sorted(a / b for a, b in zip(ours, base, strict=True))
    return statistics.median(ratios), ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
