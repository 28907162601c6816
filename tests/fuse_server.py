"""A program of its own that mounts a folder by FUSE, read-only, and counts the requests of the kernel.

``python fuse_server.py SOURCE TARGET`` speaks the kernel's protocol itself, so it needs no library, but the right to
mount. It prints "mounted", and then answers commands on its standard input: ``report`` prints the requests so far as
JSON and forgets them, ``fail NUMBER`` lets all further reads fail with this errno, ``delay SECONDS`` delays each read.
It ends when its input ends.
"""

import ctypes
import errno
import json
import os
import struct
import sys
import threading
import time

LOOKUP, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, ACCESS = (
    1, 3, 14, 15, 17, 18, 25, 26, 27, 28, 29, 34,
)  # fmt: skip
FORGETS = (2, 36, 42)  # FORGET, INTERRUPT, BATCH_FORGET: they have no answer
NAMES = {1: "lookup", 3: "getattr", 14: "open", 15: "read", 27: "opendir", 28: "readdir"}
VALID = 3600  # seconds for which the kernel keeps names and attributes
MAX_PAGES = 1 << 22  # a flag of INIT: requests may be larger than 128 KiB
BUFFER = 1 << 21


class Server:
    def __init__(self, source: str, fd: int) -> None:
        self.source, self.fd = source, fd
        self.paths = {1: ""}
        self.nodes = {"": 1}
        self.open: dict[int, int] = {}
        self.log: list[tuple[str, str, int, int]] = []
        self.error, self.delay = 0, 0.0

    def full(self, path: str) -> str:
        return os.path.join(self.source, path) if path else self.source

    def node(self, path: str) -> int:
        if path not in self.nodes:
            self.nodes[path] = len(self.nodes) + 1
            self.paths[self.nodes[path]] = path
        return self.nodes[path]

    def attributes(self, path: str) -> bytes:
        s = os.lstat(self.full(path))
        seconds = [at // 10**9 for at in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
        rest = [at % 10**9 for at in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
        numbers = (self.node(path), s.st_size, s.st_blocks, *seconds, *rest)
        return struct.pack("<6Q3I7I", *numbers, s.st_mode, s.st_nlink, s.st_uid, s.st_gid, 0, 4096, 0)

    def answer(self, code: int, node: int, body: bytes) -> bytes:
        path = self.paths.get(node, "")
        offset = size = 0
        if code == LOOKUP:
            path = os.path.join(path, os.fsdecode(body.rstrip(b"\0")))
        elif code in (READ, READDIR):
            fh, offset, size = struct.unpack_from("<QQI", body)
        if code in NAMES:
            self.log.append((NAMES[code], path, offset, size))
        if code == INIT:
            _, minor, ahead, flags = struct.unpack_from("<4I", body)
            return struct.pack(
                "<4IHHIIHHI28x", 7, min(minor, 31), ahead, flags & (1 | MAX_PAGES), 12, 9, 1 << 17, 1, 256, 0, 0
            )
        if code == LOOKUP:
            found = self.attributes(path)
            return struct.pack("<4Q2I", self.node(path), 0, VALID, VALID, 0, 0) + found
        if code == GETATTR:
            return struct.pack("<QII", VALID, 0, 0) + self.attributes(path)
        if code in (OPEN, OPENDIR):
            fd = os.open(self.full(path), os.O_RDONLY)
            self.open[fd] = fd
            return struct.pack("<QII", fd, 0, 0)
        if code == READ:
            if self.error:
                raise OSError(self.error, "")
            time.sleep(self.delay)
            return os.pread(fh, size, offset)
        if code == READDIR:
            return self.entries(path, offset, size)
        if code in (RELEASE, RELEASEDIR):
            os.close(struct.unpack_from("<Q", body)[0])
            return b""
        if code in (FLUSH, ACCESS):
            return b""
        if code == STATFS:
            return struct.pack("<5Q4I24x", 1, 0, 0, 1, 0, 4096, 255, 4096, 0)
        raise OSError(errno.ENOSYS, "")

    def entries(self, path: str, offset: int, size: int) -> bytes:
        found = b""
        for n, name in enumerate(sorted(os.listdir(self.full(path)))):
            if n < offset:
                continue
            inner = os.path.join(path, name)
            kind = 4 if os.path.isdir(self.full(inner)) else 8
            raw = os.fsencode(name)
            entry = struct.pack("<QQII", self.node(inner), n + 1, len(raw), kind) + raw
            entry += bytes(-len(entry) % 8)
            if len(found) + len(entry) > size:
                break
            found += entry
        return found

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self.fd, BUFFER)
            except OSError as e:
                if e.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return  # it is not mounted any more
            _, code, unique, node = struct.unpack_from("<IIQQ", request)
            if code in FORGETS:
                continue
            number, data = 0, b""
            try:
                data = self.answer(code, node, request[40:])
            except OSError as e:
                number = e.errno or errno.EIO
            try:
                os.write(self.fd, struct.pack("<IiQ", 16 + len(data), -number, unique) + data)
            except OSError as e:
                if e.errno != errno.ENOENT:  # the request was interrupted
                    return


def main() -> None:
    source, target = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    flags = 1 | 2 | 4  # read-only, no set-user-id programs, no devices
    if libc.mount(b"test", os.fsencode(target), b"fuse.test", flags, options.encode()):
        raise SystemExit(os.strerror(ctypes.get_errno()))
    server = Server(source, fd)
    threading.Thread(target=server.serve, daemon=True).start()
    print("mounted", flush=True)
    try:
        for line in sys.stdin:
            word, _, value = line.strip().partition(" ")
            if word == "report":
                print(json.dumps(server.log), flush=True)
                server.log = []
            elif word == "fail":
                server.error = int(value)
                print("done", flush=True)
            elif word == "delay":
                server.delay = float(value)
                print("done", flush=True)
    finally:
        libc.umount2(os.fsencode(target), 2)


if __name__ == "__main__":
    main()
