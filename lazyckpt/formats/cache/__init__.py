"""The index cache: the indexes of large checkpoints, in files of the user's cache folder.

Opening a checkpoint of a thousand ranks reads a thousand headers and pickles. The index that results is a function of
the files, so it is written to the cache folder, and the next opening, also of another process, reads it from there.

- `opening` is what `formats/opening.py` calls: find an index, keep an index.
- `state` decides which checkpoints are worth it, and whether a checkpoint is still the one that was indexed.
- `folder` holds the files: owner, permissions, authentication, size limit. It knows nothing of their content.
- `entries` turns an index into the sections of a file and back; `tables` does so for tensors, `values` for objects.

A file of the cache consists of

    8 bytes    "LZCKIDX" and the version of the layout
    32 bytes   HMAC-SHA256 of all that follows, with a key that only the user can read
    the rest   a safetensors file: columns of numbers and text; ``__metadata__["about"]`` describes them as JSON

Nothing in it is a pickle, and nothing of it is used before the code of authentication is verified. docs/explanation/
security.md says what is promised.
"""
