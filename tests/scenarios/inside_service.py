"""Try, from inside the service's own sandbox, what it must not do and what compilers need; say how it ended.

The test of the edge runs it as a step of the unit before the engine, on the node.
"""

import ctypes
import mmap
import os
import pathlib
import socket
import subprocess

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWUSER = 0x10000000
PTRACE_ATTACH = 16


def attempt(name, action, *arguments):
    """Run it and say its answer, `works`, or the error that the kernel gave."""
    try:
        said = action(*arguments)
    except OSError as error:
        said = os.strerror(error.errno)
    print("inside", name, said if isinstance(said, str) else "works", flush=True)


def write(path):
    pathlib.Path(path).write_text("x")


def reach(address):
    # A datagram, since a connection would only time out.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"x", address)


def names_in(folder):
    return {path.name for path in pathlib.Path(folder).iterdir()}


def call(name, *arguments):
    if getattr(LIBC, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


def seen(names):
    return ",".join(sorted(names)) or "nothing"


def foreign_processes():
    """Processes of other users that can be seen."""
    pids = filter(str.isdigit, names_in("/proc"))
    return seen(pid for pid in pids if pathlib.Path("/proc", pid).stat().st_uid != os.getuid())


def machine_code():
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()


def compiled_kernel():
    """Write a program into the cache and run it, as a compiler at run time does."""
    program = pathlib.Path(os.environ["CACHE_DIRECTORY"], "inside.sh")
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o700)
    subprocess.run([str(program)], check=True)
    program.unlink()


def memory():
    """The policy that the service starts with, in numactl's words."""
    done = subprocess.run(["numactl", "--show"], stdout=subprocess.PIPE, check=True, text=True)
    return done.stdout.splitlines()[0]


def bound_process():
    """Start a process on one NUMA node as the engine does for each GPU: by a script in /tmp."""
    program = pathlib.Path("/tmp/inside.sh")
    program.write_text("#!/bin/sh\nexec numactl --cpunodebind=0 --membind=0 true\n")
    program.chmod(0o700)
    subprocess.run([str(program)], check=True)
    program.unlink()


attempt("etc", write, "/etc/inside")
attempt("engine", write, "/opt/sglang/current/engine/inside")
attempt("models", write, "/srv/models/inside")
attempt("home", lambda: seen(names_in("/home")))
attempt("engine_key", lambda: pathlib.Path("/etc/sglang/credentials/engine-key").read_text() and None)
attempt("client_keys", lambda: pathlib.Path("/etc/nginx/sglang/clients.map").read_text() and None)
attempt("packets", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close())
attempt("outside", reach, ("10.99.7.2", 8470))
attempt("namespace", call, "unshare", CLONE_NEWUSER)
attempt("mount", call, "mount", b"none", b"/tmp", b"tmpfs", 0, None)
attempt("trace", call, "ptrace", PTRACE_ATTACH, os.getppid(), None, None)
attempt("devices", lambda: seen({"mem", "kmsg", "fuse", "sda", "vda", "kvm"} & names_in("/dev")))
attempt("others", foreign_processes)
attempt("machine_code", machine_code)
attempt("compiled_kernel", compiled_kernel)
attempt("threads", lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)))
attempt("memory", memory)
attempt("bound_process", bound_process)
