"""Linux calls that Python 3.11 does not offer: namespaces, mounts, capabilities, system call filters.

Only the standard library is imported: this runs inside a jail.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Iterable

NEW_MOUNTS, NEW_CGROUP, NEW_UTS, NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEW_USER, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000

READ_ONLY, NO_SUID, NO_DEVICES = 0x1, 0x2, 0x4  # of mount and of mount_setattr alike
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 0x1000, 0x4000, 1 << 18, 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 4, 24, 38, 22

# What these calls are numbered on x86-64 and on ARM64. Denied to everything in a jail, beside what the rights of an
# ordinary user without a network already deny: sockets (a virtual machine's AF_VSOCK knows no namespaces), memory that
# RLIMIT_AS does not count (shmget, memfd_create), namespaces (a fresh one could mount file systems in memory) and parts
# of the kernel that are seldom needed and often broken.
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
DENIED = {
    # name: (x86-64, ARM64)
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "shmget": (29, 194),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # what a program may do to process 1 of its jail where both belong to the same user
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
}
SLEEP = {"nanosleep": (35, 101), "clock_nanosleep": (230, 115)}
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    _checked(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def make_mounts_private() -> None:
    _checked(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None), "make mounts private")


def mount_memory(path: str, mib: int, inodes: int) -> None:
    """An empty file system of at most `mib` MiB that vanishes with its last namespace."""
    options = f"size={mib}m,nr_inodes={inodes},mode=0777".encode()
    flags = ctypes.c_ulong(NO_SUID | NO_DEVICES)
    _checked(_libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", flags, options), f"mount tmpfs on {path}")


def mount_processes(path: str) -> None:
    """The processes of this namespace alone."""
    flags = ctypes.c_ulong(NO_SUID | NO_DEVICES)
    _checked(_libc.mount(b"proc", os.fsencode(path), b"proc", flags, None), f"mount proc on {path}")


def bind(source: str, target: str) -> None:
    flags = ctypes.c_ulong(_BIND | _RECURSIVE)
    _checked(_libc.mount(os.fsencode(source), os.fsencode(target), None, flags, None), f"bind {source}")


def restrict(path: str, flags: int, recursive: bool = True) -> None:
    """Add READ_ONLY, ... to the mount at `path` and those below. Linux 5.12."""
    attributes = struct.pack("=QQQQ", flags, 0, 0, 0)
    at = ctypes.c_uint(_AT_RECURSIVE if recursive else 0)
    size = ctypes.c_size_t(len(attributes))
    call = ctypes.c_long(_MOUNT_SETATTR)
    done = _libc.syscall(call, ctypes.c_int(_AT_FDCWD), os.fsencode(path), at, attributes, size)
    _checked(done, f"mount_setattr {path}")


def pivot_root(new: str, below: str) -> None:
    """Make `new` the root; nothing of the old one stays reachable. `below` is an empty folder of `new`."""
    call = ctypes.c_long(_PIVOT_ROOT[platform.machine()])
    _checked(_libc.syscall(call, os.fsencode(new), os.fsencode(f"{new}/{below}")), "pivot_root")
    os.chdir("/")
    _checked(_libc.umount2(os.fsencode(f"/{below}"), ctypes.c_int(_DETACH)), "umount the old root")


def _prctl(option: int, value: int, *more: object) -> None:
    _checked(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), *(more or (0, 0, 0))), f"prctl({option})")


def die_with_parent() -> None:
    """Be killed when the thread that started this process ends."""
    _prctl(_PR_SET_PDEATHSIG, 9)


def hide_memory() -> None:
    """No other process of the same user may trace this one."""
    _prctl(_PR_SET_DUMPABLE, 0)


def drop_capabilities() -> None:
    """None is left, and none can be had again by running a program."""
    for capability in range(64):
        if _libc.prctl(ctypes.c_int(_PR_CAPBSET_DROP), ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # beyond the last one, or no right to drop: the next two lines suffice
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = struct.pack("=Ii", 0x20080522, 0)
    _checked(_libc.capset(header, bytes(24)), "capset")


def deny(calls: Iterable[tuple[int, int]], processes: bool = True) -> None:
    """From now on these system calls, numbered (x86-64, ARM64), fail with EPERM; without `processes` new ones too.

    Threads stay possible. Another instruction set of the same processor is answered by a kill.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURE:
        raise OSError(f"no system call filter for {machine}: x86_64 and aarch64 are known")
    numbers = [pair[0 if machine == "x86_64" else 1] for pair in calls]
    load, equal, at_least, any_set, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, absent, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000

    def line(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    program = [line(load, 4), line(equal, _ARCHITECTURE[machine], 1), line(answer, kill), line(load, 0)]
    if machine == "x86_64":
        program += [line(at_least, 0x40000000, 0, 1), line(answer, kill)]  # x32 numbers the calls anew
    for number in numbers:
        program += [line(equal, number, 0, 1), line(answer, refuse)]
    # limits of other processes: of process 1, say
    program += [line(equal, _PRLIMIT[machine], 0, 4), line(load, 16), line(equal, 0, 1), line(answer, refuse)]
    program.append(line(load, 0))
    if not processes:
        # clone is a new process unless CLONE_THREAD is set; what clone3 does cannot be seen: the C library uses clone
        program += [line(equal, _CLONE3, 0, 1), line(answer, absent)]
        program += [line(equal, _CLONE[machine], 0, 3), line(load, 16), line(any_set, 0x10000, 1), line(answer, refuse)]
        program += [line(load, 0)]
        if machine == "x86_64":
            for number in (57, 58):  # fork, vfork
                program += [line(equal, number, 0, 1), line(answer, refuse)]
    program.append(line(answer, allow))
    code = b"".join(program)
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_ = struct.pack("=HxxxxxxQ", len(program), ctypes.addressof(buffer))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _checked(_libc.prctl(ctypes.c_int(_PR_SET_SECCOMP), ctypes.c_ulong(2), filter_, 0, 0), "seccomp")
