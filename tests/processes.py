"""Processes for the tests that kill some, or need several: forked from one that has imported torch once.

`Nursery` starts that one when it is first needed. What runs in a process is a function of a module, which is imported
before the fork, so it costs its import once. A forked process ends as Python does, with all that is done at its exit.
"""

import array
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from .remembered import remember_rdp

ROOT = Path(__file__).parents[1]
HANGS = 3600
"""Seconds after which a process is ended: nothing here takes minutes, but a machine may be busy."""


def environment(**more):
    """For Python in a process of its own: this tree, one thread, and no warnings of other libraries."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **more}


@contextlib.contextmanager
def group_of(world):
    """The environment variables of each rank of a group, as torchrun sets them.

    Their port stays bound as long as they run, so that nobody else is given it; torch binds it too, and listens.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1]), "WORLD_SIZE": str(world),
                  "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "tests"}  # fmt: skip
        yield [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


class Process:
    """One that was forked. Its output and its errors are read when it has ended; ``say`` and ``hear`` talk to it."""

    def __init__(self, nursery, pid, stdin, stdout, stderr):
        self._nursery, self.pid, self._stdin, self._stdout, self._stderr = nursery, pid, stdin, stdout, stderr

    def say(self, line):
        self._stdin.write(line + "\n")
        self._stdin.flush()

    def hear(self):
        return self._stdout.readline().rstrip("\n")

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def end(self):
        """Wait for it: (what `subprocess` calls its return code, what it printed, its errors)."""
        self._stdin.close()
        printed = self._stdout.read()
        code = os.waitstatus_to_exitcode(self._nursery.ask({"wait": self.pid}))
        self._stdout.close()
        self._stderr.seek(0)
        with self._stderr:
            return code, printed, self._stderr.read()


class Nursery:
    """Forks processes on request."""

    def __init__(self):
        self._parent = self._socket = None

    def _begin(self):
        self._socket, other = socket.socketpair()
        command = [sys.executable, "-c", "from tests.processes import serve; serve()", str(other.fileno())]
        self._parent = subprocess.Popen(command, cwd=ROOT, env=environment(), pass_fds=[other.fileno()])
        other.close()

    def ask(self, request, files=()):
        """Send a request, and the numbers of open files with it; its answer is a number."""
        if self._parent is None:
            self._begin()
        message = json.dumps(request).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        self._socket.sendmsg([len(message).to_bytes(4, "big")], rights)
        self._socket.sendall(message)
        return int.from_bytes(_exactly(self._socket, 4), "big")

    def start(self, function, *arguments, **variables):
        """A process that runs ``module:function`` with arguments of JSON, under these environment variables."""
        module, name = function.split(":")
        request = {"module": module, "name": name, "arguments": arguments, "variables": variables}
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read when the process has ended)
        (stdin, to), (out, stdout) = os.pipe(), os.pipe()
        pid = self.ask(request, [stdin, stdout, errors.fileno()])
        os.close(stdin)
        os.close(stdout)
        return Process(self, pid, open(to, "w"), open(out), errors)

    def run(self, function, *arguments, **variables):
        """The same, to its end."""
        return self.start(function, *arguments, **variables).end()

    def ranks(self, world, function, *arguments):
        """So many, as torchrun would start them, to their ends, which must be good ones."""
        with group_of(world) as variables:
            started = [self.start(function, *arguments, **own) for own in variables]
            for code, _, errors in [process.end() for process in started]:
                assert code == 0, errors[-4000:]

    def close(self):
        if self._parent is not None:
            self._socket.close()
            self._parent.wait()


def _exactly(connection, count):
    found = b""
    while len(found) < count:
        found += (more := connection.recv(count - len(found)))
        if not more:
            raise EOFError("the process that forks the others has ended")
    return found


def _next_request(connection):
    """The next one to be run in a fork, in that fork, with its files; None in the end."""
    while True:
        head, rights, *_ = connection.recvmsg(4, socket.CMSG_SPACE(3 * 4))
        if not head:
            return None
        request = json.loads(_exactly(connection, int.from_bytes(head + _exactly(connection, 4 - len(head)), "big")))
        if "wait" in request:
            answer = os.waitpid(request["wait"], 0)[1]
        else:
            files = array.array("i", rights[0][2])
            importlib.import_module(request["module"])
            if (answer := os.fork()) == 0:
                connection.close()
                return request, files
            for file in files:
                os.close(file)
        connection.sendall(answer.to_bytes(4, "big"))


def serve():
    """Fork whatever is asked for; in the fork, run it."""
    remember_rdp()
    importlib.import_module("torch._dynamo")  # the first optimizer of a process would import it, for seconds
    found = _next_request(socket.socket(fileno=int(sys.argv[1])))
    if found is None:
        return
    request, files = found
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    signal.alarm(HANGS)
    os.environ.update(request["variables"])
    getattr(sys.modules[request["module"]], request["name"])(*request["arguments"])
