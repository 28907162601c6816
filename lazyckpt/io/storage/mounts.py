"""Which folders are on a network file system, and how files on one are read.

A request to a file server takes 0.2 to 1 ms, one to a bucket that is mounted by FUSE 20 ms and more; a system call for
a cached page of a local disk takes a microsecond. A mapping of a file on a server requests page after page, and an
error of the server or a replaced file ends in SIGBUS. So files of network file systems are read and never mapped: by
few, large requests, in the order of the file, with the system's read-ahead.

The type of a file system is that in ``/proc/self/mountinfo``. Where this file is missing (macOS, Windows), all count as
local; ``io="network"`` says otherwise.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from ...errors import DataError

MODES = ("auto", "map", "read", "network")
_GAP = 256 << 10  # bytes; about as many as 1 GB/s transfer in 0.25 ms, the time of a request to a file server
_FAR_GAP = 1 << 20  # bytes; the same for a mounted bucket: 50 MB/s in 20 ms
_NETWORK = {
    "9p", "acfs", "afpfs", "afs", "beegfs", "ceph", "cifs", "coda", "cvmfs", "daos", "fhgfs", "gpfs", "lustre", "mmfs",
    "ncpfs", "nfs", "nfs3", "nfs4", "orangefs", "panfs", "prl_fs", "pvfs2", "smb2", "smb3", "smbfs", "sshfs", "vboxsf",
    "vmhgfs", "wekafs",
}  # fmt: skip
# Programs that mount local disks, archives and layers by FUSE. What is not listed here counts as a network.
_LOCAL_FUSE = {
    "apfs", "archivemount", "bindfs", "cryfs", "encfs", "exfat", "ext2", "fuse-archive", "fuse-overlayfs", "gocryptfs",
    "lxcfs", "mergerfs", "ntfs", "ntfs-3g", "portal", "securefs", "squashfuse", "squashfuse_ll", "unionfs", "zfs",
}  # fmt: skip
_NEAR_FUSE = {"beegfs", "ceph", "dfuse", "daos", "glusterfs", "moosefs", "mfs", "lizardfs", "sshfs", "vmhgfs-fuse"}

_accesses: dict[int, Access] = {}  # by device: a process sees few, and a look takes a read of mountinfo


class Access(NamedTuple):
    """How the files of a file system are read.

    Attributes
    ----------
    maps
        Whether files are mapped.
    gap
        The largest gap in bytes between two wanted runs that is cheaper to read than a second request; 0 on a local
        disk.
    """

    maps: bool
    gap: int


LOCAL = Access(True, 0)


def mode_of(io: str) -> str:
    """Return the mode that a user asked for: ``io`` or, if that is "auto", what the variable ``LAZYCKPT_IO`` says.
    Raises DataError if there is no such mode."""
    mode = os.environ.get("LAZYCKPT_IO") or "auto" if io == "auto" else io
    if mode not in MODES:
        given = f"io={io!r}" if io != "auto" else f"LAZYCKPT_IO={mode}"
        raise DataError(f"{given}: there is no such way to read files. Choose one of: {', '.join(MODES)}")
    return mode


def access(mode: str, path: str, device: int) -> Access:
    """Return how to read a file or folder, given the number of its device (``st_dev``)."""
    if mode == "map":
        return LOCAL
    if mode == "network":
        return Access(False, _GAP)
    found = _accesses.get(device)
    if found is None:
        found = _accesses[device] = _of_type(type_of(path, device))
    return found._replace(maps=False) if mode == "read" else found


def type_of(path: str, device: int) -> str:
    """Return the type of the file system that has a file or folder, as mountinfo spells it, such as "ext4", "nfs4" or
    "fuse.sshfs"; "" if the system does not tell."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return ""
    number = b"%d:%d" % (os.major(device), os.minor(device))
    mounts = [(before, after) for before, dash, after in (line.partition(b" - ") for line in lines) if dash]
    for before, after in reversed(mounts):
        if before.split(b" ", 3)[2] == number:
            return os.fsdecode(after.split(b" ", 1)[0])
    # btrfs and overlays have devices that mountinfo does not list: the mount that is nearest above the path
    here = os.fsencode(os.path.realpath(path))
    best, kind = -1, b""
    for before, after in mounts:
        point = re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), before.split(b" ")[4])
        if len(point) >= best and (point == b"/" or here == point or here.startswith(point + b"/")):
            best, kind = len(point), after.split(b" ", 1)[0]
    return os.fsdecode(kind)


def _of_type(kind: str) -> Access:
    """Return how to read files of a type of file system.

    >>> [_of_type(kind).maps for kind in ("ext4", "nfs4", "lustre", "fuseblk", "fuse.fuse-overlayfs", "fuse.gcsfuse")]
    [True, False, False, True, True, False]
    """
    name, _, program = kind.lower().partition(".")
    if name == "fuse" and program not in _LOCAL_FUSE:
        return Access(False, _GAP if program in _NEAR_FUSE else _FAR_GAP)
    return Access(False, _GAP) if name.split("_")[0] in _NETWORK or name in _NETWORK else LOCAL
