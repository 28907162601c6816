"""From lazy tensors to files, in bounded memory: the output formats.

A format is a module with a `writer.Writer`, whose ``plan`` says which files and bytes there will be, and a line in
`registry`. The engine of `lazyckpt.jobs` carries the plan out: it streams runs of bytes, resumes, verifies, publishes.
`files` is shared by the formats of weights, `torch` by all that write files of torch.save, `training` by those with
optimizers and metadata.
"""
