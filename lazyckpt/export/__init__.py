"""The output formats: write lazy tensors to files in bounded memory.

A format is a module with a `writer.Writer`, whose ``plan`` determines all files and bytes, and a line in `registry`.
The engine in `lazyckpt.jobs` executes the plan: it streams runs of bytes, resumes, verifies and publishes. The formats
of weights share `files`, all that write torch.save files share `torch`, and those with optimizers and metadata share
`training`.
"""
