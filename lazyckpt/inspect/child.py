"""A program of its own that hashes many small tensors of a file. It imports nothing but the standard library.

`small` starts it, once for each core, because the interpreter's lock lets the threads of one process hash one small
tensor at a time. It is a new process, not a fork, so no lock of the other threads is ever copied.

Input: a line of JSON (the descriptor of the open file, the number of tensors, the hash inputs before the contents of
each kind of tensor, in hexadecimal), then three arrays: the offsets of the tensors in the file, ascending, as int64;
their sizes in bytes, and the numbers of their kinds, as int32. Output: the SHA-256 of each tensor.
"""

import json
import os
import sys
from array import array
from hashlib import sha256

WINDOW = 4 << 20  # bytes that are read at a time
GAP = 64 << 10  # bytes; smaller gaps between tensors are read along


def hashed(fd: int, offsets: "array[int]", sizes: "array[int]", kinds: "array[int]", heads: "list[bytes]") -> bytes:
    """Return the hashes of tensors of at most WINDOW bytes, one after the other. Raises EOFError for a short file."""
    begun = [sha256(head).copy for head in heads]
    memory = memoryview(bytearray(WINDOW))
    found = []
    n, count = 0, len(offsets)
    while n < count:
        low = high = offsets[n]
        last = n
        while last < count and offsets[last] - high <= GAP and offsets[last] + sizes[last] - low <= WINDOW:
            high = max(high, offsets[last] + sizes[last])
            last += 1
        at = low
        while at < high:
            got = os.preadv(fd, [memory[at - low : high - low]], at)
            if not got:
                raise EOFError
            at += got
        for start, size, kind in zip(offsets[n:last], sizes[n:last], kinds[n:last]):
            one = begun[kind]()
            one.update(memory[start - low : start - low + size])
            found.append(one.digest())
        n = last
    return b"".join(found)


def main() -> None:
    """Read the input, write the hashes."""
    source = sys.stdin.buffer
    about = json.loads(source.readline())
    count = about["count"]
    columns = array("q"), array("i"), array("i")
    for column in columns:
        column.frombytes(source.read(count * column.itemsize))
    sys.stdout.buffer.write(hashed(about["fd"], *columns, list(map(bytes.fromhex, about["heads"]))))


if __name__ == "__main__":
    main()
