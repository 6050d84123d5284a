"""Break the library on purpose, one place at a time, and see which breakages no test notices.

    python benchmarks/breakages.py                                # all, one after the other
    python benchmarks/breakages.py --processes 14 --only verify   # those whose area, file or name has this in it
    python benchmarks/breakages.py --list                         # what they are; checks that each fits the code

`breakages.toml` has them: an area, which says what tests should notice, a file, a name, the text that is there, once,
and what to put in its place. One that no longer fits the code is an error: it would be left out unseen.

Each process works in a copy of the repository. First all tests involved run there unbroken, and must pass (where a
package is missing, leave tests out: ``PYTEST_ADDOPTS="-k 'not peft'"``). Then each breakage is put in, its tests run
until one fails, and it is taken out. A run that takes far longer than unbroken is ended, and counts as noticed.

What survives is to be looked at by a person, who adds a test, or says in the list (``about``) why there can be none:
some checks stand behind others. The exit status is 1 if anything survived of which that is not said.
"""

import argparse
import ast
import contextlib
import importlib.util
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

ROOT = Path(__file__).parents[1]
SOURCE = Path("src/dpscale")
NEEDED = (
    "src", "tests", "experiments", "docs", "examples", "benchmarks", "pyproject.toml", "constraints.txt", "mkdocs.yml",
    "Makefile", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE",
)  # fmt: skip
"""What tests read."""

SLOWER, LEAST = 5, 120
"""A run is ended after so many times what its tests took unbroken, and so many seconds besides."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Breakage:
    """A place to break: a ``text`` in a ``file`` under src/dpscale, what to ``put`` there, and the tests to notice."""

    name: str
    area: str
    file: str
    text: str
    put: str
    tests: tuple[str, ...]
    about: str = ""  # why none can

    def broken(self, code: str) -> str:
        """The code of its file with it; refuses to break what is not there."""
        if (times := code.count(self.text)) != 1:
            raise SystemExit(f"{self.name!r} does not fit: its text is {times} times in {self.file}. Correct it.")
        broken = code.replace(self.text, self.put)
        if ast.dump(ast.parse(broken)) == ast.dump(ast.parse(code)):
            raise SystemExit(f"{self.name!r} breaks nothing in {self.file}. Correct it.")
        return broken


@dataclass(frozen=True)
class Ran:
    """What a run of tests showed: the first that ``failed``, or how it ended otherwise; None if all pass."""

    failed: str | None
    seconds: float
    output: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="at once, of one core each; default: 1")
    parser.add_argument("--only", default="", help="those whose area, file or name has this in it")
    parser.add_argument("--list", action="store_true", help="what they are, and no more")
    args = parser.parse_args()
    every = breakages()
    for each in every:  # the others, too, so that whoever changes the code hears of it
        each.broken((ROOT / SOURCE / each.file).read_text())
    chosen = [each for each in every if any(args.only in words for words in (each.area, each.file, each.name))]
    if not chosen:
        raise SystemExit(f"No breakage has {args.only!r} in its area, file or name.")
    if args.list:
        for each in chosen:
            print(f"{each.area:10} {each.file:30} {each.name}")
        print(f"{len(chosen)} breakages, and each fits the code")
        return
    with (
        tempfile.TemporaryDirectory(prefix="dpscale-breakages-") as folder,
        Copies(Path(folder).resolve(), args.processes) as copies,
    ):
        survived = found(copies, chosen)
    sys.exit(1 if any(not each.about for each in survived) else 0)


def breakages() -> list[Breakage]:
    """All that are known."""
    known = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    tests = known.pop("tests")
    return [
        Breakage(**{**each, "tests": tuple(each.get("tests", tests[area]))}, area=area, file=file, name=name)
        for area, files in known.items()
        for file, places in files.items()
        for name, each in places.items()
    ]


def found(copies: "Copies", chosen: Sequence[Breakage]) -> list[Breakage]:
    """Those that no test noticed; says how each went."""
    begin, results = time.perf_counter(), dict[Breakage, Ran]()
    took = unbroken(copies, dict.fromkeys(test for each in chosen for test in each.tests))

    def ran(each: Breakage, copy: Path) -> Ran:
        return run(copies, copy, each.tests, SLOWER * sum(took[test] for test in each.tests) + LEAST, each)

    for each, result in copies.each(ran, chosen):
        results[each] = result
        told = "survived" if result.failed is None else f"noticed by {result.failed}"
        print(f"{each.area:10} {each.name} ({result.seconds:.0f} s): {told}", flush=True)
    print(f"\n{'area':10} {'breakages':>9} {'noticed':>8} {'survived':>8} {'minutes':>8}")
    for area in dict.fromkeys(each.area for each in chosen):
        own = [result for each, result in results.items() if each.area == area]
        lost, minutes = sum(each.failed is None for each in own), sum(each.seconds for each in own) / 60
        print(f"{area:10} {len(own):9} {len(own) - lost:8} {lost:8} {minutes:8.1f}")
    print()
    survived = [each for each in chosen if results[each].failed is None]
    for each in survived:
        print(f"SURVIVED {each.area}, {each.file}: {each.name}{each.about and f' ({each.about})'}")
    print(f"{len(survived)} of {len(chosen)} survived; it took {(time.perf_counter() - begin) / 60:.1f} minutes")
    return survived


def unbroken(copies: "Copies", tests: Iterable[str]) -> dict[str, float]:
    """Seconds that each of these takes; ends everything where one fails, for then a failure would mean nothing."""
    took: dict[str, float] = {}
    for test, result in copies.each(lambda test, copy: run(copies, copy, [test]), tests):
        print(f"unbroken {test} ({result.seconds:.0f} s): {result.failed or 'passes'}", flush=True)
        if result.failed is not None:
            raise SystemExit(f"{result.output}\n{test} fails without any breakage.")
        took[test] = result.seconds
    return took


class Copies:
    """Copies of the repository, each for one run at a time. Nothing is left running when a block with them ends."""

    def __init__(self, folder: Path, count: int) -> None:
        self._free: queue.Queue[Path] = queue.Queue()
        self._pool, self._ended = ThreadPoolExecutor(count), False
        self._running: set[subprocess.Popen[bytes]] = set()
        for copy in (folder / str(k) for k in range(count)):
            for name in NEEDED:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
                elif (ROOT / name).exists():
                    shutil.copy2(ROOT / name, copy / name)
            self._free.put(copy)
        _, where = self.python(copy, ["-c", "import dpscale; print(dpscale.__file__)"])
        if str(copy) not in where:
            raise SystemExit(f"Python takes dpscale from elsewhere than the copy: {where}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True
        for process in list(self._running):
            _kill(process)
        self._pool.shutdown(cancel_futures=True)

    def each(self, do: Callable[[T, Path], Ran], things: Iterable[T]) -> Iterator[tuple[T, Ran]]:
        """Do it to each thing, in some copy; how it went, as it comes."""

        def one(thing: T) -> Ran:
            copy = self._free.get()
            try:
                return do(thing, copy)
            finally:
                self._free.put(copy)

        waiting = {self._pool.submit(one, thing): thing for thing in things}
        for future in as_completed(waiting):
            yield waiting[future], future.result()

    def python(self, copy: Path, args: Sequence[str], limit: float | None = None) -> tuple[int | None, str]:
        """Run Python in a copy, on one core; its exit status, or None if it had to be ended, and what it said."""
        path = os.pathsep.join([str(copy / "src"), str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
        # No bytecode is kept: a file that is broken and mended within a second would be taken for the same.
        own = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        status = None
        with (copy / "output.txt").open("w+") as said:
            process = subprocess.Popen(
                [sys.executable, *args], cwd=copy, env={**os.environ, **own}, stdin=subprocess.DEVNULL, stdout=said,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            self._running.add(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = None if self._ended else process.wait(limit)
            _kill(process)
            self._running.discard(process)
            said.seek(0)
            return status, said.read()


def run(
    copies: Copies, copy: Path, tests: Sequence[str], limit: float | None = None, breakage: Breakage | None = None
) -> Ran:
    """Run tests until one fails, with a breakage or without."""
    serial = ["-n", "0"] if importlib.util.find_spec("xdist") else []
    begin, file = time.perf_counter(), copy / SOURCE / (breakage.file if breakage else "__init__.py")
    code = file.read_text()
    file.write_text(breakage.broken(code) if breakage else code)
    try:
        args = ["-m", "pytest", "-x", "-q", *serial, "-p", "no:cacheprovider", "--tb=short", *tests]
        status, output = copies.python(copy, args, limit)
    finally:
        file.write_text(code)
    seconds = time.perf_counter() - begin
    if not status:
        return Ran(None if status == 0 else "did not end", seconds, output)
    if status < 0:
        return Ran(f"ended by {signal.Signals(-status).name}", seconds, output)
    first = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)
    if status not in (1, 2) or first is None:  # 2: a module of tests could not be imported
        raise SystemExit(f"{output}\npytest ended with status {status}, and no test failed.")
    return Ran(first[1], seconds, output)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started, and left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
