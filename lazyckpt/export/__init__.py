"""From lazy tensors to files, in bounded memory.

`stream` moves the bytes, `destination` makes the files appear together, `shards` says what goes into which file,
`files` brings these together, and a module for each format lays a file out.
"""
